"""Bits and times of a half do not depend on the cores of a machine, nor on what else it runs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.half_files import measured
from halfeven.exporters.half_files.measured import Found, timed
from halfeven.models.engines.engine import Engine
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.store.store import Store

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
