"""The nodes that a search may keep in FP32, in the order in which it asks about them: the same for every back end."""

from collections.abc import Mapping

from ...models.spec.spec import ModelSpec
from ..graph.backend import Candidate
from ..policy.classes import Rule, class_of
from ..ranges.ranges import Profile
from ..ranges.suspicion import suspicion
from .ranking import head_first

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
