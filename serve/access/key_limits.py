"""The limits of one key: requests per second and requests at once."""

from ...models.errors import KeyLimitReached

_RETRY_AT_ONCE_S = 1.0  # when one of the requests under way will have ended is not known


class KeyLimits:
    """A token bucket that holds one second's requests, and a count of the requests under way. None: no limit."""

    __slots__ = ("_at_s", "_burst", "_concurrency", "_rate", "_tokens", "_under_way")

    def __init__(self, rate: float | None, concurrency: int | None, now_s: float) -> None:
        self._rate, self._concurrency = rate, concurrency
        self._burst = self._tokens = max(rate or 0.0, 1.0)
        self._at_s = now_s
        self._under_way = 0

    def enter(self, now_s: float) -> None:
        """Count one request that begins. Raises KeyLimitReached, and then counts nothing."""
        if self._concurrency is not None and self._under_way >= self._concurrency:
            raise KeyLimitReached(
                f"{self._under_way} requests of this key are under way, and it may have {self._concurrency} at once; "
                "wait for an answer before the next request",
                _RETRY_AT_ONCE_S,
            )
        if self._rate is not None:
            self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
            self._at_s = now_s
            if self._tokens < 1.0:
                raise KeyLimitReached(
                    f"this key may send {self._rate:g} requests per second; send fewer",
                    (1.0 - self._tokens) / self._rate,
                )
            self._tokens -= 1.0
        self._under_way += 1

    def leave(self) -> None:
        """Count one request that has ended."""
        self._under_way -= 1
