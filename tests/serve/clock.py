"""A clock that a test moves by hand."""

from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)


class Clock(Generic[Number]):
    """A clock in the unit of ``now``: whole nanoseconds, or seconds."""

    def __init__(self, now: Number) -> None:
        self.now = now

    def __call__(self) -> Number:
        return self.now
