"""The effect of each ONNX op on a mask sentinel (−1e9, −3.4e38): the rules by which `masks.py` follows it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from ...policy.classes import Trait, has
from ...ranges.masks import HIGH, NEUTRAL, Masked, Unknown, chosen
from ...ranges.ranges import Range
from ..reading.graph import ForeignProgram


@dataclass(frozen=True, slots=True)
class Rules:
    """``masked``: the state of the values before. `look` gives the state of a node's results, None: no sentinel."""

    program: ForeignProgram
    ranges: Mapping[str, Range]
    masked: Mapping[str, Masked]

    def look(self, node: NodeProto) -> Masked | None:
        """Raises Unknown where no rule covers what the node does with a sentinel."""
        held = [name for name in node.input if name in self.masked]
        op = node.op_type
        if not held or has(op, Trait.SEES_SIZES, Trait.SOFTMAX):
            return None
        if op == "Where" and node.input[0] not in self.masked:
            return self.choice(node, list(node.input[1:]))
        if op == "Concat":
            return self.choice(node, list(node.input))
        if op == "Mul" and len(held) == 1:
            return self.product(node, self.masked[held[0]])
        if op == "Add" and len(held) == 1:
            return self.sum(node, held[0])
        if has(op, Trait.COMPARES, Trait.SEES_PRECISION):
            return self.comparison(node)
        if op == "Clip" and held == [node.input[0]]:
            return self.clipped(node)
        if (has(op, Trait.COPIES) or op in ("Trilu", "ReduceMax")) and held == [node.input[0]]:
            mask = self.masked[held[0]]
            return replace(mask, pure=False) if op == "Trilu" else mask
        raise Unknown(f"it reaches '{node.name}' ({op})")

    def choice(self, node: NodeProto, names: list[str]) -> Masked:
        parts = [self.masked[name] if name in self.masked else self.ordinary(name) for name in names]
        return chosen(parts, f"'{node.name}'")

    def product(self, node: NodeProto, mask: Masked) -> Masked:
        """A product with zeros and ones only, as on all samples."""
        held = self.ranges.get(node.output[0], Range())
        if not (mask.pure and held.holds_only(mask.value)):
            raise Unknown(f"'{node.name}' multiplies a mask with more than zeros and ones")
        return Masked(mask.value)

    def sum(self, node: NodeProto, name: str) -> Masked:
        other = next(each for each in node.input if each != name)
        mask, more = self.masked[name], self.ordinary(other)
        return replace(mask, exact=mask.exact and more == 0, pure=False, bound=mask.bound + more)

    def comparison(self, node: NodeProto) -> None:
        """A comparison with a small number, or an infinity: the sentinel and its replacement are on the same side."""
        for name in node.input:
            number = self.program.weights.get(name)
            if name in self.masked and number is None:
                continue
            if number is None or not (np.isinf(number) | (np.abs(number) <= NEUTRAL)).all():
                raise Unknown(f"'{node.name}' compares a mask with '{name}'")

    def clipped(self, node: NodeProto) -> None:
        """A floor above every mask value: no sentinel is left."""
        low = self.program.weights.get(node.input[1]) if len(node.input) > 1 else None
        if low is None or not (low > HIGH).all():
            raise Unknown(f"'{node.name}' clips a mask")

    def ordinary(self, name: str) -> float:
        """The largest magnitude of a value without sentinels."""
        held = self.ranges.get(name)
        if held is None or held.infinite or held.sentinels:
            raise Unknown(f"'{name}' itself holds infinities or numbers of 1e9 and more")
        return held.largest
