"""Each caller has a bound on what all callers share: a key may hold as much as is free beside what it holds.

So one key alone has half of it, n greedy keys have an equal part each, and another key still finds a part free, without
a number to be set for each (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
On a server without keys callers cannot be distinguished, and the bound is that of all.
"""

from collections import Counter

from ....models.errors import KeyLimitReached, Overloaded


def may_hold(more: int, own: int, taken: int, most: int, owner: str) -> bool:
    """True if ``owner`` (empty: a caller without a key), who holds ``own``, may hold ``more`` of ``most``, of
    which all callers hold ``taken``."""
    free = most - taken
    return more <= free and (not owner or own + more <= free)


class SharedPlaces:
    """A number of places; ``what``: their name, in the plural. There is no lock: only the event loop's thread may use
    it."""

    def __init__(self, most: int, what: str, advice: str, retry_after_s: float) -> None:
        self.most, self._what, self._advice, self._retry_after_s = most, what, advice, retry_after_s
        self._held: Counter[str] = Counter()  # by owner

    @property
    def count(self) -> int:
        """Places that are taken."""
        return self._held.total()

    def take(self, owner: str) -> "TakenPlace":
        """A place, taken before anything is awaited for it. Raises Overloaded where all are taken, KeyLimitReached
        where the owner's share is."""
        if not may_hold(1, self._held[owner], self.count, self.most, owner):
            if self.count < self.most:
                raise KeyLimitReached(
                    f"{self._held[owner]} of at most {self.most} {self._what} are this key's, and what is free is kept "
                    f"for other keys; {self._advice}",
                    self._retry_after_s,
                )
            raise Overloaded(f"{self.most} {self._what}; {self._advice}", self._retry_after_s)
        self._held[owner] += 1
        return TakenPlace(self, owner)

    def _leave(self, owner: str) -> None:
        self._held[owner] -= 1
        self._held = +self._held  # without the owners that have none: keys come and go


class TakenPlace:
    """One place; `leave`, or the end of a ``with`` block, gives it back, once, however often."""

    def __init__(self, places: SharedPlaces, owner: str) -> None:
        self._places: SharedPlaces | None = places
        self._owner = owner

    def leave(self) -> None:
        places, self._places = self._places, None
        if places is not None:
            places._leave(self._owner)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.leave()
