"""``halfeven tune``: only what is proven is a candidate, and its word counts only where it was found."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.onnx_engine import OnnxEngine
from halfeven.models.spec.spec import Batching, ModelSpec
from halfeven.models.store.manifest import digest_of, sha256_of
from halfeven.models.store.store import Store, Version
from halfeven.serve.batching.place import Place
from halfeven.serve.tuning.search import (
    DELAYS_US,
    MeasuredWay,
    Simulated,
    Way,
    best_delay,
    choose,
    load_way,
    quartile_seconds,
    simulate,
    thread_counts,
)
from halfeven.serve.versions.loading.candidate_forms import VersionHere
from halfeven.serve.versions.loading.ready import make_ready
from halfeven.serve.versions.loading.tuned import Winner, correct_tuned, tuned_for, tuned_path

from tests.command_line import run
from tests.serve.small_store import net_of_either_form
from tests.specs import tensor

# Each measures a converted model.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_setup")]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tuned_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A store with a model (version 1 proven, version 2 refused) and what ``tune`` shown of version 1."""
    store = Store(Path(shutil.copytree(net_of_either_form(), tmp_path_factory.mktemp("tuning") / "store")))
    code, facts, shown = run("tune", "net", "--store", store.root, "--device", "cpu", "--seconds", 0.01)
    assert code == 0, shown
    return store.root, facts


@pytest.fixture
def store(tuned_store: tuple[Path, dict[str, Any]], tmp_path: Path) -> Store:
    return Store(Path(shutil.copytree(tuned_store[0], tmp_path / "store")))


def change(version: Version, **facts: Any) -> None:
    path = tuned_path(version, CPU)
    path.write_text(json.dumps(json.loads(path.read_bytes()) | facts))


def winner(form: str, precision: str, rows_per_second: float = 1.0) -> dict[str, Any]:
    batches = {"threads": 1, "useful_rows": 4, "queue_delay_us": 0}
    return {"form": form, "precision": precision, "rows_per_second": rows_per_second, **batches}


def reason(version: Version, place: Place) -> str:
    prepared = make_ready(version, place)
    place.call(prepared.engine.close)
    return prepared.reason


def test_the_winner_is_kept_with_every_measurement(tuned_store: tuple[Path, dict[str, Any]]) -> None:
    root, facts = tuned_store
    version = Store(root).version("net", 1)
    kept = json.loads(tuned_path(version, CPU).read_bytes())
    assert tuned_path(version, CPU).parent == root / "models/net/tuned"
    assert kept["winner"] == facts["winner"]
    assert kept["digest"] == version.digest
    assert kept["environment"]["torch"] == torch.__version__
    ways = {(row["form"], row["precision"], row["threads"]) for row in kept["measurements"]}
    kinds = {("torch", "fp32"), ("onnx", "fp32"), ("torch", "fp16"), ("onnx", "fp16")}
    assert ways == {(*kind, threads) for kind in kinds for threads in thread_counts(CPU)}
    assert {row["rows"] for row in kept["measurements"]} == {1, 2, 4, 8, 16, 32, 64}
    assert 0 <= kept["waited_share"] <= 1
    assert {one["delay_us"] for one in kept["simulations"]} == set(DELAYS_US)
    assert Store(root).numbers("net") == [1, 2]


def test_a_refused_half_is_no_candidate(store: Store) -> None:
    code, facts, shown = run("tune", "net@2", "--store", store.root, "--device", "cpu", "--seconds", 0.01)
    assert code == 0, shown
    assert {row["precision"] for row in facts["measurements"]} == {"fp32"}
    assert facts["winner"]["precision"] == "fp32"
    assert facts["refused"]
    assert "was refused" in shown


def test_the_next_load_takes_the_winner_and_says_since_when(
    store: Store, place: Place, tuned_store: tuple[Path, dict[str, Any]]
) -> None:
    version, winner = store.version("net", 1), tuned_store[1]["winner"]
    prepared = make_ready(version, place)
    assert (prepared.engine.form, prepared.precision) == (winner["form"], winner["precision"])
    assert prepared.useful_rows == winner["useful_rows"]
    assert prepared.reason.startswith(
        f"tuned on {tuned_store[1]['date']}: {winner['form']} {winner['precision']}"
    )
    place.call(prepared.engine.close)


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_it_is_the_winner_that_serves_whatever_else_is_faster(store: Store, place: Place, form: str) -> None:
    version = store.version("net", 1)
    change(version, winner=winner(form, "fp16"))
    prepared = make_ready(version, place)
    assert (prepared.engine.form, prepared.precision, prepared.useful_rows) == (form, "fp16", 4)
    assert prepared.digest == version.manifest["files"][f"half.{'pt2' if form == 'torch' else 'onnx'}"]
    x = np.zeros((3, 4), np.float32)
    assert place.call(lambda: prepared.engine.run([[x]]))[0].shape == (3, 3)
    place.call(prepared.engine.close)


def test_a_tuning_never_makes_an_unproven_half_active(store: Store, place: Place) -> None:
    refused = store.version("net", 2)
    change(refused, digest=refused.digest, winner=winner("torch", "fp16", 1e9))
    assert tuned_for(refused, CPU) is not None
    prepared = make_ready(refused, place)
    assert prepared.precision == "fp32"
    place.call(prepared.engine.close)


@pytest.mark.parametrize(
    "facts",
    [
        {"digest": "0" * 64},
        {"environment": {"device": "another", "torch": "1.0", "onnxruntime": "1.0", "cores": 64}},
        {"winner": {"form": "torch"}},
    ],
)
def test_a_tuning_for_something_else_is_as_if_it_were_not_there(store: Store, facts: dict[str, Any]) -> None:
    version = store.version("net", 1)
    assert tuned_for(version, CPU) is not None
    change(version, **facts)
    assert tuned_for(version, CPU) is None


def test_a_winner_that_was_corrected_serves_and_its_reason_says_so(store: Store, place: Place) -> None:
    version = store.version("net", 1)
    first = tuned_for(version, CPU)
    assert first is not None
    for threads in (2, 1):
        correct_tuned(version, CPU, Winner("onnx", "fp32", threads, 4, 0, 5.0), "2026-02-02", 1.5)
    prepared = make_ready(version, place)
    assert (prepared.engine.form, prepared.precision, prepared.useful_rows) == ("onnx", "fp32", 4)
    assert prepared.setup == CpuSetup(1)
    assert prepared.reason.startswith(
        f"tuned on {first.date}, corrected by what was served on 2026-02-02: onnx fp32"
    )
    kept = json.loads(tuned_path(version, CPU).read_bytes())["corrected"]
    assert kept["was"]["rows_per_second"] == first.winner.rows_per_second, "the tuning's own winner"
    place.call(prepared.engine.close)


def test_where_nothing_was_tuned_nothing_is_corrected(store: Store) -> None:
    version = store.version("net", 1)
    change(version, digest="0" * 64)
    before = tuned_path(version, CPU).read_bytes()
    correct_tuned(version, CPU, Winner("onnx", "fp32", 1, 4, 0, 5.0), "2026-02-02", 1.5)
    assert tuned_path(version, CPU).read_bytes() == before


@pytest.mark.parametrize("form", ["nonsense", "live"])
def test_a_winner_that_does_not_run_is_passed_over(store: Store, place: Place, form: str) -> None:
    version = store.version("net", 1)
    change(version, winner=winner(form, "fp32"))
    assert reason(version, place).startswith("measured fastest here")


def test_where_a_form_is_asked_for_no_tuning_changes_it(store: Store, place: Place) -> None:
    folder = store.version("net", 1).folder
    spec = json.loads((folder / "spec.json").read_bytes()) | {"form": "torch"}
    (folder / "spec.json").write_text(json.dumps(spec))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"]["spec.json"] = sha256_of(folder / "spec.json")
    manifest["digest"] = digest_of(manifest["files"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    version = store.version("net", 1)
    kept = json.loads(tuned_path(version, CPU).read_bytes())
    tuned_path(version, CPU).write_text(json.dumps(kept | {"digest": version.digest}))
    assert tuned_for(version, CPU) is not None
    assert reason(version, place).startswith("form = 'torch' asks for it")


def test_a_tuning_that_is_not_json_is_passed_over_with_a_warning(
    store: Store, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    version = store.version("net", 1)
    tuned_path(version, CPU).write_text("{")
    assert reason(version, place).startswith("measured fastest here")
    assert "run `halfeven tune` again" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nosuch",), "no model 'nosuch'"),
        (("net@9",), "no version 9"),
        (("net@x",), "no version 'x'"),
        (("net", "--seconds", "0"), "--seconds"),
        (("net", "--device", "toaster"), "toaster"),
    ],
)
def test_what_cannot_be_tuned_is_exit_2(store: Store, words: tuple[str, ...], message: str) -> None:
    code, _, shown = run("tune", *words, "--store", store.root)
    assert (code, message in shown) == (2, True)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_engine_runs_with_the_threads_that_were_tuned(store: Store, place: Place, precision: str) -> None:
    version = store.version("net", 1)
    batch = [[np.zeros((1, 4), np.float32)]]
    onnx, program = (
        load_way(VersionHere.of(version, place), Way(form, precision, CpuSetup(3)))
        for form in ("onnx", "torch")
    )
    assert isinstance(onnx, OnnxEngine)
    assert onnx._session.get_session_options().intra_op_num_threads == 3
    place.call(lambda: program.warm_up(batch))
    place.call(lambda: program.run(batch))
    assert place.call(torch.get_num_threads) == 3


# Choosing, on made-up measurements.


def way(form: str, precision: str, threads: int, rows_per_second: float) -> MeasuredWay:
    return MeasuredWay(Way(form, precision, CpuSetup(threads)), {1: 1 / rows_per_second})


@pytest.mark.parametrize(
    ("measured", "winner"),
    [
        ([way("torch", "fp32", 1, 100), way("onnx", "fp32", 1, 105)], ("onnx", "fp32", 1)),
        ([way("torch", "fp32", 1, 100), way("torch", "fp16", 1, 109)], ("torch", "fp32", 1)),
        ([way("torch", "fp32", 1, 100), way("torch", "fp16", 1, 111)], ("torch", "fp16", 1)),
        ([way("torch", "fp32", 2, 109), way("torch", "fp32", 1, 100)], ("torch", "fp32", 1)),
        ([way("torch", "fp32", 2, 111), way("torch", "fp32", 1, 100)], ("torch", "fp32", 2)),
    ],
)
def test_a_half_and_a_second_thread_must_each_gain_a_tenth(
    measured: list[MeasuredWay], winner: tuple[str, str, int]
) -> None:
    best = choose(measured).way
    assert (best.form, best.precision, best.threads) == winner


def test_throughput_is_compared_at_each_ones_useful_batch() -> None:
    # That is 4 rows/s at 8, and 2 at 64.
    peaks = MeasuredWay(Way("onnx", "fp32", CpuSetup(1)), {1: 1.0, 8: 2.0, 64: 32.0})
    rises = MeasuredWay(Way("torch", "fp32", CpuSetup(1)), {1: 1.0, 8: 4.0, 64: 18.0})  # 3.6 rows/s at 64
    assert choose([peaks, rises]) is peaks
    assert (peaks.useful_rows, rises.useful_rows) == (8, 64)


@pytest.mark.parametrize(("gain", "delay"), [(1.05, 0), (1.2, 1000)])
def test_a_delay_must_gain_a_tenth_for_those_who_come_together(gain: float, delay: int) -> None:
    plain = [Simulated(0, callers, 100.0, 1.0, 2.0) for callers in (1, 8, 16)]
    delayed = [Simulated(1000, callers, 100.0 * gain, 1.0, 2.0) for callers in (8, 16)]
    assert best_delay([*plain, Simulated(1000, 1, 20.0, 1.0, 2.0), *delayed]) == delay
    assert best_delay([]) == 0


class Doubling(Engine):
    form, precision, device = "torch", "fp32", "cpu"

    def __init__(self) -> None:
        self.batches: list[int] = []

    def warm_up(self, parts: Any) -> None: ...

    def run(self, parts: Any) -> list[np.ndarray]:
        self.batches.append(len(parts[0]))
        return [np.concatenate(parts[0]) * 2]


def test_the_simulation_goes_through_the_real_batcher_with_each_delay(place: Place) -> None:
    x, y = tensor("x", "FP32", -1, 2), tensor("y", "FP32", -1, 2)
    # Limits of the model, which are not tuned.
    limits = Batching(7, 3, max_queue_bytes=16, max_queue_ms=1, timeout_ms=1)
    spec = ModelSpec("net", (x,), (y,), 4, batching=limits)
    engine, shown = Doubling(), list[str]()
    found = simulate(spec, engine, place.thread, [np.ones((1, 2), np.float32)], 0.6, shown.append)
    assert [(one.delay_us, one.callers) for one in found] == [
        (delay_us, callers) for delay_us in DELAYS_US for callers in (1, 4, 8)
    ]
    assert len(shown) == 2 * len(DELAYS_US)
    assert max(engine.batches) == 4
    for one in found:
        assert 0 < one.p50_ms <= one.p99_ms
        if one.callers == 1:
            assert one.p50_ms >= one.delay_us / 1e3  # alone, everybody waits the delay out
            assert one.per_second <= 1e6 / max(one.delay_us, 1)


def test_a_quarter_of_the_runs_is_no_slower_than_what_is_said() -> None:
    count = iter(range(10_000))
    assert quartile_seconds(lambda: next(count), 0.0) < 0.1
    assert next(count) == 4  # one that is not counted and three that are
