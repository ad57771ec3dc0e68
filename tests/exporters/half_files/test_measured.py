"""Bits and times of a half do not depend on the cores of a machine, nor on what else it runs; a half that does not run
here has a verdict, and so have the others."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.half_files import measured
from halfeven.exporters.half_files.lock_file import checked, read_lock, write_lock
from halfeven.exporters.half_files.measured import Found, timed
from halfeven.models.engines import torch_engine
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import BadInput, DamagedFile
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.store.store import LIVE, Store, Version

from tests.exporters.half_files.onnx_net import written
from tests.kept import kept_store
from tests.model_folders import samples_of, write_folder


def _make(where: Path) -> None:
    folder = write_folder(where / "net", samples=samples_of({"x": (4,)}, 16))
    convert(folder, Store(where / "store"), Options(forms=("torch", "onnx")))


@pytest.fixture
def both_forms() -> Found:
    return Found(Store(kept_store(__file__, _make) / "store").numbered("net", "1"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_bits_and_times_are_those_of_one_thread_and_torch_has_its_threads_back(
    both_forms: Found, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, threads = list[int](), torch.get_num_threads()
    answers_of = measured.answers_of

    def seen(spec: ModelSpec, engine: Engine) -> measured.Answers:
        asked.append(engine.setup.threads)
        return answers_of(spec, engine)

    monkeypatch.setattr(measured, "answers_of", seen)
    torch.set_num_threads(3)
    try:
        (facts,) = measured.measured(both_forms, form=form)
        assert asked == [1, 1] and facts["passed"]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_time_of_another_thread_on_the_cores_does_not_count() -> None:
    def work(_: object = None) -> dict[str, np.ndarray]:
        sum(range(100_000))
        return {}

    with ThreadPoolExecutor(1) as other:
        found = timed(lambda _: other.submit(work).result(), work, {})
    assert found["half"] < 0.5 * found["fp32"]


@pytest.fixture
def lock(both_forms: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[Mapping[str, Any]]:
    """The lock of both forms, with an older torch; no clock."""
    monkeypatch.setattr(measured, "timed", lambda *_: {"half": 0.0, "fp32": 0.0})
    write_lock(path := tmp_path / "halfeven.lock", {"net": both_forms})
    facts = json.loads(path.read_text())
    for half in facts["halves"]:
        half["environment"]["torch"] = "2.10.0"
    path.write_text(json.dumps(facts))
    return read_lock(path)


RUN = TorchEngine.run


def refuses(*_: object) -> None:
    raise RuntimeError("could not create a primitive")


def half_refuses(engine: TorchEngine, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    if engine.precision == "fp16":
        raise RuntimeError("no kernel for Half")
    return RUN(engine, parts)


def cannot_load(*_: object) -> None:
    raise DamagedFile("half.pt2 cannot be loaded by this torch")


def lacks_torch(*_: object) -> None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "fails", "said"),
    [
        (TorchEngine, "run", refuses, "could not create a primitive"),
        (TorchEngine, "run", half_refuses, "no kernel for Half"),
        (torch_engine, "load_program_engine", cannot_load, "cannot be loaded by this torch"),
        (torch_engine, "load_program_engine", lacks_torch, "it needs torch, which is not installed"),
    ],
)
def test_a_torch_half_that_does_not_run_here_has_a_verdict_and_the_libraries_are_named(
    both_forms: Found,
    lock: Sequence[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    fails: Callable[..., object],
    said: str,
) -> None:
    monkeypatch.setattr(where, name, fails)
    found = {form: changes for _, form, changes in checked(lock, lambda _: both_forms)}
    assert list(found) == ["torch", "onnx"]
    assert [(change.kind, change.fails) for change in found["torch"]] == [
        ("environment", False), ("verdict", True),
    ]  # fmt: skip
    assert said in found["torch"][-1].message


def test_a_changed_weight_in_the_file_beside_a_large_half_is_the_one_that_differs(tmp_path: Path) -> None:
    half, data = tmp_path / "net.onnx", tmp_path / "net.data"
    model = onnx.load(written(half))
    onnx.save(model, half, save_as_external_data=True, location=data.name, size_threshold=0)
    before = measured._weights(half)
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")
    after = measured._weights(half)
    assert [name for name in before if after[name] != before[name]] == [model.graph.initializer[-1].name]


def test_a_version_in_the_live_form_has_no_file_to_lock_and_is_not_called_unproven() -> None:
    facts = {"status": LIVE, "half": "fp16", "reason": "", "files": {}, "forms": {"live": {"passed": True}}}
    with pytest.raises(
        BadInput, match=r"net@1 has a half in the form live alone.*--form torch or --form onnx"
    ):
        next(measured.measured(Found(Version("net", 1, Path(), facts))))
