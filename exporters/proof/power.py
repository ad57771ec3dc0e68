"""The power of a proof: which of the faults that were planted in the original (`exporters/proof/planted_faults.py`) the
gate noticed on the judged samples, and whether these samples can tell a wrong half from an equal one."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...models.files.json_fields import finite

FINE, SIGN, EXPONENT = "8u", "sign", "exponent"
FAULTS = (FINE, SIGN, EXPONENT)
# The reasons why a fine fault at a node is not noticed. No samples show a damped one, and of a near one larger ones are
# noticed. These samples hide the last two, and the others where no fault at the node is noticed, whatever its size.
UNEXPLAINED, NEAR, STEP, DAMPED, BYPASSED = "unexplained", "near", "step", "damped", "bypassed"
SATURATED, DEAD = "saturated", "dead"
MOST_BLIND = 0.5  # of the nodes

_NOT_SHOWN = "not shown: these samples cannot tell"
_HOW = "(samples.safetensors in the model's folder, or --samples FILE)"
_HELPS = {
    SATURATED: "the answers are decided so far that an error hardly moves them; give samples between whose answers the "
    "model hesitates, as real ones are, or give out the numbers before the last nonlinear node",
    DEAD: "the answers hardly depend on the samples; give samples with different answers, as real ones have",
}
_UNUSED = (
    "no error there changes the answers, however large; give samples for which the model uses these nodes"
)
EXPLAINED: Mapping[str, str] = {  # of a node that has several on different samples the first counts
    UNEXPLAINED: "no measurement explains it, so it may reach the limit on other samples",
    NEAR: "the fault comes to more than half of the limit, and larger ones grow in proportion until they are noticed",
    STEP: "the answers change in steps, and no judged sample lies near one",
    DAMPED: "the rest of the graph makes the fault smaller than the limit; larger ones grow in proportion",
    BYPASSED: "the answers depend on the samples, but not on this node",
    SATURATED: "the rest of the graph is saturated by these samples: with smaller signals it shows the fault",
    DEAD: "the answers to these samples depend neither on the samples nor on this node",
}


@dataclass(frozen=True, slots=True)
class Planted:
    """One node. ``noticed``: the kinds of fault that the gate refuses; ``response``: the error of the answers that the
    fine fault makes, as a share of the allowed one; ``why``: of a fine fault that is not noticed; ``seen_at_u``: the
    least planted size at which the gate notices such a fault, infinite where it notices none. ``outputs``: the model's
    outputs, or the parts of one that is joined of several, that are computed from this node."""

    node: str
    op: str
    noticed: frozenset[str]
    response: float
    why: str = ""
    seen_at_u: float = math.inf
    outputs: frozenset[str] = frozenset()

    @property
    def is_blind(self) -> bool:
        never = not self.noticed and math.isinf(self.seen_at_u)
        return self.why in (SATURATED, DEAD) or (self.why in (UNEXPLAINED, STEP, BYPASSED) and never)

    def joined(self, other: "Planted") -> "Planted":
        """One result for this node on all samples of both. A fault counts as noticed if some samples show it."""
        why = "" if not (self.why and other.why) else min(self.why, other.why, key=list(EXPLAINED).index)
        noticed = self.noticed | other.noticed
        response, seen = max(self.response, other.response), min(self.seen_at_u, other.seen_at_u)
        return replace(self, noticed=noticed, response=response, why=why, seen_at_u=seen)


@dataclass(frozen=True, slots=True)
class Power:
    """``planted``: in the graph's order; ``samples``: on so many of the judged ones; where it is shown, most nodes
    were asked on the first few of them alone. ``alike``: the outputs that answer the same to every sample, as far as
    the gate can tell; ``samples_alike``: all samples are the same; ``output_of``: of each part of the answers."""

    planted: tuple[Planted, ...]
    samples: int
    alike: frozenset[str] = frozenset()
    samples_alike: bool = False
    output_of: Mapping[str, str] = field(default_factory=dict)

    def noticed(self, kind: str) -> float:
        """The share of all faults of this kind that the gate notices; 0 where none was planted."""
        return sum(kind in one.noticed for one in self.planted) / max(len(self.planted), 1)

    @property
    def undamped(self) -> tuple[Planted, ...]:
        """The nodes but those whose fine fault is measured to be damped below the limit."""
        return tuple(one for one in self.planted if one.why != DAMPED)

    @property
    def share(self) -> float:
        """The share of the undamped fine faults that the gate notices; 1 where there is none."""
        return 1.0 - sum(FINE not in one.noticed for one in self.undamped) / max(len(self.undamped), 1)

    @property
    def hidden(self) -> float:
        """The share of the undamped fine faults that these samples hide; 0 where there is none."""
        return sum(one.is_blind for one in self.undamped) / max(len(self.undamped), 1)

    @property
    def is_shown(self) -> bool:
        return not (self.samples_alike or self.hiding)

    @property
    def hiding(self) -> frozenset[str]:
        """The outputs of which the samples show too little: faults at nodes that lead to them alone, so that no other
        output shows them."""
        hiding, every = frozenset[str](), frozenset[str]().union(*(one.outputs for one in self.planted))
        for outputs in sorted(
            {every, *(one.outputs for one in self.planted)}, key=lambda some: (len(some), sorted(some))
        ):
            nodes = [one for one in self.planted if one.outputs <= outputs and not one.outputs <= hiding]
            hiding |= outputs if self._hide(nodes, outputs) else frozenset()
        return hiding

    @property
    def fp32_outputs(self) -> frozenset[str]:
        """The outputs that are not shown, where others are and may be half."""
        outputs = frozenset(self.output_of[part] for part in self.hiding)
        return outputs if not self.samples_alike and outputs < {*self.output_of.values()} else frozenset()

    def _hide(self, nodes: Sequence[Planted], outputs: frozenset[str]) -> bool:
        """True if the samples are blind for most of these nodes, but for the last of each output, whose result is the
        answer or close to it; for any, where all these outputs answer the same to every sample: nodes that depend on no
        input (a table of positions) show their faults all the same."""
        last = {name: one.node for one in nodes for name in one.outputs}.values()
        most = 0 if outputs <= self.alike else MOST_BLIND * (len(nodes) - len({*last}))
        return sum(one.is_blind for one in nodes) > most

    def summary(self) -> dict[str, Any]:
        return {
            "shown": self.is_shown,
            "not_shown": sorted(self.hiding),
            "samples": self.samples,
            "share": round(self.share, 4),
            "damped": len(self.planted) - len(self.undamped),
            "near": sum(one.why == NEAR for one in self.planted),
            "noticed": {kind: round(self.noticed(kind), 4) for kind in FAULTS},
            "hidden": round(self.hidden, 4),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            **self.summary(),
            "missed": dict(Counter(one.why for one in self.planted if one.why)),
            "nodes": [
                {
                    "node": one.node,
                    "op": one.op,
                    "noticed": [kind for kind in FAULTS if kind in one.noticed],
                    "response": finite(one.response),
                    "seen_at_u": finite(one.seen_at_u),
                    "why": one.why,
                    "blind": one.is_blind,
                }
                for one in self.planted
            ],
        }


def why_not_shown(power: Power) -> str:
    """A reason where the judged samples cannot tell whether a half is equal; empty where they can."""
    if power.is_shown:
        return ""
    if power.samples_alike:
        return f"{_NOT_SHOWN}: all judged samples are the same; give different ones {_HOW}"
    outputs = power.hiding
    nodes = [one for one in power.planted if one.outputs <= outputs]
    blind = [one for one in nodes if one.is_blind]
    names = ", ".join(f"'{name}'" for name in sorted(outputs))
    leading = f" that lead to no output but {names}" if len(nodes) < len(power.planted) else ""
    ((why, _),) = Counter(one.why for one in blind).most_common(1)
    shown = sum(FINE in one.noticed for one in nodes) / len(nodes)
    return (
        f"{_NOT_SHOWN}. Of errors of {FINE} that were planted at {len(nodes)} nodes of the FP32 model{leading}, its "
        f"answers to {power.samples} judged samples show {shown:.0%}, and hide those at {len(blind)} of "
        f"them ('{blind[-1].node}' is the last): {_HELPS.get(why, _UNUSED)} {_HOW}"
    )
