"""Unseen samples on which a plan is tried: the worst sets that fail are asked ever after."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.exporters.plan import counterexamples
from halfeven.exporters.plan.batched import Batch
from halfeven.exporters.plan.counterexamples import (
    CALM_ROWS,
    OPERATIONS,
    ORDER_OPERATIONS,
    PART_OPERATIONS,
    WORST,
    Ask,
    Counterexamples,
    excess,
)
from halfeven.exporters.policy.operations import Meter, Operations
from halfeven.exporters.question import Question
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec

from tests.conversions import converted, samples_of


@dataclass(frozen=True)
class One:
    """A sample that the original answers with ``size`` four times; the half errs by ``error`` of the limit."""

    error: float
    size: float = 1.0

    def question(self, number: int) -> Question:
        error, size = (np.full((1, 4), value, np.float32) for value in (self.error, self.size))
        return Question((number,), {"error": error}, {"y": size})


def tensor(name: str) -> TensorSpec:
    return TensorSpec(name, "FP32", (Dim.parse(-1), Dim.parse(4)))


SPEC = ModelSpec("m", (tensor("x"),), (tensor("y"),), 8)
LIMIT_U = SPEC.parity.max_error_u


def gate(trials: Sequence[Trial]) -> ParityReport:
    return judge(SPEC, "fp16", trials)


def asking(answer: Callable[[Question], np.ndarray]) -> Ask:
    def ask(batches: Iterable[Batch]) -> Iterator[Trial]:
        for batch in batches:
            for one in batch.questions:
                yield Trial(one.samples, one.reference, {"y": answer(one).astype(np.float32)})

    return ask


half = asking(lambda one: one.reference["y"] + one.inputs["error"] * LIMIT_U * 2.0**-11)
exact = asking(lambda one: one.reference["y"])


def alone(questions: Iterable[Question]) -> Iterator[Batch]:
    return (Batch((one,)) for one in questions)


def unseen(*samples: One, rows: int = 1) -> Counterexamples:
    questions = [one.question(number) for number, one in enumerate(samples)]
    return Counterexamples(rows, lambda: alone(questions), alone, gate)


def errors(found: Counterexamples) -> list[float]:
    return [float(one.inputs["error"][0, 0]) for one in found.found]


@pytest.mark.slow
def test_fewer_rows_are_enough_for_a_half_that_errs_little() -> None:
    """Fewer decide nothing, so none is asked; and none after the first set that errs more, which is known to be
    complete once the next set begins."""
    many, asked = 2 * CALM_ROWS, list[int]()

    def counted(batches: Iterable[Batch]) -> Iterator[Trial]:
        for trial in half(batches):
            asked.extend(trial.samples)
            yield trial

    for error, rows, enough, count in [
        (0.45, many, True, CALM_ROWS), (0.55, many, False, 2), (0.45, CALM_ROWS - 1, False, 0)
    ]:  # fmt: skip
        found = unseen(*[One(error)] * rows)
        asked.clear()
        assert (found.errs_little(counted), len(asked)) == (enough, count)
        assert found.tried == (CALM_ROWS if enough else 0)
        assert not found.search(half) and found.tried == rows and len(found.unseen) == rows


@pytest.mark.slow
def test_an_output_that_does_not_err_in_most_rows_is_asked_all_of_them() -> None:
    for exact_rows, enough in [(CALM_ROWS // 2 - 1, True), (CALM_ROWS // 2 + 1, False), (CALM_ROWS, False)]:
        found = unseen(*[One(0.0)] * exact_rows, *[One(0.1)] * (CALM_ROWS - exact_rows))
        assert found.errs_little(half) == enough


def test_the_worst_are_asked_from_now_on_and_those_within_the_limit_are_not() -> None:
    beyond = [One(1.0 + step) for step in range(1, WORST + 3)]
    found = unseen(One(0.5), One(0.99), *beyond, One(1.01))
    assert found.search(half)
    assert sorted(errors(found)) == [one.error for one in beyond[-WORST:]]
    report = found.failed(half)
    assert report is not None and excess(report) > 1
    assert found.failed(exact) is None
    assert not unseen(One(0.5), One(0.99)).search(half)


def test_answers_that_are_not_finite_come_before_all_others() -> None:
    found = unseen(One(9.0), *[One(8.0)] * WORST, One(math.nan), One(math.inf), One(0.1))
    assert found.search(half)
    assert sum(not math.isfinite(error) for error in errors(found)) == 2


LOUD, QUIET = One(0.0, size=8.0), One(4.0, size=1e-3)


def test_an_error_is_held_against_the_largest_answer_of_its_own_set() -> None:
    """A proof on as many samples does the same: larger answers of other sets give an error no more room."""
    assert not unseen(LOUD, QUIET, LOUD, QUIET, rows=2).search(half)
    found = unseen(LOUD, LOUD, One(0.0, size=1e-3), QUIET, LOUD, LOUD, rows=2)
    assert found.search(half)
    assert [one.samples for one in found.found] == [(2,), (3,)] and found.failed(half) is not None


def test_an_original_that_has_used_up_its_operations_is_asked_about_one_more_and_no_more() -> None:
    meter, found = Meter(Operations(fixed=OPERATIONS // 3)), unseen()

    def draw() -> Iterator[Batch]:
        for number in range(20):
            meter.on(lambda _: {})({})
            yield Batch((One(0.0).question(number),))

    found.draw, found.spent = draw, meter.spent
    assert not found.search(half) and found.tried == 4
    found = unseen(*[One(0.0)] * 20)
    assert not found.search(half) and found.tried == 20


def test_large_inputs_and_answers_end_the_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfeven.exporters.plan.counterexamples.BYTES", 3 * One(0.0).question(0).nbytes)
    found = unseen(*[One(0.0)] * 20)
    assert not found.search(half) and found.tried == 4


def tied(trials: Sequence[Trial], room: bool = True) -> ParityReport | None:
    """The report where two of them tie."""
    values = [float(trial.candidate["y"][0, 0]) for trial in trials]
    return gate(trials) if len(set(values)) < len(values) else None


def nearly_equal(count: int) -> list[One]:
    return [One(0.0, size=1.0 + index / 10_000) for index in range(count)]


collapsed = asking(lambda one: np.round(one.reference["y"], 3))


def test_sets_that_each_pass_and_lose_their_order_together_are_ranked_in_every_trial() -> None:
    found = replace(unseen(*nearly_equal(40)), rank=tied)
    assert found.misordered(collapsed) is None, "before it was tried"
    assert not found.search(exact) and found.misordered(collapsed) is None
    assert found.search(collapsed) and found.found == []
    assert found.failed(collapsed) is None and found.misordered(collapsed) is not None
    assert found.misordered(exact) is None


def test_the_order_has_to_leave_room_for_swaps_while_there_is_room_alone() -> None:
    def rank(trials: Sequence[Trial], room: bool) -> ParityReport | None:
        return gate(trials) if room else None

    found = replace(unseen(*nearly_equal(40)), rank=rank)
    assert found.search(half) and found.misordered(half) is not None
    found.room_ends = 0  # operations: all of them are spent
    assert not found.search(half) and found.misordered(half) is None


@pytest.mark.slow
def test_where_ranking_all_costs_too_much_those_that_err_most_are_ranked_and_more_where_they_do_not_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counterexamples, "PART_OPERATIONS", 1 << 60)  # all in one part
    meter, asked = Meter(Operations(fixed=ORDER_OPERATIONS // 4)), list[int]()
    samples = [One(0.2 * (number == 7), size=1.0 + number / 10_000) for number in range(40)]

    def costly(batches: Iterable[Batch]) -> Iterator[Trial]:
        for trial in half(batches):
            meter.on(lambda _: {})({})
            yield trial

    def rank(trials: Sequence[Trial], room: bool) -> ParityReport | None:
        asked[:] = [trial.samples[0] for trial in trials]
        return gate(trials)  # whatever the half answers

    found = replace(unseen(*samples), spent=meter.spent, rank=rank)
    for expected in (4, 8, 16, 32, 40, 40):
        assert found.search(costly)
        assert found.misordered(half) is not None and len(asked) == expected and 7 in asked


def test_a_half_that_fails_some_of_the_first_samples_is_not_asked_the_others() -> None:
    meter, asked = Meter(Operations(fixed=PART_OPERATIONS // 4)), list[int]()

    def costly(batches: Iterable[Batch]) -> Iterator[Trial]:
        for trial in half(batches):
            meter.on(lambda _: {})({})
            asked.append(trial.samples[0])
            yield trial

    samples = [One(1.5 * (number == 5)) for number in range(40)]
    found = replace(unseen(*samples), spent=meter.spent)
    assert found.search(costly) and asked == list(range(12)), "four, then eight more"
    assert [question.samples for question in found.found] == [(5,)]
    asked.clear()
    assert not replace(unseen(*[One(0.5)] * 40), spent=meter.spent).search(costly)
    assert asked == list(range(40))


@pytest.mark.slow
def test_a_plan_holds_on_many_more_inputs_than_it_was_made_from() -> None:
    """A plan without counterexamples fails on one input in a few hundred, whose scores are larger than those of
    sixteen."""
    report = converted("unscaled scores").judged(samples_of("unscaled scores", 512, 3000))
    assert report is None or report.passed, report.summary()
