"""The command line as scripts use it: exit codes, and one JSON object as the last line on stdout."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.store.store import Store
from halfeven.models.version import __version__
from halfeven.serve.cli.main import app
from halfeven.serve.versions.orders import drifted, note_drift
from typer.testing import CliRunner

from tests.command_line import overflowing, run
from tests.model_folders import LINEAR, tensor, write_folder


@pytest.mark.slow
def test_a_half_that_overflows_is_refused_with_exit_3_and_passes_once_its_nodes_are_kept(
    tmp_path: Path,
) -> None:
    folder, store = overflowing(tmp_path / "overflows"), tmp_path / "store"
    code, facts, _ = run("convert", folder, "--store", store, "--level", "O3", "--form", "torch")
    assert code == 3
    assert facts["status"] == "refused"
    assert facts["forms"]["torch"]["passed"] is False
    assert "path" not in facts["forms"]["torch"]
    assert Store(store).live_number("overflows") is None

    arguments = ("convert", folder, "--store", store, "--level", "O3", "--form", "torch", "--keep", "norm")
    code, facts, _ = run(*arguments)
    assert code == 0
    assert facts["version"] == 2
    assert facts["status"] == "live"
    form = facts["forms"]["torch"]
    assert {kept["op"] for kept in form["kept"]} >= {"mean", "sqrt", "div"}
    assert all("norm" in kept["reason"] for kept in form["kept"])
    assert 0 < form["half_nodes"] < form["nodes"]
    assert (store / form["path"]).is_file()
    assert form["max_error_u"] <= 4.0

    again = run(*arguments)[1]
    assert again["version"] == 2, "an unchanged folder makes no new version"
    code, facts, _ = run(*arguments[:-2], "--search")
    assert (code, facts["forms"]["torch"]["passed"]) == (0, True), "the search finds what it needs"


DEEP = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        return self.deeper(x, 9)
    def deeper(self, x, steps):
        if steps:
            return self.deeper(x, steps - 1)
        return torch.nn.functional.linear(x, torch.zeros(3, 99))
def build():
    return Net()
"""


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def build():\n    raise RuntimeError('no such layer')\n", "no such layer"),
        (DEEP, "cannot be multiplied"),
    ],
)
def test_a_model_that_cannot_be_captured_ends_with_exit_4_four_lines_and_a_file(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = write_folder(tmp_path / "broken", code)
    ended, facts, reply = run("convert", folder, "--store", tmp_path / "store")
    assert ended == 4 and words in facts["error"]
    lines = reply.partition(words)[2].splitlines()[1:]
    *frames, where = lines
    assert 1 <= len(frames) <= 4 and "model.py" in frames[0]
    assert "Traceback (most recent call last)" in Path(where.rpartition(" in ")[2]).read_text()
    assert not list((tmp_path / "store").rglob("*.pt2"))
    assert Store(tmp_path / "store").names() == []


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "m", "x.npy"), ("finetune", "m", "--data", "x.npy"), ("status",), ("canary", "m"),
        ("shadow", "m"), ("load", "m"), ("unload", "m"), ("jobs",), ("cancel", "j"),
        ("job-metrics", "j", "--mlflow", "r"),
        ("bench", "http://127.0.0.1:9", "m"),
    ],
)  # fmt: skip
def test_where_no_server_answers_every_command_ends_with_1(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("halfeven.serve.access.direct_requests._PAUSE_S", 0.0)
    np.save(tmp_path / "x.npy", np.zeros((1, 4), np.float32))
    code, facts, _ = run(*words, *(() if words[0] == "bench" else ("--url", "http://127.0.0.1:9")))
    assert (code, facts["code"]) == (1, "not_ready")
    assert "is `halfeven serve` running there?" in facts["error"]


def test_bad_input_ends_with_exit_2_and_names_what_is_wrong(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", LINEAR, levle="O1")
    code, facts, _ = run("convert", folder, "--store", tmp_path / "store")
    assert code == 2
    assert "levle" in facts["error"]
    assert run("convert", tmp_path / "nothing", "--store", tmp_path / "store")[0] == 2
    assert run("convert", folder, "--store", tmp_path / "store", "--form", "tensorrt")[0] == 2
    assert run("rollback", "nobody", "--store", tmp_path / "store")[0] == 2
    assert run("parity", "nobody", "--store", tmp_path / "store")[0] == 2


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A small model without samples, in both forms."""
    where = tmp_path_factory.mktemp("converted")
    folder = write_folder(where / "net", LINEAR)
    report = where / "report.html"
    code, facts, _ = run("convert", folder, "--store", where / "store", "--report", report)
    assert code == 0
    assert "<html" in report.read_text()
    return where / "store", facts


@pytest.mark.slow
def test_the_facts_of_a_conversion_are_those_of_the_contract(converted: tuple[Path, dict[str, Any]]) -> None:
    store, facts = converted
    assert facts["model"] == "net"
    assert facts["version"] == 1
    assert set(facts["forms"]) == {"torch", "onnx"}
    for form in facts["forms"].values():
        wanted = {
            "passed",
            "max_error_u",
            "sqnr_db",
            "nodes",
            "half_nodes",
            "fp32_by_policy",
            "kept",
            "casts",
        }
        assert wanted | {"bytes", "bytes_fp32", "path", "digest"} <= set(form)
        assert form["bytes"] * 2 == form["bytes_fp32"]
        assert (store / form["path"]).is_file()
    assert facts["digest"] == facts["forms"]["torch"]["digest"]
    manifest = Store(store).version("net", 1).manifest
    assert {"original.pt2", "original.onnx", "half.pt2", "half.onnx", "weights.safetensors"} <= set(
        manifest["files"]
    )
    assert "source/model.py" in manifest["files"]


@pytest.mark.slow
def test_a_changed_signature_must_be_meant(converted: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    store = shutil.copytree(converted[0], tmp_path / "store")
    folder = write_folder(tmp_path / "net", outputs=[tensor("z", "FP32", [-1, 3])])
    code, facts, _ = run("convert", folder, "--store", store, "--form", "torch")
    assert code == 2
    assert "--new-signature" in facts["error"]
    assert run("convert", folder, "--store", store, "--form", "torch", "--new-signature")[0] == 0
    assert Store(store).live_number("net") == 2


@pytest.mark.slow(seconds=5)
def test_parity_judges_a_version_of_the_store_again_with_other_samples(
    converted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    store, facts = converted
    version = Store(store).version("net", 1)
    note_drift(version, "cpu", "far off")
    np.savez(tmp_path / "easy.npz", x=np.ones((4, 4), np.float32))
    assert run("parity", "net@1", "--store", store, "--samples", tmp_path / "easy.npz")[0] == 0
    assert drifted(version, "cpu") == "far off", "what samples of anybody's show is no proof of the version"
    code, again, _ = run("parity", "net@1", "--store", store)
    assert code == 0 and drifted(version, "cpu") is None
    assert again["forms"]["torch"]["max_error_u"] == pytest.approx(facts["forms"]["torch"]["max_error_u"])
    np.savez(tmp_path / "huge.npz", x=np.full((4, 4), 1e6, np.float32))
    code, again, _ = run(
        "parity", "net", "--store", store, "--samples", tmp_path / "huge.npz", "--device", "cpu"
    )
    assert code == 3, "inputs that half cannot hold must not pass"
    assert again["forms"]["torch"]["passed"] is False


def test_saved_numbers_are_judged_under_other_limits_without_running_the_model(
    converted: tuple[Path, dict[str, Any]],
) -> None:
    store, facts = converted
    error = facts["forms"]["torch"]["max_error_u"]
    code, strict, _ = run("parity", "net@1", "--store", store, "--limit", f"max_error_u={error / 2}")
    assert code == 3 and strict["forms"]["torch"]["passed"] is False
    code, lenient, _ = run("parity", "net@1", "--store", store, "--limit", f"max_error_u={error * 2}")
    assert code == 0 and lenient["forms"]["torch"]["passed"] is True
    code, refused, _ = run("parity", "net@1", "--store", store, "--limit", "max_eror_u=1")
    assert code == 2 and "max_error_u" in refused["error"]


@pytest.mark.slow
def test_parity_ends_with_exit_0_where_every_form_that_can_be_made_is_equal(tmp_path: Path) -> None:
    """ONNX Runtime's CPU provider has no bf16 kernels: what cannot be made was not refused."""
    folder = write_folder(tmp_path / "net", LINEAR, precision={"level": "mixed_bfloat16"})
    store = tmp_path / "store"
    code, facts, _ = run("convert", folder, "--store", store)
    assert code == 0 and "error" in facts["forms"]["onnx"]
    ends = {form: run("convert", folder, "--store", store, "--form", form)[0] for form in ("auto", "both")}
    assert ends == {"auto": 0, "both": 4}
    for words in (("net", "--limit", "max_error_u=4"), ("net",), (folder,)):
        code, again, _ = run("parity", *words, "--store", store)
        assert (code, again["forms"]["torch"]["passed"]) == (0, True)
        assert again["forms"]["onnx"]["passed"] is False


def test_options_that_cannot_hold_together_are_refused_by_name(
    converted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    store, _ = converted
    folder = write_folder(tmp_path / "net", LINEAR)
    limit = ("--limit", "max_error_u=1")
    for words, sentence in (
        (("parity", folder, *limit), "is a model folder"),
        (("parity", "net", *limit, "--samples", tmp_path / "none"), "--limit runs nothing"),
        (("parity", "net", *limit, "--device", "cuda:7"), "--limit runs nothing"),
        (("parity", folder, "--device", "tpu"), "tpu"),
        (("convert", folder, "--level", "mixed_bfloat16", "--dtype", "fp16"), "dtype says fp16"),
    ):
        code, facts, _ = run(*words, "--store", store)
        assert code == 2 and sentence in facts["error"]


def test_models_lists_versions_and_rollback_needs_one_to_go_back_to(
    converted: tuple[Path, dict[str, Any]],
) -> None:
    store, _ = converted
    code, facts, _ = run("models", "--store", store)
    assert code == 0
    assert [version["version"] for version in facts["models"]["net"]] == [1]
    code, facts, _ = run("rollback", "net", "--store", store)
    assert (code, facts["code"]) == (2, "conflict")
    assert "no version before 1" in facts["error"] and "halfeven promote net@NUMBER" in facts["error"]


def test_promote_makes_a_version_active_by_hand(
    converted: tuple[Path, dict[str, Any]],
) -> None:
    store, _ = converted
    code, facts, _ = run("promote", "net@1", "--store", store)
    assert (code, facts["version"]) == (0, 1)
    for target in ("net", "net@7", "net@", "net@x", "nobody@1"):
        assert run("promote", target, "--store", store)[0] == 2


@pytest.mark.slow
def test_a_program_without_a_half_node_is_published_in_fp32(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", LINEAR)
    code, facts, _ = run(
        "convert", folder, "--store", tmp_path / "store", "--level", "float32", "--form", "torch"
    )
    assert code == 0
    form = facts["forms"]["torch"]
    assert form["half_nodes"] == 0
    assert form["path"].endswith("original.pt2")


def test_serve_does_not_listen_beyond_this_machine_unless_told_to() -> None:
    code, facts, _ = run("serve", "--host", "0.0.0.0")
    assert code == 2
    assert "--expose-without-auth" in facts["error"]
    assert run("serve", "--port", "99999")[0] == 2
    assert run("serve", "--device", "tpu")[0] == 2


@pytest.mark.slow
def test_the_doctor_says_what_this_machine_has() -> None:
    code, facts, _ = run("doctor")
    assert code == 0
    found = {check["what"]: check["found"] for check in facts["checks"]}
    assert found["torch"].startswith("2.")
    assert "CPUExecutionProvider" in found["onnxruntime"]


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"halfeven {__version__}\n")
