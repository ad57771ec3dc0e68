"""The effect of each op on a mask sentinel (−1e9, −3.4e38): the rules by which `sentinels.py` follows it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..policy.classes import Trait, has
from .guards import aten_name, is_view
from .masks import HIGH, NEUTRAL, Masked, Unknown, chosen
from .ranges import Profile

_ALSO_COPIES = ("getitem", "triu", "tril", "amax")
# op → the positions of the two tensors or numbers of which each element is one
_CHOICES = {
    "masked_fill": (0, 2), "masked_fill_": (0, 2), "where": (1, 2), "constant_pad_nd": (0, 2),
    "index_put": (0, 2), "index_put_": (0, 2), "minimum": (0, 1),
}  # fmt: skip
_MADE = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # op → position of its number


@dataclass(frozen=True, slots=True)
class Site:
    """A sentinel in the graph: argument ``position`` of ``node`` (None: the tensor that a get_attr names).
    ``role``: ``mask`` or ``floor``; ``sign``: −1 where the constant is positive and multiplied by −1."""

    node: Node
    position: int | None
    role: str = "mask"
    sign: float = 1.0


class Rules:
    """Applies the rules to one node after the other. ``masked``: the state of the nodes before.

    After a node, ``sites`` are the sentinels in it, ``fault`` is why it must not be rewritten although it can be
    followed, ``floors`` are earlier nodes whose constant turns out to be a floor.
    """

    def __init__(self, prefix: str, profile: Profile, masked: Mapping[Node, Masked]) -> None:
        self._prefix, self._profile, self.masked = prefix, profile, masked
        self._limit = profile.limits.largest
        self._forget()

    def _forget(self) -> None:
        self.sites: list[Site] = []
        self.floors: list[Node] = []
        self.fault = ""

    def look(self, node: Node) -> Masked | None:
        """The state of a node's result; None: no sentinel. Raises Unknown."""
        self._forget()
        return self._state(node, [source for source in node.all_input_nodes if source in self.masked])

    def _state(self, node: Node, sources: list[Node]) -> Masked | None:
        name = aten_name(node)
        if node.op in ("get_attr", "placeholder"):
            return self._given(node)
        if name in _MADE and self._is_sentinel(value := node.args[_MADE[name]]):
            self.sites.append(Site(node, _MADE[name]))
            return Masked(float(value), pure=True)  # type: ignore[arg-type]
        if name in _CHOICES and len(node.args) > max(_CHOICES[name]):
            return self._choice(node, [node.args[place] for place in _CHOICES[name]], _CHOICES[name])
        if name == "mul" and self._is_product(node):
            return self._product(node)
        if not sources or has(name, Trait.SEES_SIZES):
            return None
        if node.op == "output" and not self._prefix and all(self.masked[source].exact for source in sources):
            return None
        if name in ("cat", "stack"):
            return self._choice(node, list(node.args[0]), None)  # type: ignore[arg-type]
        return self._rule(name)(node)

    def _rule(self, name: str) -> Callable[[Node], Masked | None]:
        if has(name, Trait.COMPARES):
            return self._comparison
        if has(name, Trait.FLOORS):
            return self._floor
        if name in ("add", "add_", "sub", "sub_"):
            return self._sum
        if name in ("mul", "mul_"):
            return self._gated
        if has(name, Trait.SOFTMAX, Trait.ATTENTION):
            return self._sink
        return self._copy

    def _is_sentinel(self, value: Any) -> bool:
        return isinstance(value, int | float) and -math.inf < value < -self._limit

    def _given(self, node: Node) -> Masked | None:
        held = self._profile.range(self._prefix + node.name)
        if held is None or held.sentinel_lowest >= 0.0:
            return None
        if node.op == "placeholder":
            self.fault = f"the input {node.name} itself holds {held.sentinel_highest:.3g}"
            return Masked(held.sentinel_highest, bound=held.largest)
        if held.sentinel_lowest != held.sentinel_highest or held.non_finite:
            raise Unknown(f"the constant {node.name} holds several numbers that can only mean masks")
        self.sites.append(Site(node, None))
        pure = held.sentinels == held.count
        return Masked(held.sentinel_lowest, pure=pure, bound=held.largest)

    def _operand(self, node: Node, value: Any, position: int | None) -> Masked | float:
        """A value of a choice: its state if it may hold a sentinel, else its largest magnitude."""
        if isinstance(value, Node):
            known = self.masked.get(value)
            return _ordinary_bound(value, self._prefix, self._profile) if known is None else known
        if self._is_sentinel(value) and position is not None:
            self.sites.append(Site(node, position))
            return Masked(float(value), pure=True)
        if value == -math.inf:
            raise Unknown(f"{node.name} mixes −inf and a finite mask value")
        return abs(float(value))

    def _choice(self, node: Node, values: list[Any], positions: tuple[int, int] | None) -> Masked | None:
        masks = [node for node in values if isinstance(node, Node) and node in self.masked]
        if any(source in self.masked and source not in masks for source in node.all_input_nodes):
            raise Unknown(f"{node.name} ({aten_name(node)}) decides by a mask value")
        if not masks and not any(self._is_sentinel(value) for value in values):
            return None
        places = positions or (None,) * len(values)
        parts = [self._operand(node, value, place) for value, place in zip(values, places, strict=True)]
        return chosen(parts, node.name)

    def _is_product(self, node: Node) -> bool:
        """True if a sentinel is multiplied with a factor that selects (0 or 1, or 0 and −1)."""
        other = node.args[1]
        if isinstance(other, int | float):
            return self._limit < abs(other) < math.inf and node.args[0] not in self.masked
        pure = [arg for arg in node.args[:2] if isinstance(arg, Node) and arg in self.masked]
        return len(pure) == 1 and self.masked[pure[0]].pure and not self._is_bool(node)

    def _product(self, node: Node) -> Masked | None:
        number = node.args[1]
        if not isinstance(number, int | float):
            value = next(self.masked[arg].value for arg in node.args[:2] if arg in self.masked)  # type: ignore[index]
            if not self._holds_only(node, value):
                raise Unknown(f"{node.name} multiplies {value:.3g} with more than zeros and ones")
            return Masked(value)
        value = -abs(float(number))
        if not self._holds_only(node, value):
            return None  # a large factor, not a mask
        self.sites.append(Site(node, 1, sign=1.0 if number < 0 else -1.0))
        return Masked(value)

    def _holds_only(self, node: Node, value: float) -> bool:
        """True if a tensor had only zeros and one mask value on all samples."""
        held = self._profile.range(self._prefix + node.name)
        return held is not None and held.holds_only(value)

    def _is_bool(self, node: Node) -> bool:
        others = [arg for arg in node.args[:2] if isinstance(arg, Node) and arg not in self.masked]
        values = [other.meta.get("val") for other in others]
        return any(isinstance(value, Tensor) and value.dtype == torch.bool for value in values)

    def _gated(self, node: Node) -> Masked:
        masked, other = self._one_masked(node)
        if self._is_bool(node) or other == 1:
            return replace(masked, pure=False)
        raise Unknown(f"{node.name} multiplies a mask")

    def _one_masked(self, node: Node) -> tuple[Masked, Any]:
        first, second = (*node.args[:2], None)[:2]
        if isinstance(first, Node) and first in self.masked:
            return self.masked[first], second
        return self.masked[second], first  # type: ignore[index]

    def _comparison(self, node: Node) -> None:
        masked, other = self._one_masked(node)
        if isinstance(other, int | float) and abs(other) <= NEUTRAL:
            return
        exact = masked.exact and not masked.twice and not masked.floored
        if exact and isinstance(other, int | float) and _float32(other) == _float32(masked.value):
            self.sites.append(Site(node, 1))
        elif not (exact and isinstance(other, Node) and self.masked.get(other) == masked):
            raise Unknown(f"{node.name} compares a mask with {other}")

    def _floor(self, node: Node) -> Masked | None:
        if len(node.args) != 2 or node.kwargs:
            raise Unknown(f"{node.name} clamps a mask")
        masked, low = self._one_masked(node)
        if masked.pure and isinstance(low, Node) and low in self.masked:
            masked, low = self.masked[low], node.args[0]
        if isinstance(low, Node) and low in self.masked and self.masked[low].pure:
            value = self.masked[low].value
            self._lift(low)
        elif isinstance(low, int | float) and self._is_sentinel(low):
            value = float(low)
            self.sites.append(Site(node, 1, role="floor"))
        elif isinstance(low, int | float) and low > HIGH:
            return None  # above every mask value
        else:
            raise Unknown(f"{node.name} puts a floor under a mask")
        if value != masked.value:
            raise Unknown(f"{node.name} mixes mask values {sorted((value, masked.value))}")
        return Masked(value, bound=masked.bound, floored=True)

    def _lift(self, node: Node) -> None:
        """The constant behind a pure tensor is a floor: it must be nothing else."""
        while len(node.users) == 1:
            if node.op == "get_attr" or aten_name(node) in _MADE:
                self.floors.append(node)
                return
            node = node.args[0]  # type: ignore[assignment]
        raise Unknown(f"{node.name} is both a mask value and a floor")

    def _sum(self, node: Node) -> Masked:
        masked, other = self._one_masked(node)
        if node.kwargs.get("alpha", 1) != 1 or (aten_name(node).startswith("sub") and other is node.args[0]):
            raise Unknown(f"{node.name} subtracts or scales a mask")
        if isinstance(other, Node) and other in self.masked:
            second = self.masked[other]
            if second.value != masked.value:
                raise Unknown(f"{node.name} mixes mask values {sorted((second.value, masked.value))}")
            return Masked(masked.value, exact=False, twice=True, bound=masked.bound + second.bound)
        more = self._operand(node, other, None)
        assert isinstance(more, float)
        exact = masked.exact and more == 0.0
        return replace(
            masked, exact=exact, pure=False, bound=masked.bound + more, floored=masked.floored and exact
        )

    def _sink(self, node: Node) -> None:
        others = node.args[:3] if has(aten_name(node), Trait.ATTENTION) else ()
        if any(arg in self.masked for arg in others):
            raise Unknown(f"a mask reaches query, key or value of {node.name}")

    def _copy(self, node: Node) -> Masked | None:
        name, source = aten_name(node), node.args[0] if node.args else None
        value = node.meta.get("val")
        if not (has(name, Trait.COPIES) or name in _ALSO_COPIES or is_view(node)):
            raise Unknown(f"it reaches {node.name} ({name or node.op})")
        if source not in self.masked:  # only the sizes of a mask are read, or it is an index
            if name == "expand_as":
                return None
            raise Unknown(f"it reaches {node.name} ({name})")
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            return None
        if isinstance(value, Tensor) and value.dtype != torch.float32:
            raise Unknown(f"{node.name} turns a mask into {value.dtype}")
        masked = self.masked[source]  # type: ignore[index]
        return replace(masked, pure=False) if name in ("triu", "tril") else masked


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _ordinary_bound(node: Node, prefix: str, profile: Profile) -> float:
    """The largest magnitude of a tensor without sentinels. Raises Unknown where that is not known."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return 1.0
    held = profile.range(prefix + node.name)
    if held is None:
        raise Unknown(f"the range of {node.name} is not known")
    if held.non_finite or held.sentinels:
        raise Unknown(f"{node.name} itself holds infinities or numbers of 1e9 and more")
    return held.largest
