"""Watches one step on a processor: the processor time of each operator, and an end in the middle of the step where it
takes too long. Needs torch alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

Clock = Callable[[], float]
NAMED = 3  # operators of a slow precision
SHARE = 0.05  # of the step's time: an operator with less is not named


class TooSlow(Exception):
    """The step was ended because it had taken too long already."""


class StepWatch(TorchDispatchMode):
    """Inside, the seconds of each operator are added up, of forward, backward and optimizer alike. Behind the operator
    with which the step exceeds ``most`` seconds of processor time it raises TooSlow. ``took``: processor time from the
    beginning to the end.

    To ask for processor time takes longer than a small operator: it is asked only where ``most`` seconds went by.
    """

    def __init__(self, clock: Clock, work_clock: Clock, most: float = float("inf")) -> None:
        super().__init__()
        self._clock, self._work_clock, self._most = clock, work_clock, most
        self.seconds: dict[str, float] = {}
        self.took = 0.0

    def __enter__(self) -> "StepWatch":
        self._began, self._work_began = self._clock(), self._work_clock()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.took = self._work_clock() - self._work_began

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        began = self._clock()
        answer = func(*args, **(kwargs or {}))
        now = self._clock()
        name = func.overloadpacket.__name__
        self.seconds[name] = self.seconds.get(name, 0.0) + now - began
        if now - self._began > self._most and self._work_clock() - self._work_began > self._most:
            raise TooSlow
        return answer


@dataclass(frozen=True, slots=True)
class Slow:
    """A precision that is much slower than another one, ``than``: how many times as long a step took at least, and the
    operators that took most of it, each with its own times."""

    precision: str
    than: str
    times: float
    operators: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        named = ", ".join(f"{name} {times:.0f}" for name, times in self.operators)
        return (
            f"on this processor a step takes at least {self.times:.0f} times as long in {self.precision} as in "
            f"{self.than}" + (f" (operators, in times of {self.than}: {named})" if named else "")
        )


def slow(precision: str, watch: StepWatch, than: str, best: StepWatch) -> Slow:
    """The comparison of two watched steps of the same rows. The slow step may have been ended in its middle."""
    by_time = sorted(watch.seconds.items(), key=lambda one: -one[1])
    heavy = [(name, taken) for name, taken in by_time[:NAMED] if taken > SHARE * watch.took]
    return Slow(precision, than, watch.took / best.took, tuple(_times(heavy, best)))


def _times(heavy: Iterable[tuple[str, float]], best: StepWatch) -> Iterable[tuple[str, float]]:
    for name, taken in heavy:
        if (before := best.seconds.get(name, 0.0)) > 0 and taken > before:
            yield name, taken / before
