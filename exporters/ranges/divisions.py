"""Guards against zero as both back ends know them, and the divisions that they guard."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..policy.classes import Trait, class_of, has

# Operations whose result is 0 where their input is 0, besides those that move, copy, select or add.
_ZERO_STAYS = ("sum", "statistic", "root", "multiplication")


@dataclass(frozen=True, slots=True)
class Guard:
    """``node`` guards with ``constant``, which is ``in_half``; ``readers``: the nodes that it keeps from a zero."""

    node: str
    guarded: str
    constant: float
    in_half: float
    readers: tuple[str, ...]

    @property
    def vanishes(self) -> bool:
        return self.in_half == 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"vanishes": self.vanishes}


T = TypeVar("T", bound=Hashable)


def reaches_a_division(start: T, readers: Callable[[T], Iterable[tuple[T, str, bool]]]) -> bool:
    """True if a node's result becomes a divisor, through operations that keep a zero a zero.

    ``readers``: the readers of a node, with their operation and whether they divide by it.
    """
    seen, waiting = {start}, [start]
    while waiting:
        for reader, op, divides in readers(waiting.pop()):
            if divides:
                return True
            passes = (
                has(op, Trait.MOVES, Trait.COPIES, Trait.SELECTS, Trait.ADDS)
                or class_of(op).name in _ZERO_STAYS
            )
            if passes and reader not in seen:
                seen.add(reader)
                waiting.append(reader)
    return False
