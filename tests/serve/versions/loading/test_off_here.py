"""A way that the selftest found wrong on a device is not used there, and the version says so. The GPU is simulated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.exporters.on_device import environment, selftest_record
from halfeven.exporters.on_device.selftest_record import keep_record, records_of
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.engines.switched_off import (
    CUDA_GRAPHS,
    DEVICE,
    FEATURES,
    ONNX_HALF,
    PINNED_STAGING,
    TORCH_HALF,
    TWO_IN_FLIGHT,
    switch_off,
)
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import NotReady
from halfeven.models.store.store import Version
from halfeven.serve.batching.interface import PreparedVersion
from halfeven.serve.batching.place import Place
from halfeven.serve.versions.loading import candidate_forms, graph_choice
from halfeven.serve.versions.loading import ready as readying
from halfeven.serve.versions.loading.ready import make_ready
from torch import nn

from tests.programs import Original, original
from tests.serve.versions.loading.simulated_place import simulated_place
from tests.serve.versions.publishing import publish_net
from tests.simulated_gpu import SimulatedGpu

WHY = "graphs against eager: net: replays at [4] rows differ"


@pytest.fixture(scope="module")
def net() -> Original:
    return original(nn.Linear(3, 2), {"input": torch.randn(4, 3)}, max_batch_size=4)


@pytest.fixture
def version(net: Original, tmp_path: Path) -> Version:
    return publish_net(tmp_path, net)


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SimulatedGpu, Place]]:
    """A simulated device on which recorded batches are always faster."""
    looks = count()
    monkeypatch.setattr(graph_choice, "shortest_seconds", lambda run: (run(), 2.0 ** -next(looks))[1])
    try:
        with simulated_place() as found:
            yield found
    finally:
        switch_off(SimulatedGpu.device, {})


def ways_of(prepared: PreparedVersion, gpu: SimulatedGpu, place: Place) -> set[str]:
    """The fast ways that a batch of the version takes. One row: how many are useful is measured, and larger sizes than
    that are not recorded."""
    engine = prepared.engine
    assert isinstance(engine, TorchEngine)
    replays, waits = gpu.replays, len(gpu.operations.waits)

    def run() -> None:
        (came,) = engine.launch([[np.ones((1, 3), np.float32)]]).wait()
        assert came.shape == (1, 2)

    place.call(run)
    ways = {
        CUDA_GRAPHS: gpu.replays > replays,
        TWO_IN_FLIGHT: engine.in_flight == 2,
        PINNED_STAGING: len(gpu.operations.waits) == waits,
    }
    return {way for way, taken in ways.items() if taken}


ALL = {CUDA_GRAPHS, TWO_IN_FLIGHT, PINNED_STAGING}


@pytest.mark.slow
@pytest.mark.parametrize("feature", sorted(ALL))
def test_a_fast_way_that_is_off_is_not_taken_and_the_version_says_so(
    feature: str, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated(monkeypatch) as (gpu, place):
        keep_record(version.folder.parents[2], place.device, {feature: WHY})
        prepared = make_ready(version, place)
        assert ways_of(prepared, gpu, place) == ALL - {feature}
        assert f"{feature} switched off: the selftest of" in prepared.reason and WHY in prepared.reason


@pytest.mark.slow
def test_what_was_found_under_another_driver_holds_no_more(
    version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated(monkeypatch) as (gpu, place):
        keep_record(version.folder.parents[2], place.device, {DEVICE: WHY})
        monkeypatch.setattr(environment, "_driver", lambda: "999.1")
        assert ways_of(make_ready(version, place), gpu, place) == ALL


def test_from_a_device_that_is_off_nothing_is_served_and_the_way_out_is_said(
    version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated(monkeypatch) as (_, place):
        keep_record(version.folder.parents[2], place.device, {DEVICE: WHY})
        with pytest.raises(NotReady, match=r"nothing is served from cuda:0.*halfeven selftest"):
            make_ready(version, place)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "feature"), [("torch", TORCH_HALF), ("onnx", ONNX_HALF)])
def test_a_half_that_is_off_is_not_loaded_and_its_original_serves_also_in_the_place_of_a_half(
    form: str, feature: str, net: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = publish_net(tmp_path, net, (form,))
    with simulated(monkeypatch) as (_, place):
        keep_record(tmp_path, place.device, {feature: WHY})
        prepared = make_ready(version, place)
        assert prepared.precision == "fp32" and f"the {form} form is switched off" in prepared.reason
        assert form == "onnx" or make_ready(version, place, replaces=prepared).precision == "fp32"
        with pytest.raises(NotReady, match="forbidden by --fallback none"):
            make_ready(version, replace(place, fallback=False))


@pytest.mark.slow
def test_the_other_half_is_proven_and_served(
    net: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, asked = publish_net(tmp_path, net, ("torch", "onnx")), list[str]()
    load = candidate_forms.load_original

    def load_half(version: Version, form: str, device: torch.device, setup: CpuSetup) -> object:
        asked.append(form)
        return load(version, "torch", device, setup)

    monkeypatch.setattr(candidate_forms, "load_half", load_half)
    monkeypatch.setattr(readying, "holds_here", lambda *_: True)
    with simulated(monkeypatch) as (_, place):
        keep_record(tmp_path, place.device, {ONNX_HALF: WHY})
        assert f"{ONNX_HALF} switched off" in make_ready(version, place).reason
    assert set(asked) == {"torch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "7",
        "[" * 100_000,
        '[{"environment": {}, "off": 3, "at": ""}]',
        '[{"environment": 3, "off": {}, "at": ""}]',
    ],
    ids=("cut off", "a number", "too deep", "no reasons", "no environment"),
)
def test_a_record_that_cannot_be_read_switches_all_fast_ways_off_until_the_selftest_passes(
    damaged: str, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = version.folder.parents[2]
    (root / "selftest.json").write_text(damaged)
    with simulated(monkeypatch) as (gpu, place):
        prepared = make_ready(version, place)
        assert ways_of(prepared, gpu, place) == set() and "halfeven selftest" in prepared.reason
        keep_record(root, place.device, {})
        prepared = make_ready(version, place)
        assert ways_of(prepared, gpu, place) == ALL and "switched off" not in prepared.reason


def test_a_store_keeps_a_result_for_each_of_its_newest_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    for number in range(selftest_record.MOST_KEPT + 2):
        monkeypatch.setattr(environment, "_version", lambda *names, number=number: str(number))
        for _ in range(2):
            keep_record(tmp_path, device, dict.fromkeys(FEATURES, WHY))
    kept = [record.environment["onnxruntime"] for record in records_of(tmp_path)]
    assert kept == [str(number) for number in range(2, selftest_record.MOST_KEPT + 2)]
