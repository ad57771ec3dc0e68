"""The order that a plan keeps among many unseen samples, with room for samples that are never tried.

The order in which a search asks about the nodes that it may keep in FP32, the same for every back end, is here too.

Among few samples a tie is rare and a swap rarer: of 120 pairs none says what a thousand will do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...models.spec.spec import ModelSpec
from ..gate.order import ALLOWED_U, KINDS
from ..gate.parity import judge
from ..gate.rule_verdicts import ORDER_RULES, Failure
from ..gate.trial import Trial
from ..gate.verdict import OutputVerdict, ParityReport
from ..graph.backend import Candidate
from ..policy.classes import Rule, class_of
from ..ranges.ranges import Profile, suspicion

RANKED = 2048  # rows; of 512 another 200 found pairs that nobody had seen swap
TIES = 0.5  # of those that the gate allows
# The share of the distance up to which the gate lets two samples change places; beyond it not a single pair.
SWAPS = 0.75
# Takes the answers of a half and whether pairs that swap must stay below `SWAPS` (True) or below the gate's own limit
# (False). Gives the report where the half breaks the order, else None.
OrderJudge = Callable[[Sequence[Trial], bool], ParityReport | None]


def ranks(spec: ModelSpec) -> bool:
    """True if any output is of a kind that ranks."""
    return any(tensor.kind in KINDS for tensor in spec.outputs)


def head_first(spec: ModelSpec, candidates: Sequence[str]) -> list[str]:
    """The candidates, given in the graph's order; for a model that ranks, in the opposite one.

    An order is lost at the end of a graph, where scores saturate, and a search keeps what it is given first.
    """
    return list(reversed(candidates)) if ranks(spec) else list(candidates)


def ranking(spec: ModelSpec, dtype: str) -> OrderJudge | None:
    """The judge of a half's order; None for a model that ranks nothing."""
    limits = replace(spec.parity, max_ties=spec.parity.max_ties * TIES)

    def broken(trials: Sequence[Trial], room: bool) -> ParityReport | None:
        report = judge(replace(spec, parity=limits), dtype, trials)
        if room and "max_swaps" not in spec.parity.overridden:
            report = replace(report, outputs=tuple(map(_with_room, report.outputs)))
        return report if any(failure.rule in ORDER_RULES for failure in report.all_failures) else None

    return broken if ranks(spec) else None


def _with_room(output: OutputVerdict) -> OutputVerdict:
    order = output.order
    if order is None or order.swap_u <= ALLOWED_U * SWAPS:
        return output
    swap = Failure(
        "swaps",
        f"output '{output.name}' swaps samples that are {order.swap_u:.3g}u of the spread apart: a plan is to stay "
        f"below {ALLOWED_U * SWAPS:g}u",
    )
    return replace(output, failures=(*output.failures, swap))


DOUBT = 200.0  # above the score of every suspicion


def candidates(
    spec: ModelSpec, profile: Profile, nodes: Mapping[str, str], doubts: Mapping[str, str]
) -> list[Candidate]:
    """The nodes that the search may keep, the most suspicious first; products, which gain most by half, last.

    ``nodes``: their operations by name, in the graph's order. ``doubts``: node → why a rule would keep it, had no
    search been asked for.
    """
    suspects = suspicion(profile)
    scores = {one.node: one.score for one in suspects}
    reasons = {**{one.node: one.reason for one in suspects}, **doubts}

    def place(name: str) -> tuple[float, bool]:
        score = scores.get(name, 0.0) + DOUBT * (name in doubts)
        return -score, not score and class_of(nodes[name]).o1 is Rule.LOWER

    return [
        Candidate(name, nodes[name], reasons.get(name, ""))
        for name in sorted(head_first(spec, list(nodes)), key=place)
    ]
