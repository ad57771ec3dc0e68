"""The plan settled: nothing kept that need not be, everything kept that must, each with its evidence."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.exporters.inputs.perturbed import COPIES
from halfeven.exporters.inputs.samples import SLOW_SAMPLES, Samples
from halfeven.exporters.plan.aims import RETREATS, SEARCHED, SHARES
from halfeven.exporters.plan.counterexamples import CALM_ROWS
from halfeven.exporters.plan.planner import Planner
from halfeven.exporters.plan.rehearsal import Rehearsal
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.question import Question
from halfeven.exporters.search.delta_debugging import Score
from halfeven.exporters.torch.autocast.emulation import Emulation
from halfeven.exporters.torch.program_graph import ProgramGraph, program_graph
from halfeven.models.folder.package import Precision
from halfeven.models.spec.spec import ParityLimits
from torch import Tensor, nn

from tests.programs import Original, original


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


class Loud(nn.Module):
    """Four times a row of ones comes to 56,000 inside: near the end of half's range, and within it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.first.weight.data = 14000.0 * torch.eye(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) / 14000.0)


def prepared(module: nn.Module, precision: Precision | None = None) -> tuple[ProgramGraph, Samples, Samples]:
    """The graph of a module, with the samples that plan and those that judge."""
    torch.manual_seed(1)
    samples = {"x": torch.randn(32, 8)}
    return graph_of(original(module, samples), Samples({"x": samples["x"].numpy()}), precision or Precision())


def graph_of(
    model: Original, samples: Samples, precision: Precision
) -> tuple[ProgramGraph, Samples, Samples]:
    subject = Subject(model.program, model.spec, samples, precision, ("torch",), Path(), {})
    planning, judging = samples.split()
    return program_graph(subject, planning, model.example), planning, judging


def planner(
    module: nn.Module, precision: Precision | None = None, search: bool | None = False
) -> Planner[ProgramGraph]:
    graph, planning, _ = prepared(module, precision)
    return Planner(graph, planning, search)


def settled(
    module: nn.Module, precision: Precision | None = None, search: bool | None = False
) -> Planner[ProgramGraph]:
    made = planner(module, precision, search)
    assert made.settle(SHARES[0], lambda _: None)
    return made


def kept(made: Planner[ProgramGraph]) -> Sequence[str]:
    return [one.node for one in made.plan.kept]


def questions(rehearsal: Rehearsal) -> list[Question]:
    return [one for batch in rehearsal.samples for one in batch.questions]


def test_without_any_search_the_lists_alone_decide() -> None:
    made = settled(Gate(), search=None)
    assert kept(made) == [] and made.search == "not asked"


def test_a_healthy_model_keeps_nothing() -> None:
    made = settled(Healthy())
    assert kept(made) == [] and made.search == "not needed"


@pytest.mark.slow
def test_the_one_node_that_overflows_is_kept_with_reason_and_evidence() -> None:
    made = settled(Gate())
    (one,) = made.plan.kept
    assert one.op.startswith("mul") and "overflow" in one.reason
    assert one.evidence.startswith("without it: ")
    assert made.plan.found is not None and made.plan.found.minimal and made.search == "complete"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_without_its_kept_node_the_half_would_fail(level: str) -> None:
    graph, planning, _ = prepared(Gate(), Precision(level))
    found = Planner(graph, planning, search=False)
    found.settle(SHARES[0], lambda _: None)
    rehearsal = Rehearsal(graph, planning)
    assert rehearsal.score(found.plan.names, graph.spec.parity).passed
    assert not rehearsal.score([], graph.spec.parity).passed


@pytest.mark.slow
def test_o3_means_what_was_asked_unless_a_search_is() -> None:
    made = settled(Gate(), Precision("O3"))
    assert made.plan.names == [] and made.search == "not asked"
    assert settled(Gate(), Precision("O3"), search=True).plan.names != []


def test_o0_plans_nothing() -> None:
    made = settled(Gate(), Precision("O0"))
    assert kept(made) == [] and made.search == "not asked" and not made.graph.has_half()


@pytest.mark.slow
def test_an_exact_repair_is_tried_before_a_node_is_kept() -> None:
    made = settled(Squares())
    assert made.plan.graph.repairs and kept(made) == []


class TooFine(nn.Module):
    """The sum leaves far less than its terms: no exponent helps."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 20.0) - 20.0


@pytest.mark.slow
def test_where_only_fp32_everywhere_would_pass_the_half_is_left_as_it_is() -> None:
    """The gate refuses it then, and names the override that would accept it."""
    made = settled(TooFine(), Precision("O2"))
    assert made.plan.searched == () and made.search == "failed" and made.graph.has_half()
    assert "output 'y0' errs by" in made.why_failed and "--keep" not in made.why_failed


@pytest.mark.slow
def test_asked_again_it_only_says_so_where_the_plan_is_another() -> None:
    made = settled(Healthy())
    assert made.settle(SHARES[1], lambda _: None) is False


@pytest.mark.slow
def test_after_a_near_miss_more_nodes_stay_in_fp32_and_in_the_end_all_of_them() -> None:
    made = settled(Gate())
    before = set(made.plan.names)
    assert made.settle(RETREATS[0], lambda _: None)
    more = set(made.plan.names)
    assert before < more and made.plan.graph.has_half()
    assert made.settle(RETREATS[-1], lambda _: None)
    assert more < set(made.plan.names) == {one.node for one in made.graph.candidates()}
    assert not made.plan.graph.has_half(made.plan.names) and all(one.reason for one in made.plan.kept)


class Coarse(nn.Module):
    """A sum that leaves far less than its terms, before layers that half is good for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first((x + 20.0) - 20.0)))


@pytest.mark.slow
def test_a_refusal_names_the_nearest_plan_that_passes() -> None:
    made = planner(Coarse(), Precision("O2"))
    sentence = made.nearest(lambda _: None)
    assert "--keep add" in sentence and f"of {len(made.graph.candidates())} nodes" in sentence
    assert "FP32 everywhere" in planner(TooFine(), Precision("O2")).nearest(lambda _: None)
    assert planner(Coarse(), Precision("O3")).nearest(lambda _: None) == "", "nothing was looked for"


def test_the_node_that_overflows_is_measured_as_the_costliest() -> None:
    graph, planning, _ = prepared(Gate())
    first = Rehearsal(graph, planning).most_costly_first[0]
    assert first.startswith("mul")


def test_the_samples_that_judge_are_not_those_that_choose() -> None:
    graph, planning, judging = prepared(Gate())
    seen = torch.cat([torch.from_numpy(one.inputs["x"]) for one in questions(Rehearsal(graph, planning))])
    judged = torch.from_numpy(judging.arrays["x"].copy())
    assert not (seen[:, None] == judged[None]).all(-1).any()


def test_a_plan_is_tried_on_perturbed_samples() -> None:
    graph, planning, _ = prepared(Healthy())
    real = [torch.from_numpy(one.inputs["x"]) for one in questions(Rehearsal(graph, planning))]
    seen, moved = torch.cat(real[:2]), torch.cat(real[2:])
    assert len(moved) == COPIES * len(seen)
    gap = (moved.reshape(COPIES, *seen.shape) - seen).std()
    assert 0.4 < gap < 0.6, "half of what samples spread over, which is about 1"


@pytest.mark.slow
def test_a_small_model_is_tried_on_thousands_of_unseen_samples_in_few_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, planning, _ = prepared(Healthy())
    rehearsal, runs, run = Rehearsal(graph, planning), list[int](), Emulation.run
    monkeypatch.setattr("halfeven.exporters.plan.counterexamples.CALM", -1.0)
    unseen = [one for batch in rehearsal.counterexamples.unseen for one in batch.questions]

    def counted(self: Emulation, *inputs: Tensor) -> Sequence[Tensor]:
        runs.append(len(inputs[0]))
        return run(self, *inputs)

    monkeypatch.setattr(Emulation, "run", counted)
    assert not rehearsal.find_counterexamples([])
    assert sum(len(one.samples) for one in unseen) == rehearsal.counterexamples.tried > 3 * CALM_ROWS
    assert len(runs) < len(unseen) / 20


@pytest.mark.parametrize(("module", "enough"), [(Healthy, True), (Gate, False)])
def test_fewer_unseen_samples_are_enough_where_nothing_is_suspected_and_the_error_is_small(
    module: type[nn.Module], enough: bool
) -> None:
    graph, planning, _ = prepared(module())
    rehearsal = Rehearsal(graph, planning)
    kept = [] if enough else [one.node for one in graph.candidates() if not one.reason]
    rehearsal.find_counterexamples(kept)
    assert (CALM_ROWS <= rehearsal.counterexamples.tried <= 2 * CALM_ROWS) == enough


def test_planning_samples_beyond_those_of_every_trial_are_tried_before_perturbed_ones() -> None:
    torch.manual_seed(1)
    samples = {"x": torch.randn(80, 8)}
    graph, planning, _ = graph_of(
        original(Healthy(), samples), Samples({"x": samples["x"].numpy()}), Precision()
    )
    unseen = [one for batch in Rehearsal(graph, planning).counterexamples.unseen for one in batch.questions]
    given = {row.tobytes() for row in planning.arrays["x"]}
    assert {row.tobytes() in given for one in unseen[:3] for row in one.inputs["x"]} == {True}
    assert not any(row.tobytes() in given for one in unseen[3:] for row in one.inputs["x"])


def test_a_costly_model_answers_fewer_samples_in_every_trial_and_the_others_are_tried_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, planning, _ = prepared(Healthy())
    monkeypatch.setattr("halfeven.exporters.inputs.samples.PLANNING_OPERATIONS", 0)
    rehearsal = Rehearsal(graph, planning)
    in_every_trial = [row for batch in rehearsal.own for one in batch.questions for row in one.inputs["x"]]
    unseen = [one for batch in rehearsal.counterexamples.unseen for one in batch.questions]
    assert len(in_every_trial) == SLOW_SAMPLES < planning.count
    assert np.array_equal(np.concatenate([in_every_trial, unseen[0].inputs["x"]]), planning.arrays["x"])


@pytest.mark.parametrize("bound", ["MAX_ELEMENTS", "MAX_OPERATIONS"])
def test_samples_that_are_large_or_costly_are_perturbed_for_a_plan_that_passes_and_not_for_every_trial(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    graph, planning, _ = prepared(Healthy())
    once = {
        "MAX_ELEMENTS": planning.arrays["x"].size,
        "MAX_OPERATIONS": COPIES * graph.operations().of(planning.arrays),
    }
    monkeypatch.setattr(f"halfeven.exporters.inputs.perturbed.{bound}", once[bound] - 1)
    rehearsal = Rehearsal(graph, planning)
    assert graph.operations() is graph.operations(), "to count them the model is run"
    assert rehearsal.samples == rehearsal.own
    assert (
        sum(len(one.samples) for batch in rehearsal.counterexamples.unseen for one in batch.questions) > 1000
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The number of nodes that each trial kept, and its share of the gate's limit."""
    found, score = list[tuple[int, float]](), Rehearsal.score

    def listening(self: Rehearsal, names: Collection[str], limits: ParityLimits, largest: float) -> Score:
        found.append((len(names), limits.max_error_u / ParityLimits().max_error_u))
        return score(self, names, limits, largest)

    monkeypatch.setattr(Rehearsal, "score", listening)
    return found


@pytest.mark.slow
def test_what_a_search_finds_is_held_to_stricter_limits_than_the_lists_alone(
    asked: list[tuple[int, float]],
) -> None:
    settled(Gate())
    assert {share for kept, share in asked if kept == 0} == {SHARES[0]} == {1.0}
    assert {share for kept, share in asked if kept > 0} == {SEARCHED}


@pytest.mark.slow
def test_after_a_proof_that_failed_the_lists_alone_are_held_to_stricter_limits_too(
    asked: list[tuple[int, float]],
) -> None:
    made = settled(Healthy())
    asked.clear()
    made.settle(SEARCHED, lambda _: None)
    assert asked == [(0, SEARCHED)]


@pytest.mark.slow
def test_after_a_proof_that_failed_what_a_search_found_is_not_searched_for_again_at_the_same_limits(
    asked: list[tuple[int, float]],
) -> None:
    made = settled(Gate())
    asked.clear()
    assert not made.settle(SEARCHED, lambda _: None) and not asked
    made.settle(SHARES[2], lambda _: None)
    assert {share for _, share in asked} == {SHARES[2]}


def test_ids_are_asked_as_they_continue_in_another_sample_and_a_lone_sample_is_asked_as_it_is() -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 32, (32, 6))
    model = original(nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 4)), {"input": tokens})
    graph, planning, _ = graph_of(model, Samples({"input": tokens.numpy()}), Precision())
    found = questions(Rehearsal(graph, planning))
    assert sum(len(one.samples) for one in found) == (1 + COPIES) * planning.count
    known = {tuple(row) for row in planning.arrays["input"]}
    asked = {tuple(row) for one in found for row in one.inputs["input"]}
    assert known < asked and all(
        any(
            row[:cut] == one[:cut] and row[cut:] == other[cut:]
            for cut in range(7)
            for one in known
            for other in known
        )
        for row in asked
    )
    lone = questions(Rehearsal(graph, planning.take(slice(0, 1))))
    assert sum(len(one.samples) for one in lone) == 1


@pytest.mark.slow
def test_a_plan_that_the_proof_refused_leaves_room_for_larger_samples() -> None:
    """Samples that judge may be larger than those that choose a plan: four times 1.3 leaves half's range.

    The rows are eighths, which half holds exactly: no draw makes the second product err by much.
    """
    rows = torch.randint(-8, 9, (32, 8)) / 8
    rows[:, 0] = 1.0
    graph, planning, _ = graph_of(original(Loud(), {"x": rows}), Samples({"x": rows.numpy()}), Precision())
    asked = Planner(graph, planning, search=False)
    assert asked.settle(SHARES[0], lambda line: None) and asked.plan.names == []
    assert asked.settle(SHARES[2], lambda line: None) and asked.plan.names == ["linear"]
