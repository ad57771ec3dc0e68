"""A sweep over the real engines of a converted model, with given times, so that no processor decides.

Every engine is loaded and run as it serves; what its batches take is made up, so that each form wins in turn.
"""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.store.store import Store, Version
from halfeven.serve.batching.interface import PreparedVersion
from halfeven.serve.batching.place import Place
from halfeven.serve.versions.choices.budget import MeasuringBudget
from halfeven.serve.versions.choices.sweep import Machine, Sweep
from halfeven.serve.versions.loading.kept_setups import keep_setup
from halfeven.serve.versions.loading.ready import make_ready
from halfeven.serve.versions.loading.tuned import way_of
from halfeven.serve.versions.traffic.loaded_version import LoadedVersion

from tests.serve.small_store import net_of_either_form
from tests.serve.versions.choices.processors import CPU

pytestmark = pytest.mark.slow  # converts a model
FORMS = ("torch", "onnx")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with a setup for every form, so that nothing is measured at a load."""
    made = Store(Path(shutil.copytree(net_of_either_form(), tmp_path / "store")))
    for number in (1, 2):
        for form in FORMS:
            for precision in ("fp32", "fp16"):
                keep_setup(made.version("net", number), form, precision, CPU, CpuSetup(1), [])
    return made


def forms(prepared: PreparedVersion, place: Place) -> set[tuple[str, str]]:
    for engine in (prepared.engine, prepared.original):
        if engine is not None:
            place.call(engine.close)
    return {(one.form, one.precision) for one in prepared.forms}


def asking_for(version: Version, form: str, monkeypatch: pytest.MonkeyPatch) -> Version:
    spec = replace(version.spec(), form=form)  # type: ignore[arg-type]
    monkeypatch.setattr(type(version), "spec", lambda self: spec)
    return version


def test_what_is_proven_may_serve_and_a_form_that_is_asked_for_stays(
    store: Store, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals, halves = {(form, "fp32") for form in FORMS}, {(form, "fp16") for form in FORMS}
    proven, refused = store.version("net", 1), store.version("net", 2)
    assert forms(make_ready(proven, place), place) == originals | halves
    assert forms(make_ready(refused, place), place) == originals, (
        "a half that is not proven never takes the place"
    )
    torch_alone = asking_for(proven, "torch", monkeypatch)
    assert forms(make_ready(torch_alone, place), place) == {("torch", "fp16")}
    assert forms(make_ready(refused, place), place) == {("torch", "fp32")}


def test_every_engine_can_take_the_place_of_every_other_and_answers_the_same(
    store: Store, place: Place
) -> None:
    version = store.version("net", 1)
    prepared = make_ready(version, place)
    loaded = LoadedVersion(version, spec_of(version), place, prepared)
    favourite, events, ran = ["torch", "fp32"], list[str](), dict[tuple[Any, int], int]()

    def seconds(engine: Any, parts: Any) -> float:
        given = engine, sum(len(part[0]) for part in parts)
        if given not in ran:  # once: what the same engine takes for as many rows again is made up
            ran[given] = len(engine.run(parts)[0])
        rows = ran[given]
        liked = [engine.form, engine.precision] == favourite
        return (1e-3 + 1e-4 * rows) * (1 if liked else 3) / max(engine.setup.threads, 1) ** 0.5

    calm: Any = SimpleNamespace(disturbance=lambda: 0.0, share=lambda: 0.0, counted=nullcontext)
    machine = Machine(
        lambda: True,
        cores=lambda: 2,
        crowding=lambda at_once: calm,
        batch_seconds=seconds,
        free_bytes=lambda: 1 << 40,
    )
    x = np.zeros((3, 4), np.float32)
    reference = place.call(lambda: loaded.prepared.engine.run([[x]]))[0]
    for kind in (("onnx", "fp16"), ("torch", "fp32"), ("torch", "fp16"), ("onnx", "fp32")):
        favourite[:] = kind
        budget = MeasuringBudget(allowance_s=1e9)
        sweep = Sweep(
            loaded,
            place,
            machine,
            budget,
            lambda name, what, text, numbers: events.append(text),
            lambda _: None,
        )
        for _ in sweep.steps():
            pass
        way = way_of(loaded.prepared)
        assert (way.form, way.precision) == kind, events
        assert loaded.prepared.digest == version.manifest["files"][file_of(*kind)]
        assert (loaded.prepared.original is not None) == (kind[1] != "fp32")
        answer = place.call(lambda: loaded.prepared.engine.run([[x]]))[0]
        assert np.allclose(answer, reference, atol=0.05)
    assert len(events) >= 4
    loaded.close()


def file_of(form: str, precision: str) -> str:
    return ("original" if precision == "fp32" else "half") + (".pt2" if form == "torch" else ".onnx")


def spec_of(version: Version) -> ModelSpec:
    return version.spec().on_the_wire()
