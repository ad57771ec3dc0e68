"""The plan settled: nothing kept that need not be, everything kept that must, each with its certificate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.exporters.autocast.dtypes import Dtypes
from halfeven.exporters.autocast.emulation import Emulation
from halfeven.exporters.autocast.plan import PrecisionPlan
from halfeven.exporters.captured import planning
from halfeven.exporters.captured.planning import Planner, search
from halfeven.exporters.captured.rehearsal import Rehearsal
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.inputs.shaken import SHAKEN
from halfeven.exporters.maker import SHARES
from halfeven.exporters.search.delta_debugging import Score
from halfeven.exporters.subject import Subject
from halfeven.models.package import Precision
from halfeven.models.spec import ParityLimits
from torch import Tensor, nn

from tests.programs import Whole, whole


class Gate(nn.Module):
    """A product of two numbers around 400, scaled down afterwards; then a layer, which half is good for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = 700.0 * self.first(x)
        return self.second((hidden * hidden) / 490000.0)


class Squares(nn.Module):
    """A root mean square whose squares overflow, its scale taken out by the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = 600.0 * self.first(x)
        return self.second(hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + 1.0))


class Healthy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def planner(module: nn.Module, precision: Precision | None = None, search: bool = False) -> Planner:
    torch.manual_seed(1)
    samples = {"x": torch.randn(32, 8)}
    model: Whole = whole(module, samples)
    subject = Subject(
        model.program, model.spec, Samples({"x": samples["x"].numpy()}), precision or Precision(),
        ("torch",), Path(), {}, search=search,
    )  # fmt: skip
    planning, _ = subject.samples.split()
    return Planner(subject, planning, model.example, lambda _: None)


def settled(module: nn.Module, precision: Precision | None = None, search: bool = False) -> Planner:
    made = planner(module, precision, search)
    assert made.settle(SHARES[0], lambda _: None)
    return made


def kept(made: Planner) -> Sequence[str]:
    return [one.node for one in made.plan.kept]


def test_a_healthy_model_keeps_nothing() -> None:
    assert kept(settled(Healthy())) == []


def test_the_one_node_that_overflows_is_kept_with_reason_and_certificate() -> None:
    made = settled(Gate())
    (one,) = made.plan.kept
    assert one.op.startswith("mul") and "overflow" in one.reason
    assert one.evidence.startswith("without it: ")
    assert made.course is not None and made.course.found is not None and made.course.found.minimal


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_without_its_kept_node_the_half_would_fail(level: str) -> None:
    made = settled(Gate(), Precision(level))
    assert made.course is not None
    course, spec = made.course, made._subject.spec
    assert course.rehearsal.score(course.plan, spec.parity).passed
    assert not course.rehearsal.score(made._start.plan, spec.parity).passed


def test_o3_means_what_was_asked_unless_a_search_is() -> None:
    assert kept(settled(Gate(), Precision("O3"))) == []
    assert kept(settled(Gate(), Precision("O3"), search=True)) != []


def test_o0_plans_nothing() -> None:
    made = settled(Gate(), Precision("O0"))
    assert kept(made) == [] and made.course is None


def test_an_exact_repair_is_tried_before_a_node_is_kept() -> None:
    made = settled(Squares())
    assert made.course is not None and made.course.repairs and kept(made) == []


def test_asked_again_it_only_says_so_where_the_plan_is_another() -> None:
    made = settled(Healthy())
    assert made.settle(SHARES[1], lambda _: None) is False


def test_the_samples_that_judge_are_not_those_that_choose() -> None:
    made = planner(Gate())
    assert made.course is not None
    planned = [q for q in made.course.rehearsal.questions if not q.name]
    seen = torch.cat([torch.from_numpy(q.inputs["x"]) for q in planned])
    _, judging = made._subject.samples.split()
    judged = torch.from_numpy(judging.arrays["x"].copy())
    assert not (seen[:, None] == judged[None]).all(-1).any()


def test_a_plan_is_tried_on_copies_of_its_samples_that_are_moved_about() -> None:
    made = planner(Healthy())
    assert made.course is not None
    real = [torch.from_numpy(q.inputs["x"]) for q in made.course.rehearsal.questions if not q.name]
    seen, moved = torch.cat(real[:2]), torch.cat(real[2:])
    assert len(moved) == SHAKEN * len(seen)
    gap = (moved.reshape(SHAKEN, *seen.shape) - seen).std()
    assert 0.4 < gap < 0.6, "half of what samples spread over, which is about 1"


def test_a_small_model_is_asked_about_thousands_of_neighbours_in_few_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = settled(Healthy())
    assert made.course is not None
    lessons, runs, run = made.course.rehearsal.lessons, list[int](), Emulation.run

    def counted(self: Emulation, *inputs: Tensor) -> Sequence[Tensor]:
        runs.append(len(inputs[0]))
        return run(self, *inputs)

    monkeypatch.setattr(Emulation, "run", counted)
    assert not made.course.rehearsal.learn(made.course.plan)
    assert sum(runs) == sum(len(one.samples) for one in lessons.many) > 1000
    assert made.course.found is not None and made.course.found.neighbours == sum(runs)
    assert len(runs) < len(lessons.many) / 20


def test_after_a_proof_that_failed_the_lists_alone_are_held_to_stricter_limits_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, seen = planner(Gate()), list[tuple[float, float]]()

    def listening(
        module: Any, plan: Any, rehearsal: Any, limits: tuple[ParityLimits, ParityLimits], *more: Any
    ) -> Any:
        seen.append((limits[0].max_error_u, limits[1].max_error_u))
        return search(module, plan, rehearsal, limits, *more)

    monkeypatch.setattr(planning, "search", listening)
    for share in SHARES[:2]:
        made.settle(share, lambda _: None)
    whole_limit = ParityLimits().max_error_u
    assert seen[0] == pytest.approx((whole_limit, whole_limit * SHARES[0]))
    assert seen[-1] == pytest.approx((whole_limit * SHARES[1] / SHARES[0], whole_limit * SHARES[1]))


def test_ids_are_never_moved() -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 32, (32, 6))
    model = whole(nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 4)), {"input": tokens})
    subject = Subject(
        model.program, model.spec, Samples({"input": tokens.numpy()}), Precision(), ("torch",), Path(), {}
    )
    planning, _ = subject.samples.split()
    made = Planner(subject, planning, model.example, lambda _: None)
    assert made.course is not None
    assert sum(len(q.samples) for q in made.course.rehearsal.questions if not q.name) == planning.count


def test_what_a_search_finds_is_held_to_stricter_limits_than_the_lists_alone() -> None:
    made = planner(Gate())
    assert made.course is not None
    course, asked = made.course, list[tuple[int, float]]()

    class Listening(Rehearsal):
        def __init__(self) -> None:
            self.lessons, self.meter = course.rehearsal.lessons, course.rehearsal.meter
            self.spec = course.rehearsal.spec

        def dtypes(self, plan: PrecisionPlan) -> Dtypes:
            return course.rehearsal.dtypes(plan)

        def score(self, plan: PrecisionPlan, limits: ParityLimits) -> Score:
            asked.append((len(plan.kept) - len(course.plan.kept), limits.max_error_u))
            return course.rehearsal.score(plan, limits)

        def learn(self, plan: PrecisionPlan) -> bool:
            return course.rehearsal.learn(plan)

    limits = ParityLimits(max_error_u=4.0), ParityLimits(max_error_u=3.0)
    search(course.module, course.plan, Listening(), limits, [], lambda _: None)
    assert {limit for kept, limit in asked if kept == 0} == {4.0}
    assert {limit for kept, limit in asked if kept > 0} == {3.0}
