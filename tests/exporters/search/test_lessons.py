"""What is found for a few samples is asked about many, and those it fails join the samples."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.exporters.operations import Meter, Operations
from halfeven.exporters.search.delta_debugging import Budget, Score
from halfeven.exporters.search.lessons import LESSONS, OPERATIONS, WORST, Lessons, excess, taught
from halfeven.models.spec import Dim, ModelSpec, TensorSpec

from tests.conversions import converted, samples_of

AMPLE = Budget(evaluations=100_000, operations=1 << 60)
NODES = [f"n{index}" for index in range(20)]


class School:
    """Each node is needed by one input; the judge asks the inputs it has, ``learn`` asks all."""

    def __init__(self, needs: dict[str, str], asked: Collection[str], most: int = 1) -> None:
        self.needs, self.asked, self.most, self.lessons = needs, set(asked), most, 0

    def judge(self, kept: frozenset[str]) -> Score:
        failed = [name for name in sorted(self.asked) if self.needs[name] not in kept]
        return Score(not failed, math.inf if failed else 0.5, " ".join(failed))

    def learn(self, kept: Collection[str]) -> bool:
        failed = [name for name in sorted(self.needs) if self.needs[name] not in kept]
        self.asked |= set(failed[: self.most])
        self.lessons += bool(failed)
        return bool(failed)


def test_neighbours_that_fail_are_searched_for_until_none_does() -> None:
    school = School({"a": "n3", "b": "n7", "c": "n11"}, asked="a")
    lesson = taught(NODES, school.judge, school.learn, budget=AMPLE)
    assert lesson.equal and lesson.found is not None
    assert set(lesson.found.kept) == {"n3", "n7", "n11"} and lesson.found.minimal
    assert school.lessons == 2, "one for each that the samples did not show"
    assert all("b" in lesson.found.certificate["n7"].reason for _ in "b"), (
        "the certificate names the neighbour"
    )


def test_a_plan_that_no_neighbour_fails_is_searched_for_once() -> None:
    school = School({"a": "n3"}, asked="a")
    lesson = taught(NODES, school.judge, school.learn, budget=AMPLE)
    assert lesson.equal and lesson.found is not None and lesson.found.kept == ("n3",) and school.lessons == 0


def test_a_neighbour_that_no_set_gets_right_leaves_what_was_found_before() -> None:
    school = School({"a": "n3", "hopeless": "none of them"}, asked="a")
    lesson = taught(NODES, school.judge, school.learn, budget=AMPLE)
    assert not lesson.equal and lesson.found is not None and lesson.found.kept == ("n3",)


def test_where_the_samples_themselves_cannot_pass_nothing_is_found_and_nothing_claimed_of_neighbours() -> (
    None
):
    school = School({"hopeless": "none of them"}, asked=["hopeless"])
    lesson = taught(NODES, school.judge, school.learn, budget=AMPLE)
    assert lesson.found is None and school.lessons == 0


def test_lessons_end() -> None:
    school = School({f"i{n}": f"n{n}" for n in range(20)}, asked=["i0"])
    lesson = taught(NODES, school.judge, school.learn, budget=AMPLE)
    assert not lesson.equal and school.lessons == LESSONS + 1
    assert lesson.found is not None and len(lesson.found.kept) == LESSONS + 1 and lesson.found.exhausted


def test_a_spent_budget_ends_the_lessons_with_a_set_that_passed() -> None:
    spent = itertools.count()
    school = School({"a": "n3", "b": "n7"}, asked="a")
    lesson = taught(NODES, school.judge, school.learn, budget=Budget(1000, 5), spent=spent.__next__)
    assert lesson.found is not None and not lesson.found.minimal and lesson.found.exhausted
    assert school.judge(frozenset(lesson.found.kept)).passed


@dataclass(frozen=True)
class One:
    """An input of one row that the whole answers with ``size`` four times; the half under test errs by ``error``."""

    error: float
    size: float = 1.0
    samples: tuple[int, ...] = (0,)

    @property
    def reference(self) -> dict[str, np.ndarray]:
        return {"y": np.full((1, 4), self.size, np.float32)}

    def answered(self) -> Trial:
        answer = {"y": (self.reference["y"] + self.error * LIMIT_U * 2.0**-11).astype(np.float32)}
        return Trial(self.samples, self.reference, answer)


def tensor(name: str) -> TensorSpec:
    return TensorSpec(name, "FP32", (Dim.parse(-1), Dim.parse(4)))


SPEC = ModelSpec("m", (tensor("x"),), (tensor("y"),), 8)
LIMIT_U = SPEC.parity.max_error_u


def gate(trials: Sequence[Trial]) -> ParityReport:
    return judge(SPEC, "fp16", trials)


def lessons_of(*neighbours: One, apart: bool = True) -> Lessons[One]:
    return Lessons([One(0.0)], lambda: iter(neighbours), gate, apart)


@pytest.fixture
def drawn_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfeven.exporters.search.lessons.DRAWN", 2)


LOUD, QUIET = One(0.0, size=8.0), One(4.0, size=1e-3)


def test_the_worst_are_learned_first_and_those_within_the_limit_not_at_all() -> None:
    beyond = [One(1.0 + step) for step in range(1, WORST + 3)]
    lessons = lessons_of(One(0.5), One(0.99), *beyond, One(1.01))
    assert lessons.learn(One.answered)
    assert lessons.learned == beyond[:1:-1][:WORST]
    failed = lessons.failed(One.answered)
    assert failed is not None and excess(failed) == pytest.approx(beyond[-1].error, rel=0.01)
    assert lessons.failed(lambda one: One(0.9).answered()) is None
    assert not lessons_of(One(0.5), One(0.99)).learn(One.answered)


def test_answers_that_are_not_finite_are_learned_before_all_others() -> None:
    lessons = lessons_of(One(9.0), One(math.nan), One(math.inf), One(0.1))
    assert lessons.learn(One.answered) and len(lessons.learned) == 3
    assert all(not math.isfinite(one.error) for one in lessons.learned[:2])


@pytest.mark.usefixtures("drawn_by_two")
def test_a_neighbour_is_held_to_the_largest_answer_of_its_own_draw() -> None:
    """As a proof on as many samples would hold it: how loud others are excuses nothing."""
    assert not lessons_of(LOUD, QUIET, LOUD, QUIET).learn(One.answered)
    lessons = lessons_of(LOUD, LOUD, One(0.0, size=1e-3), QUIET, LOUD, LOUD)
    assert lessons.learn(One.answered)
    assert lessons.learned == [QUIET] and lessons.failed(One.answered) is not None


@pytest.mark.usefixtures("drawn_by_two")
def test_what_is_left_over_is_held_to_the_draw_before() -> None:
    assert not lessons_of(LOUD, LOUD, QUIET).learn(One.answered)
    assert lessons_of(QUIET).learn(One.answered), "there is nothing before"


def test_a_whole_that_has_used_up_its_operations_is_asked_about_one_more_and_no_more() -> None:
    meter, lessons = Meter(Operations(fixed=OPERATIONS // 3)), lessons_of()

    def draw() -> Iterator[One]:
        for one in [One(0.0)] * 20:
            meter.on(lambda _: {})({})
            yield one

    lessons.draw, lessons.spent = draw, meter.spent
    assert not lessons.learn(One.answered) and lessons.asked == 4
    lessons = lessons_of(*[One(0.0)] * 20)
    assert not lessons.learn(One.answered) and lessons.asked == 20


def test_large_answers_end_the_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfeven.exporters.search.lessons.ANSWERS_BYTES", 3 * One(0.0).reference["y"].nbytes)
    lessons = lessons_of(*[One(0.0)] * 20)
    assert not lessons.learn(One.answered) and lessons.asked == 4


@pytest.mark.usefixtures("drawn_by_two")
def test_where_all_is_to_be_half_a_neighbour_is_held_to_the_largest_answer_of_all() -> None:
    assert not lessons_of(QUIET, QUIET, LOUD, LOUD, apart=False).learn(One.answered)
    assert lessons_of(QUIET, QUIET, apart=False).learn(One.answered)


def scored(answers: Sequence[Trial]) -> ParityReport | None:
    """The report where two of them tie."""
    values = [float(trial.candidate["y"][0, 0]) for trial in answers]
    return gate(answers) if len(set(values)) < len(values) else None


def test_neighbours_that_each_pass_and_lose_their_order_together_are_asked_of_every_half() -> None:
    scores = [One(0.0, size=1.0 + index / 100) for index in range(40)]

    def collapsed(one: One) -> Trial:
        answer = one.answered()
        return replace(answer, candidate={"y": np.round(answer.candidate["y"], 1)})

    lessons = lessons_of(*scores)
    lessons.rank = scored
    assert lessons.failed(collapsed) is None, "before anybody has seen it"
    assert not lessons.learn(One.answered) and not lessons.ranked
    assert lessons.learn(collapsed) and list(lessons.ranked) == scores
    assert lessons.failed(collapsed) is not None and lessons.failed(One.answered) is None


def test_a_plan_holds_on_many_more_inputs_than_it_was_made_from() -> None:
    """Without lessons it fails on one in a few hundred, whose scores are larger than those of sixteen samples."""
    report = converted("unscaled scores").judged(samples_of("unscaled scores", 512, 3000))
    assert report is None or report.passed, report.summary()
