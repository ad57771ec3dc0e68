"""``halfeven selftest`` as scripts use it: exit code, JSON, and the store that it leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
from halfeven.exporters.on_device.environment import environment
from halfeven.exporters.torch.autocast import folding
from halfeven.models.version import __version__
from halfeven.serve.cli.doctor import examine
from halfeven.serve.cli.main import app
from halfeven.serve.selftest import selftest
from halfeven.serve.selftest.nets import CPU, Net, captured_net
from typer.testing import CliRunner

from tests.corpus import captured
from tests.planting import plant
from tests.serve.selftest.planted import one_bit_off


@pytest.fixture
def captured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "NAMES", ("mlp",))
    monkeypatch.setattr(
        selftest, "captured_net", lambda name: Net(name, *_spec_and_program(captured(f"zoo {name}")))
    )


def _spec_and_program(model: Any) -> tuple[Any, Any]:
    return model.spec, model.program


def run(store: Path, *more: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["selftest", "--device", "cpu", "--store", str(store), "--json", *more])
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


def selftest_row(store: Path) -> dict[str, str]:
    return next(check for check in examine(store)["checks"] if check["what"] == "selftest cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("captured_before")
def test_what_fails_is_3_named_in_json_and_by_the_doctor_and_cleared_by_a_selftest_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selftest_row(tmp_path)["found"] == "not run"
    with monkeypatch.context() as planted:
        plant(
            planted,
            folding._rounded,
            "known[key].as_strided(weight.shape, weight.stride(), 0)",
            "_one_bit_off(known[key]).as_strided(weight.shape, weight.stride(), 0)",
            _one_bit_off=one_bit_off,
        )
        code, facts = run(tmp_path, "--out", str(tmp_path / "found.json"))
    assert code == 3 and facts["status"] == "failed" and list(facts["off"]) == ["torch half"]
    assert facts["environment"] == environment(CPU) and facts["halfeven"] == __version__ and facts["date"]
    # torch's own type compares as numbers, and raises where a damaged file has 5,000 digits
    assert type(environment(CPU)["torch"]) is str
    assert json.loads((tmp_path / "found.json").read_text()) == facts
    outcomes = {check["check"]: check["status"] for check in facts["checks"]}
    assert outcomes.pop("bit equality with live autocast") == "failed" and set(outcomes.values()) == {
        "not applicable"
    }
    row = selftest_row(tmp_path)
    assert "switched off: torch half" in row["found"] and "differs from live autocast's" in row["advice"]
    code, facts = run(tmp_path)
    assert code == 0 and facts["status"] == "passed" and facts["off"] == {}
    assert selftest_row(tmp_path)["found"].startswith("passed on") and selftest_row(tmp_path)["advice"] == ""


def test_a_device_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["selftest", "--device", "cuda:7", "--store", str(tmp_path)])
    assert done.exit_code == 2 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_net_of_the_zoo_is_captured_on_the_spot() -> None:
    net = captured_net("lstm")
    assert net.loops and len(net.expected([net.batch(2, 1)])[0][0]) == 3
