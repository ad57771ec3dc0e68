"""``halfeven export`` and ``halfeven prove --against``: honest engines pass, others are refused, each by exit code."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.exported.other_engine import OtherEngine, prove_engine
from halfeven.exporters.inputs.samples import stored_samples
from halfeven.exporters.proof.prove import answers_of
from halfeven.models.engines.load import load_half
from halfeven.models.store.store import Store
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings

from tests.command_line import overflowing, run
from tests.digits import digits_that_ask_for_torch
from tests.kept import kept_store
from tests.patience import PATIENCE_S
from tests.recurrent import recurrent_folder
from tests.serve.conftest import running

# A conversion and processes of their own.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_setup")]


def _convert(where: Path) -> None:
    store = Store(Path(shutil.copytree(digits_that_ask_for_torch(), where / "store")))
    convert(recurrent_folder(where / "gru"), store, Options(forms=("torch",)))
    convert(overflowing(where / "loud"), store, Options(forms=("torch",), level="O3"))


@pytest.fixture(scope="module")
def store() -> Path:
    """``digits`` in both forms, ``gru`` (its state has the batch on axis 1), ``loud`` (refused)."""
    return kept_store(__file__, _convert) / "store"


@pytest.fixture(scope="module")
def folder(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported digits."""
    folder = tmp_path_factory.mktemp("exported") / "digits"
    code, facts, _ = run("export", "digits", folder, "--for", "tensorrt", "--store", store)
    assert code == 0 and facts["model"] == "digits" and facts["exported"]["for"] == "tensorrt"
    return folder


def proven(target: object, against: object, *more: object) -> tuple[int, dict[str, Any], str]:
    return run("prove", target, "--against", against, *more)


def answers(folder: Path, **changes: np.ndarray) -> Path:
    """FP32's own answers as an engine's, with changes."""
    np.savez(folder / "answers.npz", **{**np.load(folder / "expected.npz"), **changes})
    return folder / "answers.npz"


def test_the_report_names_the_engine_the_samples_the_verdict_and_the_worst_row(folder: Path) -> None:
    code, facts, _ = proven(folder, folder / "half.onnx")
    assert code == 0 and facts["status"] == "equal" and facts["model"] == "digits" and facts["version"] == 1
    engine = facts["engine"]
    assert (engine["kind"], engine["where"]) == ("ONNX Runtime", str(folder / "half.onnx"))
    assert engine["asked"]["batch_sizes"] == [1, 2, 3, 64] and engine["asked"]["adversarial"] > 0
    assert facts["samples"]["judging"] == len(np.load(folder / "expected.npz")["logits"]) > 64
    (form,) = facts["forms"].values()
    assert form["passed"] and 0 < form["max_error_u"] < 4
    assert facts["worst"]["output"] == "logits" and facts["worst"]["row"] % 2 == 0
    assert facts["worst"]["error_u"] == form["max_error_u"]


def test_a_folder_and_the_version_of_the_store_give_the_same_verdict(store: Path, folder: Path) -> None:
    of_folder, of_store = (
        proven(target, folder / "half.onnx", "--store", store)[1] for target in (folder, "digits@1")
    )
    assert of_folder["status"] == of_store["status"] == "equal"
    one, other = (next(iter(facts["forms"].values())) for facts in (of_folder, of_store))
    assert one["max_error_u"] == pytest.approx(other["max_error_u"], rel=0.01)


def test_the_torch_form_is_no_false_alarm(store: Path) -> None:
    for version in (Store(store).version("digits", 1), Store(store).version("gru", 1)):
        engine = load_half(version, "torch", torch.device("cpu"))
        other = OtherEngine("torch form", "half.pt2", answers_of(version.spec(), engine))
        assert prove_engine(version, stored_samples(version), other)["status"] == "equal"


def test_our_own_server_over_http_is_no_false_alarm(store: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(store, tmp_path / "store"))
    app, roster = build(read_settings(store=root, device="cpu"), Store(root))
    with running(app, seconds=30) as address:
        roster.wait(PATIENCE_S)
        for name, url in (
            ("digits", f"http://{address}"),
            ("digits@1", f"http://{address}/v2/models/digits/versions/1"),
            ("gru", f"http://{address}/"),
        ):
            code, facts, said = proven(name, url, "--store", root)
            assert code == 0 and facts["status"] == "equal", said
            assert facts["engine"]["kind"] == "V2 server" and facts["engine"]["where"].startswith(
                f"http://{address}/v2"
            )
        assert proven("digits", f"http://{address}/v2/models/gru", "--store", root)[0] != 0


def test_a_file_of_answers_is_judged_and_a_wrong_one_is_refused_with_its_worst_row(folder: Path) -> None:
    expected = np.load(folder / "expected.npz")["logits"]
    code, facts, _ = proven(folder, answers(folder))
    assert code == 0 and facts["engine"]["asked"] == {"batch_sizes": None, "adversarial": 0}
    wrong = expected.copy()
    wrong[7] *= 1.5
    code, facts, _ = proven(folder, answers(folder, logits=wrong))
    assert code == 3 and facts["status"] == "refused"
    assert facts["worst"]["sample"] == 7 and facts["worst"]["row"] == 14, "every second sample judges"
    assert proven(folder, answers(folder, logits=wrong.astype(np.float16)))[0] == 3
    assert proven(folder, answers(folder, more=wrong))[0] == 3


def test_a_sabotaged_file_is_refused_in_words_about_an_engine(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(folder / "half.onnx")
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 4)
    stale = onnx.numpy_helper.to_array(weight) * np.float16(1.05)
    weight.CopyFrom(onnx.numpy_helper.from_array(stale, weight.name))
    onnx.save(model, tmp_path / "stale.onnx")
    code, facts, _ = proven(folder, tmp_path / "stale.onnx")
    (form,) = facts["forms"].values()
    messages = [failure["message"] for failure in form["parity"]["failures"]]
    assert code == 3 and any("errs by" in message for message in messages)
    assert not any("--keep" in message or "report it" in message for message in messages)
    assert "--keep" not in form["parity"]["summary"]


def test_a_file_with_other_rows_is_bad_input(folder: Path) -> None:
    expected = np.load(folder / "expected.npz")["logits"]
    code, facts, _ = proven(folder, answers(folder, logits=expected[:-1]))
    assert code == 2 and f"expected {len(expected)} rows" in facts["error"]


def test_what_is_named_wrongly_ends_with_exit_2(store: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.plan").write_bytes(b"x")
    for target, against in (
        ("nobody", folder / "half.onnx"),
        (folder, tmp_path / "nothing.onnx"),
        (folder, tmp_path / "engine.plan"),
        (folder, "ftp://127.0.0.1/model"),
    ):
        assert proven(target, against, "--store", store)[0] == 2, against
    assert proven(folder, folder / "half.onnx", "--timeout", 0, "--store", store)[0] == 2
    assert run("export", "digits", folder, "--for", "tensorrt", "--store", store)[0] == 2, "it is not empty"
    assert run("export", "digits", tmp_path / "out", "--for", "tvm", "--store", store)[0] == 2


def test_an_engine_that_does_not_answer_is_no_verdict(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    assert proven(folder, tmp_path / "broken.onnx")[0] == 1
    code, facts, _ = proven(folder, "http://127.0.0.1:9", "--timeout", 5)
    assert code == 1 and "no answer from http://127.0.0.1:9/v2" in facts["error"]


def test_a_refused_version_is_not_exported(store: Path, tmp_path: Path) -> None:
    code, facts, _ = run("export", "loud", tmp_path / "out", "--for", "tensorrt", "--store", store)
    assert code == 3 and "refused by the parity gate" in facts["error"] and not (tmp_path / "out").exists()
