"""``form = "auto"`` measures; what is not measured faster by more than the noise is not preferred."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.archive.archive import save_program
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import NotReady
from halfeven.models.spec.datatypes import Wire
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import LIVE, Store, Version
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.place import Place
from halfeven.serve.versions.loading import candidate_forms as measuring
from halfeven.serve.versions.loading import graph_choice
from halfeven.serve.versions.loading import ready as readying
from halfeven.serve.versions.loading.candidate_forms import CandidateForm, ModelHere, VersionHere
from safetensors.torch import save_file
from torch import nn

from tests.programs import original
from tests.serve.versions.loading.simulated_place import simulated_place
from tests.serve.versions.publishing import publish_net

SPEC = ModelSpec("net", (TensorSpec("x", "FP32", (Dim(),)),), (TensorSpec("y", "FP32", (Dim(),)),), 4)
SAMPLES = Samples({"x": np.zeros(8, np.float32)})


class Timed(Engine):
    """An engine that takes as long as it is told to say."""

    device = "cpu"

    def __init__(self, form: str, precision: str, seconds: float) -> None:
        self.form, self.precision, self.seconds, self.closed = form, precision, seconds, False

    def warm_up(self, parts: Any) -> None: ...

    def run(self, parts: Any) -> list[np.ndarray]:
        return [parts[0][0]]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({("torch", "fp32"): 10.0, ("onnx", "fp32"): 6.0, ("torch", "fp16"): 60.0}, ("onnx", "fp32")),
        ({("torch", "fp32"): 10.0, ("onnx", "fp16"): 9.5}, ("torch", "fp32")),
        ({("torch", "fp32"): 10.0, ("onnx", "fp16"): 5.0}, ("onnx", "fp16")),
    ],
)
def test_the_fastest_serves_and_a_half_only_where_it_is_clearly_faster(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    times: dict[tuple[str, str], float],
    winner: tuple[str, str],
) -> None:
    def seconds_of(run: partial[Any]) -> float:
        return run.func.__self__.seconds  # type: ignore[attr-defined]

    monkeypatch.setattr(measuring, "shortest_seconds", seconds_of)
    candidates = [
        CandidateForm(Timed(form, precision, seconds), "file") for (form, precision), seconds in times.items()
    ]
    best, why = ModelHere(SPEC, SAMPLES, place).fastest(candidates)
    assert (best.engine.form, best.engine.precision) == winner
    assert "measured" in why
    closed = [candidate.engine.closed for candidate in candidates if candidate is not best]  # type: ignore[attr-defined]
    assert all(closed) and closed


def test_a_form_measured_while_another_program_had_the_core_is_measured_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = {"torch": [30.0, 10.0], "onnx": [20.0, 20.0]}  # the first look at torch was disturbed
    monkeypatch.setattr(
        measuring,
        "shortest_seconds",
        lambda run: looks[run.func.__self__.form].pop(0),
    )
    candidates = [CandidateForm(Timed(form, "fp32", 0.0), "file") for form in looks]
    best, _ = ModelHere(SPEC, SAMPLES, place).fastest(candidates)
    assert best.engine.form == "torch" and best.seconds == 10.0


@pytest.mark.parametrize(("device", "share", "rows"), [("cpu", 0.0, 4), ("cpu", 0.5, 0), ("cuda:0", 0.5, 4)])
def test_useful_rows_measured_on_a_cpu_beside_other_programs_are_not_known(
    device: str, share: float, rows: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure_useful_rows", lambda *asked, **worth: 4)
    monkeypatch.setattr(measuring, "Crowding", lambda: SimpleNamespace(share=lambda: share))
    chosen = CandidateForm(Timed("torch", "fp32", 1.0), "file")
    chosen.engine.device = device
    assert ModelHere(SPEC, SAMPLES, place).useful_rows_of(chosen) == rows


def test_where_memory_is_scarce_the_forms_are_loaded_one_at_a_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "shortest_seconds", lambda run: run.func.__self__.seconds)
    monkeypatch.setattr(measuring, "give_back", lambda: None)
    opened = list[Timed]()

    def load(form: str, seconds: float) -> Timed:
        assert all(engine.closed for engine in opened), "two at once"
        opened.append(Timed(form, "fp32", seconds))
        return opened[-1]

    def candidates() -> Iterator[CandidateForm]:
        for form, seconds in {"torch": 3.0, "onnx": 1.0, "live": 2.0}.items():
            load_again = partial(load, form, seconds)
            yield CandidateForm(load_again(), "file", load=load_again)

    best, _ = ModelHere(SPEC, SAMPLES, replace(place, scarce=True)).fastest(candidates())
    assert best.engine.form == "onnx" and best.away and all(engine.closed for engine in opened)


@pytest.mark.parametrize(("free", "scarce"), [(2000, False), (1999, True)])
def test_memory_is_scarce_where_the_forms_do_not_fit_beside_one_another(
    free: int,
    scarce: bool,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Store(tmp_path).draft("net") as draft:
        (draft.folder / "original.onnx").write_bytes(bytes(1000))
        version = draft.publish(LIVE, {})
    size = (version.folder / "manifest.json").stat().st_size
    monkeypatch.setattr(measuring, "free_bytes", lambda: free + 2 * size)
    assert measuring.is_scarce(version, place) is scarce
    assert ("raise the limit of its container" in caplog.text) is scarce


class Lasting(Timed):
    """An engine whose rows take a given time each. ``ran``: the rows of each batch, in order."""

    def __init__(self, form: str, row_s: float, most_rows: int = 64) -> None:
        super().__init__(form, "fp32", row_s)
        self.most_rows, self.ran = most_rows, list[int]()

    def warm_up(self, parts: Any) -> None:
        self.run(parts)

    def run(self, parts: Any) -> list[np.ndarray]:
        self.ran.append(len(parts[0][0]))
        if self.ran[-1] > self.most_rows:
            raise RuntimeError("no kernel for so many rows")
        return [parts[0][0]]


def lasting(place: Place, monkeypatch: pytest.MonkeyPatch, *engines: Lasting) -> tuple[CandidateForm, str]:
    """The fastest of engines whose batches are said to last as long as their rows, and why it is."""

    def seconds_of(run: partial[Any]) -> float:
        run()
        engine = run.func.__self__  # type: ignore[attr-defined]
        return engine.seconds * engine.ran[-1]

    monkeypatch.setattr(measuring, "shortest_seconds", seconds_of)
    monkeypatch.setattr(measuring, "seconds_on_core", seconds_of)
    candidates = [CandidateForm(engine, "file") for engine in engines]
    return ModelHere(SPEC.with_max_batch_size(64), SAMPLES, place).fastest(candidates)


def test_on_a_cpu_only_the_fastest_form_runs_a_whole_batch_that_lasts_long(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick, slowest = Lasting("torch", 0.12), Lasting("onnx", 0.1), Lasting("live", 3.0)
    best, why = lasting(place, monkeypatch, slow, quick, slowest)
    assert best.engine is quick and "measured fastest here at batch 4" in why
    assert max(slow.ran) == max(slowest.ran) == 4 and quick.ran.count(64) == 1
    # Only what is near the fastest is measured again.
    assert slow.ran.count(4) == 2 and slowest.ran.count(4) == 1


def test_on_a_cpu_the_fastest_form_that_runs_no_whole_batch_gives_way_to_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, serves = Lasting("torch", 0.1, most_rows=8), Lasting("onnx", 0.2)
    best, _ = lasting(place, monkeypatch, fails, serves)
    assert best.engine is serves and fails.closed and 64 in serves.ran


def test_a_server_that_stops_meanwhile_blames_no_form(caplog: pytest.LogCaptureFixture) -> None:
    thread = DeviceThread()
    thread.start()
    thread.stop(5)
    candidates = [CandidateForm(Timed(form, "fp32", 1.0), "file") for form in ("torch", "onnx")]
    with pytest.raises(NotReady, match="stopping"):
        ModelHere(SPEC, SAMPLES, Place(torch.device("cpu"), thread)).fastest(candidates)
    assert "does not run here" not in caplog.text


def test_an_original_that_is_passed_over_because_its_file_is_damaged_is_named(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = original(nn.Linear(3, 2), {"input": torch.randn(4, 3)})
    with Store(tmp_path).draft("net") as draft:
        draft.write_json("spec.json", net.spec.to_json())
        save_program(net.program, draft.folder / "original.pt2", weights=False)
        save_file(dict(net.program.state_dict), draft.folder / "weights.safetensors")
        (draft.folder / "original.onnx").write_bytes(b"as it was written")
        version = draft.publish(LIVE, {"half": None})
    (version.folder / "original.onnx").write_bytes(b"as it is now")
    samples = Samples({"input": np.zeros((4, 3), np.float32)})
    originals = readying._Originals(VersionHere(version.spec(), samples, place, version))
    assert [candidate.file for candidate in originals] == ["original.pt2"]
    damaged = originals.damaged
    assert len(damaged) == 1 and f"{version.folder / 'original.onnx'} is damaged" in damaged[0]
    assert damaged[0] in caplog.text


# Loads on a simulated device


@pytest.mark.slow
@pytest.mark.parametrize("must_gain", [0.0, 1e9], ids=["recorded", "recordings given up"])
def test_what_is_ready_has_run_every_bucket_in_every_slot_as_requests_send_it(
    must_gain: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_choice, "MUST_GAIN", must_gain)
    # Measured, it is fewer on a busy machine, and larger batches are not warmed up again.
    monkeypatch.setattr(ModelHere, "useful_rows_of", lambda here, chosen: 4)
    net = original(nn.Linear(3, 2), {"input": torch.randn(4, 3)}, max_batch_size=4)
    spec = replace(net.spec, inputs=(replace(net.spec.inputs[0], wire=Wire("UINT8", 0.5, 1.0)),))
    version = publish_net(tmp_path, net, spec=spec)
    with simulated_place() as (gpu, place):
        prepared = readying.make_ready(version, place)
        engine = prepared.engine
        assert isinstance(engine, TorchEngine)
        before = gpu.memory.fresh, len(gpu.operations.waits)

        def asked() -> None:
            for rows in (1, 2, 4):
                for dtype in (np.uint8, np.float32):
                    parts = [[np.full((rows, 3), 2, dtype)]]
                    for launched in [engine.launch(parts) for _ in range(engine.in_flight)]:
                        launched.wait()

        place.call(asked)
        assert (gpu.memory.fresh, len(gpu.operations.waits)) == before


class Counted(Timed):
    """One of the engines that are open at the same time."""

    device = "cuda:0"
    open_now: set["Counted"] = set()  # noqa: RUF012  # emptied by each test
    most_open = 0

    def __init__(self, form: str, precision: str, seconds: float) -> None:
        super().__init__(form, precision, seconds)
        self.open_now.add(self)
        Counted.most_open = max(Counted.most_open, len(self.open_now))

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.open_now.remove(self)


@pytest.fixture
def four_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Version:
    """A version with two originals and two halves on ``cuda:0``; the half of ONNX Runtime is the fastest."""
    Counted.open_now.clear()
    Counted.most_open = 0
    seconds = {("torch", "fp32"): 9.0, ("onnx", "fp32"): 8.0, ("torch", "fp16"): 5.0, ("onnx", "fp16"): 4.0}

    def load(precision: str) -> Any:
        return lambda version, form, device, setup: Counted(form, precision, seconds[form, precision])

    monkeypatch.setattr(measuring, "load_original", load("fp32"))
    monkeypatch.setattr(measuring, "load_half", load("fp16"))
    monkeypatch.setattr(readying, "holds_here", lambda version, device: True)
    monkeypatch.setattr(measuring, "shortest_seconds", lambda run: run.func.__self__.seconds)
    net = original(nn.Linear(3, 2), {"input": torch.randn(4, 3)}, max_batch_size=4)
    return publish_net(tmp_path, net, ("torch", "onnx"))


@pytest.mark.slow
def test_on_a_gpu_the_forms_that_are_compared_are_loaded_one_at_a_time(four_forms: Version) -> None:
    with simulated_place() as (_, place):
        prepared = readying.make_ready(four_forms, replace(place, rescue=False))
    assert (prepared.engine.form, prepared.engine.precision) == ("onnx", "fp16")
    assert Counted.most_open == 1 and Counted.open_now == {prepared.engine}
    assert "measured fastest" in prepared.reason and "torch fp16 5e+03 ms" in prepared.reason


@pytest.mark.slow
def test_a_proof_that_found_no_memory_is_tried_again_and_is_no_refusal(
    four_forms: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [1]

    def short(version: Version, half: Any, *more: Any) -> Any:
        if left and left.pop() is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(passed=True, summary=lambda: "passed", batch_sizes=())

    monkeypatch.setattr(readying, "holds_here", lambda version, device: False)
    monkeypatch.setattr(readying, "kept_proof", lambda *_: None)
    monkeypatch.setattr(readying, "reprove", short)
    with simulated_place() as (_, place):
        prepared = readying.make_ready(four_forms, replace(place, rescue=False))
        assert prepared.engine.precision == "fp16"
        prepared.engine.close()
        left += [1] * 9
        with pytest.raises(NotReady, match=r"no memory to load and prove the torch form"):
            readying.make_ready(four_forms, place)
    assert Counted.open_now == set()
