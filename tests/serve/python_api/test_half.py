"""The Python API beyond the block of its page: one converted module, looked at, called, saved and served."""

import gc
import io
import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import halfeven as he
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.engines.true_fp32 import settings_kept
from halfeven.models.errors import (
    BadFolder,
    BadInput,
    BadSamples,
    BadSetting,
    EngineFailed,
    ExportFailed,
    NotReady,
    Overloaded,
    ParityRefused,
    UnknownName,
)
from halfeven.models.store.store import LIVE, REFUSED
from halfeven.serve.access.direct_requests import ask
from halfeven.serve.python_api import half as half_file
from halfeven.serve.python_api import serving
from torch import nn

from tests.model_folders import write_folder
from tests.patience import PATIENCE_S

ROWS = 24


class TwoInputs(nn.Module):
    """Two inputs and two outputs, of which one is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        answer = self.last(self.table(ids) * scale)
        return {"answer": answer, "length": ids * 2}


def drawn(rows: int) -> dict[str, np.ndarray]:
    scale = np.random.normal(size=(rows, 4)).astype(np.float32)
    return {"ids": np.random.randint(0, 7, rows), "scale": scale}


@pytest.fixture(scope="module")
def half() -> Iterator[he.Half]:
    half = he.convert(TwoInputs(), samples=drawn(ROWS))
    yield half
    half.close()


@pytest.fixture(autouse=True)
def _fast(plain_setup: None) -> None:
    """Each load takes the plain setup."""


@pytest.mark.slow
def test_the_half_says_what_was_found(half: he.Half) -> None:
    assert half.verdict == "equal"
    assert half.max_error_u is not None and 0 < half.max_error_u < 4
    assert half.name == "twoinputs"
    assert "answer" in str(half) and repr(half) == str(half)
    page = half._repr_html_()
    assert page.startswith("<iframe") and "&lt;html" in page and "<html" not in page


@pytest.mark.slow
def test_kept_nodes_come_with_their_reasons() -> None:
    given = {"x": np.random.normal(size=(ROWS, 4)).astype(np.float32)}
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    meant = {"keep_io_types": True, "low_precision_type": "fp16"}
    kept = he.convert(net, samples=given, op_types_to_exclude=["linear"], **meant).kept
    assert len(kept) == 2 and all(one.op == "linear" and one.reason for one in kept)
    same = he.convert(net, samples=given, nodes_to_exclude=["op:linear"], name="other")
    assert same.kept == kept and same.verdict == "fp32"  # tanh is FP32 by its list


@pytest.mark.slow
def test_inputs_are_given_in_order_by_name_or_as_a_dictionary(half: he.Half) -> None:
    given = drawn(5)
    answers = half(given)
    assert list(answers) == ["answer", "length"]
    np.testing.assert_array_equal(answers["length"], given["ids"] * 2)
    for other in (
        half(given["ids"], given["scale"]),
        half(given["ids"], scale=given["scale"]),
        half(**given),
    ):
        np.testing.assert_array_equal(other["answer"], answers["answer"])


@pytest.mark.slow
def test_the_gate_asks_a_half_in_requests_of_its_size_and_in_its_datatypes() -> None:
    net = nn.Linear(4, 3).eval()
    half = he.convert(net, samples={"x": np.random.normal(size=(ROWS, 4))})
    rows = half.version.spec().max_request_rows + 1
    he.assert_half_equal(net, half, samples=np.random.normal(size=(rows, 4)))
    half.close()


@pytest.mark.slow
def test_a_half_that_is_closed_beside_calls_answers_them_and_is_loaded_again(half: he.Half) -> None:
    given, going = drawn(5), threading.Event()
    first, answers = half(given), list[dict[str, np.ndarray]]()

    def calls() -> None:
        while not going.is_set():
            answers.append(half(given))

    callers = [threading.Thread(target=calls, daemon=True) for _ in range(3)]
    for caller in callers:
        caller.start()
    for _ in range(8):
        half.close()
    going.set()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert not any(caller.is_alive() for caller in callers) and answers
    assert all(np.array_equal(answer["answer"], first["answer"]) for answer in answers)


@pytest.mark.slow
def test_a_forked_process_leaves_the_half_to_its_parent() -> None:
    code = """
import os, sys
import halfeven as he, numpy as np
from halfeven.models.errors import NotReady
from torch import nn
half = he.convert(nn.Linear(4, 3), samples={"x": np.random.normal(size=(24, 4))})
x = np.ones((2, 4), np.float32)
before = half(x)
if not (child := os.fork()):
    try:
        half(x)
    except NotReady as error:
        sys.exit(7 if "close the half before the fork" in str(error) else 1)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert half.store.root.is_dir() and np.array_equal(half(x), before)
half.close()
assert np.array_equal(half(x), before)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_prove_and_fp16_say_what_they_take(tmp_path: Path) -> None:
    for wrong in (
        lambda: he.prove(3, against="x"),  # type: ignore[arg-type]
        lambda: he.prove("net", against="x", samples=np.ones(3)),  # type: ignore[arg-type]
        lambda: he.fp16(tmp_path / "net.onnx", tmp_path / "half.onnx", 3),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadInput, match=r"expected .*, got a (int|ndarray)"):
            wrong()


@pytest.mark.slow
def test_fp16_takes_the_datatype_that_the_folder_asks_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", precision={"dtype": "bf16"})
    with pytest.raises(ExportFailed, match="Could not find an implementation for Gemm"):  # in bf16
        he.fp16(folder, tmp_path / "half.onnx")
    assert he.fp16(folder, tmp_path / "half.onnx", dtype="fp16").verdict == "equal"


def test_torch_in_is_torch_out_and_the_answer_is_the_callers_own(half: he.Half) -> None:
    given = drawn(5)
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    answers = half(tensors)
    assert all(isinstance(one, torch.Tensor) for one in answers.values())
    before = half(given)["answer"]
    np.testing.assert_array_equal(answers["answer"].numpy(), before)
    answers["answer"].zero_()
    np.testing.assert_array_equal(half(given)["answer"], before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_half_with_several_threads_ends_those_that_torch_keeps_for_the_caller(
    half: he.Half, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside them each of its batches would take up to twice as long: it is measured against torch in one program."""
    half(drawn(1))
    running, ended = half._running, list[int]()
    assert running is not None
    monkeypatch.setattr(running.prepared, "setup", CpuSetup(threads))
    monkeypatch.setattr(half_file, "end_openmp_threads", lambda: ended.append(threading.get_ident()))
    half(drawn(1))
    assert ended == [threading.get_ident()] * (threads - 1)


def test_more_rows_than_a_batch_are_answered(half: he.Half) -> None:
    rows = half.version.spec().max_batch_size + 3
    assert half(drawn(rows))["answer"].shape == (rows, 3)


@pytest.mark.parametrize(
    ("inputs", "named", "words"),
    [
        ((1, 2, 3), {}, "takes the inputs ids, scale"),
        ((np.zeros(1, np.int64),), {"ids": np.zeros(1, np.int64)}, "each once"),
        ((np.zeros(1, np.int64),), {}, "scale"),
        ((np.zeros(1, np.int64), np.zeros((1, 5), np.float32)), {}, "scale"),
        ((np.array([7]), np.zeros((1, 4), np.float32)), {}, "ids"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(
    half: he.Half, inputs: tuple[Any, ...], named: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        half(*inputs, **named)


def test_a_saved_half_is_the_same_version_and_saving_twice_makes_the_next(
    half: he.Half, tmp_path: Path
) -> None:
    first, second = half.save(tmp_path), half.save(tmp_path)
    assert [str(first.version), str(second.version)] == ["twoinputs@1", "twoinputs@2"]
    assert first.digest == second.digest == half.digest == he.load(tmp_path, "twoinputs").digest
    assert he.load(tmp_path, "twoinputs@1").version.number == 1
    assert first.store.live_number("twoinputs") == 2
    with pytest.raises(UnknownName):
        he.load(tmp_path, "others")


@pytest.mark.slow
def test_a_half_is_saved_beside_a_damaged_version(half: he.Half, tmp_path: Path) -> None:
    """The message about a damaged version advises a new conversion, whose version must be saved beside it."""
    (half.save(tmp_path).version.folder / "manifest.json").write_text("{")
    saved = half.save(tmp_path)
    assert saved.version.number == 2 and saved.store.live_number("twoinputs") == 2


@pytest.mark.slow
def test_a_half_with_another_signature_is_not_saved_over_the_model(half: he.Half, tmp_path: Path) -> None:
    given = {"x": np.random.normal(size=(ROWS, 4)).astype(np.float32)}
    he.convert(nn.Linear(4, 2), samples=given, name="twoinputs").save(tmp_path)
    with pytest.raises(BadInput, match="signature"):
        half.save(tmp_path)


@pytest.mark.slow
def test_a_store_of_its_own_is_removed_with_the_half() -> None:
    given = {"x": np.random.normal(size=(ROWS, 4)).astype(np.float32)}
    half = he.convert(nn.Linear(4, 2), samples=given)
    place = half.store.root
    assert place.is_dir()
    half(given)
    del half
    gc.collect()
    assert not place.exists()


@pytest.mark.slow
def test_a_conversion_leaves_the_settings_of_the_process_as_they_were() -> None:
    logger, level = logging.getLogger("torch.onnx"), logging.getLogger("torch.onnx").level
    with settings_kept():
        torch.set_float32_matmul_precision("high")
        given = {"x": np.random.normal(size=(ROWS, 4)).astype(np.float32)}
        he.convert(nn.Linear(4, 2), samples=given, form="onnx").close()
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cuda.matmul.allow_tf32
    assert logger.level == level


@pytest.mark.slow
def test_a_refused_half_has_a_report_and_is_not_run(tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = self.wide(x) * 2000
            return self.head(wide / (wide.square().mean(-1, keepdim=True) + 1.0).sqrt())

    given = {"x": np.random.normal(size=(ROWS, 4)).astype(np.float32)}
    half = he.convert(Large(), samples=given, level="O3")
    assert half.verdict == "refused" and half.version.status == REFUSED and "refused" in str(half)
    with pytest.raises(ParityRefused, match="refused"):
        half(given)
    assert half.save(tmp_path).store.live_number("large") is None


@pytest.mark.slow
def test_the_served_answer_has_the_bits_of_the_call(half: he.Half, tmp_path: Path) -> None:
    given = drawn(7)
    with he.serve(half, port=0) as server:
        client = he.Client(server.url)
        served, alone = client.infer("twoinputs@1", given), half(given)
        predicted = client.predict("twoinputs", given["ids"], scale=torch.from_numpy(given["scale"]))
        with pytest.raises(BadInput, match="expected"):
            client.infer("twoinputs", {"ids": given["ids"]})
        with pytest.raises(BadInput, match="nothing"):
            client.predict("nothing", given["ids"])
        proof = he.prove(half, against=server.url)
        with pytest.raises(BadSetting, match="another server has the store"):
            he.serve(half, port=0)
    assert proof.raise_if_unequal() is proof and proof.equal and "engine" in str(proof)
    for name in alone:
        np.testing.assert_array_equal(served[name], alone[name])
        np.testing.assert_array_equal(predicted[name], alone[name])
    with pytest.raises(NotReady, match="no server answers"):
        client.predict("twoinputs", **given)


@pytest.mark.slow
def test_a_server_in_a_program_listens_as_its_options_say(half: he.Half, tmp_path: Path) -> None:
    with he.serve(half, port=0, host="::1", grpc_port=0) as server:
        assert server.url.startswith("http://[::1]:")
        assert he.Client(server.url).infer("twoinputs", drawn(2))["answer"].shape == (2, 3)
        with triton.InferenceServerClient(f"[::1]:{server.grpc_port}") as client:
            assert client.is_model_ready("twoinputs")
        (tmp_path / "models").mkdir()
        with pytest.raises(BadSetting, match="--grpc-port"):
            he.serve(tmp_path, port=0, host="::1", grpc_port=server.grpc_port)
    he.serve(tmp_path, port=0).close()  # the start that failed has given the store back


@pytest.mark.parametrize("name", ["models", "log_level", "log_format", "access_log", "drain_seconds"])
def test_an_option_that_would_do_nothing_is_refused(half: he.Half, name: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(BadSetting, match=f"{name}: for the command `halfeven serve` alone"):
        he.serve(half, port=0, **options)


@pytest.mark.slow
def test_a_proof_of_another_model_is_raised(half: he.Half, tmp_path: Path) -> None:
    torch.manual_seed(1)
    with he.serve(he.convert(TwoInputs(), samples=drawn(ROWS)), port=0) as server:
        proof = he.prove(half, against=server.url)
    assert not proof.equal
    with pytest.raises(ParityRefused, match="is not equal to FP32"):
        proof.raise_if_unequal()


@pytest.mark.slow
def test_a_key_is_sent_with_every_kind_of_request(half: he.Half, tmp_path: Path) -> None:
    from halfeven.serve.access.keys import KeyFile

    half.save(tmp_path / "store")
    key, _ = KeyFile(tmp_path / "keys").add("me", ["manage", "infer"])
    with he.serve(tmp_path / "store", port=0, key_file=tmp_path / "keys") as server:
        with pytest.raises(BadInput, match="401"):
            he.Client(server.url).predict("twoinputs", drawn(2))
        client = he.Client(server.url, key=key)
        assert client.predict("twoinputs", drawn(2))["answer"].shape == (2, 3)
        with pytest.raises(BadInput, match="no version before"):
            client.rollback("twoinputs")


def test_a_busy_server_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfeven.serve.python_api import client as module

    answers: list[Any] = [Overloaded("busy", 3.0), Overloaded("busy", 2.0), ({}, b"{}")]
    waited: list[float] = []

    def ask(*_: Any, **__: Any) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(module, "ask", ask)
    monkeypatch.setattr(module.time, "sleep", waited.append)
    with pytest.raises(Overloaded):
        he.Client("http://127.0.0.1:9", retries=0).infer("m", {})
    with pytest.raises(EngineFailed):  # answered, though not as a model is described
        he.Client("http://127.0.0.1:9").predict("m", 1)
    assert waited == [2.0] and not answers


@pytest.mark.slow
def test_a_model_folder_keeps_what_its_toml_says(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", precision={"level": "O3"})
    x = np.random.normal(size=(ROWS, 4)).astype(np.float32)
    half = he.convert(folder, samples={"x": x}, targets={"y": np.zeros((ROWS, 3), np.float32)})
    assert half.name == "net" and half.version.status == LIVE
    assert half.version.spec().form == "auto" and len(half.facts["forms"]) == 2
    assert half.facts["samples"]["count"] == ROWS
    with pytest.raises(BadSetting, match=r"model\.toml"):
        he.convert(folder, kind="logits")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, BadSamples, "samples="),
        ({"samples": {"x": np.zeros((4, 4), np.float32)}, "form": "live"}, BadSetting, "form='live'"),
        ({"samples": {"x": np.zeros((4, 4), np.float32)}, "form": "tflite"}, BadSetting, "expected one of"),
        ({"samples": {"x": np.zeros((4, 4), np.float32)}, "kind": "loggits"}, BadSetting, "expected one of"),
        (
            {"samples": {"x": np.zeros((4, 4), np.float32)}, "kind": {"z": "logits"}},
            BadSetting,
            "no output 'z'",
        ),
        ({"samples": {"x": np.zeros((4, 4), np.float32)}, "level": "O9"}, BadFolder, "O9"),
        ({"targets": {"y": np.zeros((4, 3), np.float32)}}, BadSetting, "targets belong to the samples"),
        ({"keep_io_types": False}, BadSetting, "keep_io_types"),
        ({"dtype": "fp16", "low_precision_type": "bf16"}, BadSetting, "mean the same"),
    ],
)
def test_what_cannot_be_meant_is_said_in_the_words_of_python(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        he.convert(nn.Linear(4, 3), **options)


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile heed SIGINT: the tests themselves may run in the background, ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize(
    ("last_line", "ended_by", "code"), [("", signal.SIGINT, 0), ("", signal.SIGTERM, 0), ("1 / 0", None, 1)]
)
def test_a_script_that_leaves_its_server_open_serves_on_after_its_last_line(
    half: he.Half, tmp_path: Path, last_line: str, ended_by: signal.Signals | None, code: int
) -> None:
    half.save(tmp_path / "store")
    script = f"import halfeven as he\nhalf = he.load({str(tmp_path / 'store')!r}, 'twoinputs')\n"
    script += f"he.serve(half, port=0)\n{last_line}\n"
    command = [sys.executable, "-c", script]
    with heeding_interrupts(), subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = next((line for line in process.stderr if "serves on at" in line or "Error" in line), "")
        if ended_by is not None:
            body = io.BytesIO()
            given = drawn(5)
            np.savez(body, ids=given["ids"], scale=given["scale"])  # which a thread of a pool reads
            url = f"{re.findall(r'http://[^ ]*[0-9]', said)[0]}/v1/models/twoinputs:predict"
            assert len(json.loads(ask(url, body.getvalue())[1])["predictions"]) == 5
            process.send_signal(ended_by)
        assert process.wait(PATIENCE_S) == code


def test_one_signal_ends_every_server_of_a_script_an_error_too_and_a_forked_child_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, closed = list[str](), list[str]()

    class Open:
        def __init__(self, url: str, is_open: bool = True) -> None:
            self.url, self.is_open = url, is_open

        def until_it_ends(self) -> None:
            raise KeyboardInterrupt

        wait = until_it_ends

        def close(self) -> None:
            closed.append(self.url)

    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(serving, "notify", said.append)
    monkeypatch.setattr(serving, "_open", {Open("a"), Open("b"), Open("forked", is_open=False)})
    serving._serve_on()
    assert len(said) == 2 and sorted(closed) == ["a", "b"]
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    serving._serve_on()  # an error ended the script
    assert len(said) == 2 and sorted(closed) == ["a", "a", "b", "b"]
