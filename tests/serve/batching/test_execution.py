"""One batch and everything that can go wrong with it: memory, poison, a broken engine, a lost device, NaN."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines.engine import Engine
from halfeven.models.errors import EngineFailed, TimedOut
from halfeven.models.spec.spec import Batching, Dim, ModelSpec, TensorSpec
from halfeven.serve.batching import engine_runner
from halfeven.serve.batching.ceiling import Ceiling
from halfeven.serve.batching.condition import Condition
from halfeven.serve.batching.counters import Counters
from halfeven.serve.batching.execution import Execution, Outcome
from halfeven.serve.batching.interface import Answer, PreparedVersion
from halfeven.serve.batching.request_queue import Request
from hypothesis import given, settings
from hypothesis import strategies as st

POISON = -1.0
RANDOM = np.random.default_rng()


@dataclass(eq=False)
class Fake(Engine):
    """y = 2x, n = the row's index of its largest; limits are told in rows. Remembers the rows of each run."""

    most: int = sys.maxsize
    error: Callable[[int], BaseException] = lambda rows: torch.OutOfMemoryError(f"CUDA out of memory: {rows}")
    ends_at: float = np.inf  # as FP16 ends at 65,504: |2x| beyond is infinite
    broken: BaseException | None = None
    precision: str = "fp16"
    form: str = "torch"
    device: str = "cpu"
    ran: list[int] = field(default_factory=list)
    seen: list[np.ndarray] = field(default_factory=list)
    before: Callable[[], object] = lambda: None

    def warm_up(self, parts: Any) -> None: ...

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        self.before()
        (x,) = (np.concatenate(part) for part in parts)
        self.ran.append(len(x))
        self.seen.append(x)
        if self.broken is not None:
            raise self.broken
        if len(x) > self.most:
            raise self.error(len(x))
        if (x == POISON).any():
            raise ValueError("poison")
        y = x * 2
        y[np.abs(y) > self.ends_at] = np.inf
        return [y, y.argmax(axis=1)]


def spec(rows: int = 64, width: int | str = 4, buckets: Any = ()) -> ModelSpec:
    return ModelSpec(
        "toy",
        (TensorSpec("x", "FP32", (Dim(), Dim.parse(width))),),
        (TensorSpec("y", "FP32", (Dim(), Dim.parse(width))), TensorSpec("n", "INT64", (Dim(),))),
        rows,
        batching=Batching(buckets=buckets),
    )


class Bench:
    """One active version with all that its batches share; time goes on by one nanosecond at every look."""

    def __init__(self, engine: Fake, toy: ModelSpec | None = None, **prepared: Any) -> None:
        self.spec, self.now_ns, self.lost = toy or spec(), 0, []
        self.prepared = PreparedVersion("3", "sha", "fp16", engine, **prepared)
        self.counting = Counters("3")
        self.condition = Condition(self.spec, self.prepared, self.clock, lost=self.lost.append)

    def clock(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def execution(self) -> Execution:
        return Execution(self.counting, self.condition)

    def outcomes(self, batch: list[Request]) -> list[Outcome]:
        execution = self.execution()
        execution.begin(batch)
        return execution.finish()

    @property
    def counters(self) -> Counters:
        return self.counting.copy()

    def answer(self, *inputs: np.ndarray, **more: Any) -> list[Any]:
        batch = [request(x, **more) for x in inputs]
        outcomes = self.outcomes(batch)
        assert [id(r) for r, _ in outcomes] == [id(r) for r in batch], "each request once, in its order"
        return [outcome for _, outcome in outcomes]


def request(x: np.ndarray, **more: Any) -> Request:
    loop = asyncio.new_event_loop()
    try:
        return Request([x], len(x), loop.create_future(), 0, None, x.nbytes, **more)
    finally:
        loop.close()


def some(rows: int = 1, width: int = 4) -> np.ndarray:
    return RANDOM.random((rows, width), np.float32) + 0.5


def assert_right(answers: Sequence[Any], inputs: Sequence[np.ndarray]) -> None:
    for answer, x in zip(answers, inputs, strict=True):
        assert isinstance(answer, Answer), answer
        np.testing.assert_array_equal(answer.outputs[0], x * 2)
        np.testing.assert_array_equal(answer.outputs[1], (x * 2).argmax(axis=1))


# Out of memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        MemoryError("Unable to allocate 7.45 GiB"),
        RuntimeError(
            "[ONNXRuntimeError] : 1 : FAIL : bfc_arena.cc:376 Failed to allocate memory for requested buffer"
        ),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"
        ),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
)
def test_out_of_memory_costs_nobody_an_answer_and_is_not_tried_again(error: BaseException) -> None:
    engine = Fake(most=9, error=lambda rows: error)
    bench = Bench(engine)
    inputs = [some(n) for n in (5, 1, 20, 6)]
    assert_right(bench.answer(*inputs), inputs)
    assert engine.ran == [32, 16, *[8] * 4]
    assert bench.condition.ceiling.smallest == bench.counters.row_ceiling == bench.prepared.useful_rows == 8
    assert (bench.counters.out_of_memory, bench.counters.executions, bench.counters.failures) == (2, 1, 0)
    engine.ran.clear()
    assert_right(bench.answer(*inputs), inputs)
    assert engine.ran == [8] * 4


def test_one_row_that_does_not_fit_fails_alone_and_lowers_nothing() -> None:
    engine = Fake(most=0)
    bench = Bench(engine)
    (answer,) = bench.answer(some(1))
    assert isinstance(answer, EngineFailed) and "out of memory" in str(answer)
    assert bench.condition.ceiling.smallest == 0 and bench.counters.out_of_memory == 1


def test_a_ceiling_outlives_the_process_and_a_deleted_file_resets_it(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "ceiling-cpu.json"
    inputs = [some(4), some(4)]
    assert_right(Bench(Fake(most=3), ceiling=Ceiling(path)).answer(*inputs), inputs)
    engine = Fake(most=3)
    again = Bench(engine, ceiling=Ceiling(path))
    assert again.prepared.useful_rows == 2
    assert_right(again.answer(*inputs), inputs)
    assert engine.ran == [2] * 4
    path.unlink()
    fresh = Bench(Fake(), ceiling=Ceiling(path))
    assert fresh.prepared.useful_rows == 0
    assert_right(fresh.answer(*inputs), inputs)


def test_a_measured_useful_batch_stays_where_memory_allows_more() -> None:
    bench = Bench(Fake(most=40), useful_rows=8)
    assert_right(bench.answer(x := some(64)), [x])
    assert (bench.condition.ceiling.smallest, bench.prepared.useful_rows) == (32, 8)


def test_long_rows_that_do_not_fit_do_not_make_batches_of_short_ones_small() -> None:
    engine = Fake()
    bench = Bench(engine, spec(width="1..1000"))
    engine.most = 4
    assert_right(bench.answer(x := some(8, 900)), [x])
    engine.most, engine.ran = sys.maxsize, []
    assert_right(bench.answer(x := some(8, 10)), [x])
    assert_right(bench.answer(x := some(8, 1000)), [x])
    assert engine.ran == [8, 4, 4]
    assert bench.prepared.useful_rows == 0, "batches are formed before their lengths are known"


def test_poison_among_rows_that_do_not_fit_together_still_fails_alone() -> None:
    engine = Fake(most=3)
    bench = Bench(engine)
    inputs = [some(2), some(1), np.full((1, 4), POISON, np.float32), some(2)]
    answers = bench.answer(*inputs)
    assert isinstance(answers.pop(2), EngineFailed)
    inputs.pop(2)
    assert_right(answers, inputs)


def test_a_model_without_a_batch_cannot_be_cut_and_says_so() -> None:
    bench = Bench(Fake(most=0), spec(rows=0))
    (answer,) = bench.answer(some(8))
    assert isinstance(answer, EngineFailed) and "out of memory" in str(answer)


# Poison, and an engine that is broken


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.integers(1, 4), min_size=1, max_size=20), data=st.data())
def test_only_the_guilty_fail_whoever_they_are(rows: list[int], data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=4))
    buckets = data.draw(st.sampled_from([(), (1, 8, 16), (3,)]))
    most = data.draw(st.integers(1, 90))
    bench = Bench(Fake(most=most), spec(buckets=buckets))
    inputs = [some(n) for n in rows]
    for index in guilty:
        inputs[index][0] = POISON
    answers = bench.answer(*inputs)
    for index, answer in enumerate(answers):
        assert isinstance(answer, EngineFailed) == (index in guilty)
        if index not in guilty:
            assert_right([answer], [inputs[index]])
    assert bench.counters.failures == len(guilty) and bench.counters.requests == len(rows) - len(guilty)


def test_finding_one_poisonous_request_takes_a_round_per_doubling() -> None:
    engine = Fake()
    bench = Bench(engine)
    inputs = [some() for _ in range(64)]
    inputs[int(RANDOM.integers(64))][:] = POISON
    bench.answer(*inputs)
    assert len(engine.ran) == 1 + 2 * 6 and sum(engine.ran) == 64 + sum(2 * 64 // 2**k for k in range(1, 7))


def test_an_engine_that_fails_on_everything_costs_two_runs_a_batch_until_it_works_again() -> None:
    engine = Fake()
    bench = Bench(engine)
    assert_right(bench.answer(x := some()), [x])
    engine.broken = RuntimeError("weights are gone")
    costs, answers = [], []
    for _ in range(5):
        engine.ran.clear()
        answers = bench.answer(*[some() for _ in range(16)])
        assert all(isinstance(answer, EngineFailed) for answer in answers)
        costs.append(len(engine.ran))
    assert costs == [31, 31, 31, 2, 2]
    assert bench.counters.given_up == 2 and bench.counters.failures == 80
    assert "fails on every request" in str(answers[0]) and "weights are gone" in str(answers[0])
    engine.broken = None
    assert_right(bench.answer(x := some()), [x])
    engine.broken, engine.ran = RuntimeError("again"), []
    bench.answer(*[some() for _ in range(16)])
    assert len(engine.ran) == 31, "an engine that answered is not broken any more"


def test_an_engine_that_was_made_ready_and_never_answered_is_given_up_too() -> None:
    engine = Fake(broken=RuntimeError("no"))
    bench = Bench(engine, probe=[some()])
    for _ in range(3):
        bench.answer(some())
    engine.ran.clear()
    bench.answer(*[some() for _ in range(16)])
    assert engine.ran == [16, 1]


def test_while_nothing_is_known_to_work_every_batch_is_divided() -> None:
    poison = np.full((1, 4), POISON, np.float32)
    probes: list[Any] = [None, [some()]]
    for probe in probes:
        bench = Bench(Fake(), probe=probe)
        for _ in range(5):
            bench.answer(poison)
        answers = bench.answer(poison, x := some())
        assert isinstance(answers[0], EngineFailed)
        assert_right(answers[1:], [x])


def test_any_number_of_poisonous_batches_does_not_make_an_engine_broken() -> None:
    bench = Bench(Fake())
    assert_right(bench.answer(x := some()), [x])
    poison = np.full((1, 4), POISON, np.float32)
    for _ in range(10):
        bench.answer(poison, poison)
    answers = bench.answer(x := some(), poison)
    assert_right(answers[:1], [x])
    assert isinstance(answers[1], EngineFailed) and bench.counters.given_up == 0


def test_looking_for_the_guilty_ends_in_time_and_says_that_it_did() -> None:
    engine = Fake(broken=RuntimeError("slow failure"))
    bench = Bench(engine)
    engine.before = lambda: setattr(bench, "now_ns", bench.now_ns + 9_000_000_000)
    answers = bench.answer(*[some() for _ in range(64)])
    assert all(isinstance(answer, EngineFailed) for answer in answers)
    assert len(engine.ran) < 20 and "took too long" in str(answers[0])


def test_what_the_engine_returns_is_held_against_the_spec() -> None:
    engine = Fake()
    engine.run = lambda parts: [np.zeros((1, 4), np.float32)]  # type: ignore[method-assign]
    (answer,) = Bench(engine).answer(some())
    assert "returned 1 outputs, expected 2" in str(answer)
    engine.run = lambda parts: [np.zeros((3, 4), np.float32), np.zeros(2)]  # type: ignore[method-assign]
    (answer,) = Bench(engine).answer(some(2))
    assert "output 'y' has shape [3, 4] for a batch of 2 rows" in str(answer)


# A lost device


def test_after_a_sticky_error_the_device_is_named_lost_and_not_touched_again() -> None:
    engine = Fake(
        broken=torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), device="cuda:0"
    )
    bench = Bench(engine)
    for _ in range(2):
        answers = bench.answer(some(), some())
        assert all(isinstance(a, EngineFailed) and "cuda:0 is lost" in str(a) for a in answers)
    assert engine.ran == [2]
    assert len(bench.lost) == 1 and "illegal memory access" in bench.lost[0]


def test_a_device_lost_while_the_guilty_are_looked_for_is_not_touched_again_either() -> None:
    engine = Fake()
    bench = Bench(engine)
    inputs = [some() for _ in range(8)]
    inputs[1][:] = POISON
    run = engine.run

    def dies(parts: Any) -> list[np.ndarray]:
        if len(engine.ran) == 4:  # 8, 4, 2, 1: the next is the poison alone
            engine.broken = torch.AcceleratorError("CUDA error: device-side assert triggered")
        return run(parts)

    engine.run = dies  # type: ignore[method-assign]
    answers = bench.answer(*inputs)
    assert_right(answers[:1], inputs[:1])
    assert all(isinstance(answer, EngineFailed) for answer in answers[1:]) and "is lost" in str(answers[7])
    assert engine.ran == [8, 4, 2, 1, 1] and len(bench.lost) == 1


def test_a_lost_device_is_not_asked_in_halves() -> None:
    engine = Fake()
    bench = Bench(engine)
    inputs = [some() for _ in range(8)]
    run = engine.run

    def dies(parts: Any) -> list[np.ndarray]:
        lost = torch.AcceleratorError("CUDA error: device-side assert triggered")
        engine.broken = lost if engine.ran else ValueError("at first something else")
        return run(parts)

    engine.run = dies  # type: ignore[method-assign]
    assert all("is lost" in str(answer) for answer in bench.answer(*inputs)[4:])
    assert engine.ran == [8, 4]


def test_after_an_unknown_cuda_error_the_device_is_lost_if_it_answers_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = torch.AcceleratorError("CUDA error: a text that no list has")
    for answers in (True, False):
        monkeypatch.setattr(engine_runner, "device_answers", lambda error, device, found=answers: found)
        bench = Bench(Fake(broken=unknown, device="cuda:0"))
        bench.answer(some())
        assert len(bench.lost) == (not answers)


def test_an_error_that_only_talks_about_memory_does_not_lose_the_device() -> None:
    bench = Bench(Fake(broken=ValueError("illegal memory access to key 'x'")))
    bench.answer(some())
    assert bench.lost == []


# Buckets


def test_a_batch_is_filled_up_with_a_row_of_its_own_and_nobody_sees_it() -> None:
    engine = Fake()
    bench = Bench(engine, spec(buckets=(2, 8)))
    inputs = [some(2), some(3)]
    answers = bench.answer(*inputs)
    assert_right(answers, inputs)
    assert engine.ran == [8] and (engine.seen[0][5:] == inputs[0][0]).all()
    assert answers[0].batch_rows == 5 and bench.counters.rows == 5 and list(bench.counters.batches) == [5]
    assert_right(bench.answer(x := some(2)), [x])
    assert_right(bench.answer(x := some(9)), [x])
    assert engine.ran == [8, 2, 64], "the largest batch is always a bucket"


def test_parts_under_a_ceiling_have_the_sizes_of_buckets() -> None:
    engine = Fake(most=5)
    bench = Bench(engine, spec(rows=24, buckets=(1, 2, 4, 8)))
    assert_right(bench.answer(x := some(11)), [x])
    assert engine.ran == [24, 8, 4, 4, 4], "12 rows would be no bucket; 3 are filled up to 4"


def test_a_request_that_wants_one_answer_always_has_one_shape_and_its_own_rows_first() -> None:
    for buckets in ((), (1, 8)):
        engine = Fake()
        bench = Bench(engine, spec(rows=16, buckets=buckets))
        for rows in (1, 3, 16):
            assert_right(bench.answer(x := some(rows), alone=True), [x])
            np.testing.assert_array_equal(engine.seen[-1][:rows], x)
        assert engine.ran == [16, 16, 16]


def test_where_memory_is_short_even_that_shape_shrinks_once() -> None:
    engine = Fake(most=5)
    bench = Bench(engine, spec(rows=16))
    for rows in (1, 3, 16):
        assert_right(bench.answer(x := some(rows), alone=True), [x])
    assert engine.ran == [16, 8, 4, 4, 4, 4, 4, 4]


# Rescue


def rescued_bench(**more: Any) -> tuple[Bench, Fake, Fake]:
    half, original = Fake(ends_at=65504.0), Fake(precision="fp32")
    return Bench(half, original=original, **more), half, original


def test_only_the_rows_that_are_not_finite_are_run_again_in_fp32() -> None:
    bench, half, original = rescued_bench()
    inputs = [some(3), some(2), some(4), some(1)]
    inputs[0][1] *= 1e6
    inputs[2][[0, 3], 2] = -1e30
    answers = bench.answer(*inputs)
    assert_right(answers, inputs)
    assert (half.ran, original.ran) == ([10], [3])
    assert [answer.rescued for answer in answers] == [1, 0, 2, 0]
    assert [answer.precision for answer in answers] == ["fp32-rescued", "fp16", "fp32-rescued", "fp16"]
    assert answers[0].compute_ns > answers[1].compute_ns and answers[0].batch_rows == 10
    assert bench.counters.rescued_rows == 3 and bench.counters.executions == 1 and bench.counters.rows == 10


def test_finite_batches_and_fp32_engines_are_never_run_twice() -> None:
    bench, _, original = rescued_bench()
    assert_right(bench.answer(x := some(3)), [x])
    assert original.ran == []
    (answer,) = Bench(Fake(ends_at=1.0, precision="fp32")).answer(some())
    assert np.isinf(answer.outputs[0]).all() and answer.precision == "fp16"  # as the prepared version says


def test_where_the_original_is_not_finite_either_its_answer_stands() -> None:
    bench, _, original = rescued_bench()
    original.ends_at = 1e20
    x = some(2)
    x[1, 0] = 1e30
    (answer,) = bench.answer(x)
    assert np.isinf(answer.outputs[0][1, 0]) and answer.rescued == 1
    np.testing.assert_array_equal(answer.outputs[0][0], x[0] * 2)


def test_past_its_time_a_row_is_not_rescued_and_its_neighbours_are() -> None:
    bench, _, original = rescued_bench()
    bench.now_ns = 1_000
    late, early, lasting = some(), some(2), some()
    for x in (late, early, lasting):
        x[0] = 1e30
    batch = [request(late, deadline_ns=900), request(early, deadline_ns=10**9), request(lasting)]
    outcomes = [outcome for _, outcome in bench.outcomes(batch)]
    assert isinstance(outcomes[0], TimedOut) and "no finite answer" in str(outcomes[0])
    assert_right(outcomes[1:], [early, lasting])
    assert original.ran == [2] and bench.counters.failures == 1
    assert bench.counters.copy().requests == 2, "what has no answer is no success"


def test_an_original_that_fails_on_one_row_fails_only_its_request() -> None:
    bench, _, original = rescued_bench()
    inputs = [some(), some(), some()]
    for x in inputs:
        x[0, 0] = 1e30
    run = original.run

    def picky(parts: Any) -> list[np.ndarray]:
        if any((array == inputs[1]).all() for array in parts[0]):
            raise ValueError("not this one")
        return run(parts)

    original.run = picky  # type: ignore[method-assign]
    answers = bench.answer(*inputs)
    assert isinstance(answers[1], EngineFailed) and "FP32 original" in str(answers[1])
    assert_right([answers[0], answers[2]], [inputs[0], inputs[2]])


def test_a_model_without_a_batch_is_rescued_as_a_whole() -> None:
    bench, _, original = rescued_bench(toy=spec(rows=0))
    x = some(3)
    x[2, 1] = 1e30
    (answer,) = bench.answer(x)
    assert_right([answer], [x])
    assert original.ran == [3] and answer.precision == "fp32-rescued"


def test_rows_are_rescued_after_halving_and_in_buckets_too() -> None:
    bench, _, original = rescued_bench(toy=spec(buckets=(4,)))
    inputs = [some(), np.full((1, 4), POISON, np.float32), some(), some()]
    inputs[3][0] = 1e30
    answers = bench.answer(*inputs)
    assert isinstance(answers.pop(1), EngineFailed)
    inputs.pop(1)
    assert_right(answers, inputs)
    assert original.ran == [4] and bench.counters.rescued_rows == 1


# Two in flight


@dataclass(eq=False)
class Ahead(Fake):
    """An engine that takes two batches; they are computed when they are waited for."""

    in_flight: int = 2
    assemble_ns: int = 7
    launched: int = 0
    refuses: BaseException | None = None

    def launch(self, parts: Any) -> Any:
        if self.refuses is not None:
            raise self.refuses
        self.launched += 1
        assert self.launched <= self.in_flight

        def wait() -> list[np.ndarray]:
            self.launched -= 1
            return Fake.run(self, parts)

        return SimpleNamespace(wait=wait)


def test_two_batches_in_flight_are_each_answered_by_their_own_rows() -> None:
    engine = Ahead()
    bench = Bench(engine, spec(buckets=(4,)))
    inputs = [[some(2), some(1)], [some(3)]]
    batches = [[request(x) for x in xs] for xs in inputs]
    executions = [bench.execution(), bench.execution()]
    for execution, batch in zip(executions, batches, strict=True):
        execution.begin(batch)
    assert engine.launched == 2 and engine.ran == []
    for execution, xs in zip(executions, inputs, strict=True):
        answers = [outcome for _, outcome in execution.finish()]
        assert_right(answers, xs)
        assert answers[0].assemble_ns == 7 and answers[0].compute_ns > 0  # type: ignore[union-attr]


def test_what_a_batch_waited_for_the_one_before_it_is_not_its_computing() -> None:
    engine = Ahead()
    bench = Bench(engine)
    first, second = bench.execution(), bench.execution()
    first.begin([request(some())])
    second.begin([request(some())])
    engine.before = lambda: setattr(bench, "now_ns", bench.now_ns + 1_000_000)
    answers = [execution.finish()[0][1] for execution in (first, second)]
    assert all(1_000_000 <= answer.compute_ns < 1_100_000 for answer in answers)  # type: ignore[union-attr]


@pytest.mark.parametrize("when", ["launch", "wait"])
def test_memory_and_poison_in_flight_are_treated_as_on_the_ground(when: str) -> None:
    engine = Ahead()
    bench = Bench(engine)
    first, second = bench.execution(), bench.execution()
    inputs = [some(4), np.full((1, 4), POISON, np.float32), some(3)]
    if when == "launch":
        engine.refuses = torch.OutOfMemoryError("CUDA out of memory")
    first.begin([request(x) for x in inputs])
    engine.refuses = None
    second.begin([request(x) for x in inputs])
    engine.most = 4
    for execution in (first, second):
        answers = [outcome for _, outcome in execution.finish()]
        assert isinstance(answers[1], EngineFailed)
        assert_right([answers[0], answers[2]], [inputs[0], inputs[2]])
    assert bench.condition.ceiling.smallest == 4 and engine.launched == 0


def test_a_batch_above_the_ceiling_is_not_launched() -> None:
    engine = Ahead(most=2)
    bench = Bench(engine)
    assert_right(bench.answer(x := some(4)), [x])
    execution = bench.execution()
    execution.begin([request(x := some(4))])
    assert engine.launched == 0
    assert_right([execution.finish()[0][1]], [x])
    assert engine.ran == [4, 2, 2, 2, 2]


def test_parts_of_a_split_request_are_not_counted_as_requests() -> None:
    bench = Bench(Fake())
    bench.outcomes([request(some(2), part="of an original"), request(some(1))])
    assert (bench.counters.requests, bench.counters.rows) == (1, 3)
    bench.outcomes([request(np.full((1, 4), POISON, np.float32), part="of an original")])
    assert bench.counters.failures == 0
