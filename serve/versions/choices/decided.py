"""What is not measured twice while one change of a version's choices follows the other."""

from dataclasses import dataclass, field

from ..loading.tuned import Way
from .rivals import CHANGES

_CLEARLY_SLOWER = 0.8  # times as fast as what serves: no other change makes up for it


@dataclass(slots=True, eq=False)
class Decided:
    """What was decided since the last sweep that changed nothing.

    ``ways`` that served do not come back. ``keys`` are the changes and forms that won, or were clearly slower: they are
    not tried again.
    """

    ways: set[Way] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)

    def note(self, key: str, gain: float, taken: bool) -> None:
        if taken and key not in CHANGES:  # another form: its passes are its own
            self.keys -= {*CHANGES}
        if taken or gain < _CLEARLY_SLOWER:
            self.keys.add(key)

    def clear(self) -> None:
        self.ways.clear()
        self.keys.clear()
