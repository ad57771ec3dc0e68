"""A request is answered where its key, the key's scopes and models, and the key's limits allow it.

There is one `AccessControl` in a server, asked by every protocol before anything is looked up for the request. Where no
key file exists, no key is needed. From the moment that there is one, a key is needed, also after the last key was
revoked and where the file is removed or cannot be read: nothing but a new start opens a server again.
"""

import base64
import logging
import time
from collections.abc import Callable, Collection

from ...models.errors import Forbidden, HalfevenError, KeyLimitReached, NotReady, Unauthenticated
from .keys import EVERY_MODEL, KeyFile, KeyRecord, Keys, Owners, Stamp

LOOK_EVERY_S = 0.25  # a revoked key is refused after at most this
NO_KEY: frozenset[str] = frozenset()  # the scopes of what needs no key
_LONGEST_KEY = 4096  # characters of the header
_HEADER = "send the header Authorization: Bearer KEY"
_LOG = logging.getLogger(__name__)
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


class Permit:
    """An admitted request. ``record`` is its key's, None where it has none; ``known``: it may read what is for callers
    with a key. To be closed when the request has ended, however often."""

    __slots__ = ("_access", "_limits", "known", "record")

    def __init__(
        self,
        record: KeyRecord | None,
        known: bool,
        limits: KeyLimits | None = None,
        access: "AccessControl | None" = None,
    ) -> None:
        self.record, self.known, self._limits, self._access = record, known, limits, access

    @property
    def owner(self) -> str:
        """The owner of what the request makes: the key's identifier, empty on a server without keys."""
        return "" if self.record is None else self.record.id

    @property
    def owners(self) -> Owners:
        """The owners whose files and jobs the request may see. None: all of them."""
        return None if self.record is None else self.record.owners

    def reaches(self, model: str) -> bool:
        """True if the request may be told of the model."""
        return self.known and (self.record is None or self.record.reaches(model))

    def allows(self, scopes: Collection[str], model: str | None = None) -> bool:
        """True where the request's key would be admitted to a route that needs one of ``scopes``."""
        return self.record is None or self.record.allows(scopes, model)

    def stands(self) -> bool:
        """True if the key has not been revoked or changed since: what a long answer looks at between its parts."""
        return self._access is None or self._access.has(self.record)

    def check(self, scopes: Collection[str], model: str | None) -> None:
        """Check the scopes on a route whose URL does not name the model. Raises Forbidden."""
        if self.record is not None:
            _check(self.record, scopes, model)

    def close(self) -> None:
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.leave()


OPEN = Permit(None, known=True)  # of a server without keys
_STRANGER = Permit(None, known=False)  # without a key, where none is needed although the server has keys


class AccessControl:
    """The keys of a file, read again when it changes. For one thread.

    ``needed``: requests are refused while there is no file too. ``clock`` gives seconds. Raises StoreUnusable or
    DamagedFile where the file cannot be read at the start; later, requests are refused until it can.
    """

    def __init__(
        self,
        file: KeyFile | None = None,
        needed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._needed, self._clock = file, needed, clock
        self._keys: Keys | None = Keys()  # None: the file cannot be read now
        self._stamp: Stamp | None = None
        self._limits: dict[str, tuple[KeyRecord, KeyLimits]] = {}
        self._open = Permit(None, known=True, access=self)  # stands until the first key is made
        self._look_at_s, self._started = clock() + LOOK_EVERY_S, False
        if file is not None:
            self._read(file, file.stamp())
        self._started = True

    @property
    def needed(self) -> bool:
        """True where requests need a key."""
        return self._needed

    @property
    def notice(self) -> str | None:
        """A sentence for the start where requests are refused that an operator may expect to pass: without a key, or
        all of them."""
        if not self._needed or self._file is None:
            return None
        if self._keys is None:
            return f"the key file {self._file.path} cannot be read: every request is refused until it can"
        if not self._keys.by_id:
            return (
                f"the key file {self._file.path} has no key: every request is refused. `halfeven keys add NAME` makes "
                "a key; to serve without keys, remove the file and start again"
            )
        return f"requests need a key: {self._file.path} has {len(self._keys.by_id)} (`halfeven keys list` shows them)"

    def admit(self, authorization: str | None, scopes: Collection[str], model: str | None) -> Permit:
        """Admit a request that needs one of ``scopes`` (`NO_KEY`: none) for ``model``.

        ``model`` may be None (no model is concerned) or `EVERY_MODEL`. Raises Unauthenticated, Forbidden,
        KeyLimitReached; NotReady where the keys cannot be read.
        """
        now_s = self._now()
        if not self._needed:
            return self._open
        if not scopes:
            return self._recognised(authorization)
        record = self._record_of(authorization)
        _check(record, scopes, model)
        limits = self._limits_of(record, now_s)
        if limits is not None:
            limits.enter(now_s)
        return Permit(record, True, limits, self)

    def check(self, authorization: str | None, scopes: Collection[str]) -> None:
        """Check as `admit` does, before it is known which model is concerned; no limit is counted."""
        self._now()
        if self._needed and scopes:
            _check(self._record_of(authorization), scopes, None)

    def has(self, record: KeyRecord | None) -> bool:
        """True if this is a key's record now; of none, if none is needed."""
        self._now()
        return (
            not self._needed
            if record is None
            else (self._keys is not None and self._keys.by_id.get(record.id) == record)
        )

    def _now(self) -> float:
        """The clock's seconds; where it is time, the file has been looked at."""
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_EVERY_S
            self._look()
        return now_s

    def _recognised(self, authorization: str | None) -> Permit:
        try:
            return Permit(self._record_of(authorization), known=True, access=self)
        except HalfevenError:
            return _STRANGER

    def _record_of(self, authorization: str | None) -> KeyRecord:
        if self._keys is None:
            raise NotReady("the server cannot read its keys now; its log says why")
        if authorization is None:
            raise Unauthenticated(f"this server needs a key: {_HEADER}; its operator makes one")
        record = self._keys.find(_key_in(authorization))
        if record is None:
            raise Unauthenticated(f"this is no key of this server, or it was revoked; {_HEADER}")
        return record

    def _limits_of(self, record: KeyRecord, now_s: float) -> KeyLimits | None:
        if record.rate is None and record.concurrency is None:
            return None
        kept = self._limits.get(record.id)
        if kept is None or kept[0] != record:
            kept = self._limits[record.id] = record, KeyLimits(record.rate, record.concurrency, now_s)
        return kept[1]

    def _look(self) -> None:
        if self._file is None:
            return
        try:
            stamp = self._file.stamp()
            if stamp != self._stamp:
                self._read(self._file, stamp)
        except (HalfevenError, OSError) as error:
            if self._keys is not None:
                _LOG.error("every request that needs a key is refused: %s", error)
            self._needed, self._keys, self._stamp = True, None, None

    def _read(self, file: KeyFile, stamp: Stamp | None) -> None:
        found = file.read()
        if found is None and self._needed and self._stamp is not None:
            _LOG.error("the key file %s is gone: every request that needs a key is refused", file.path)
        before, had = self._needed, self._keys is not None and bool(self._keys.by_id)
        self._needed = self._needed or found is not None
        self._keys, self._stamp = found or Keys(), stamp
        if self._started and (self._needed != before or (had and not self._keys.by_id)):
            _LOG.warning("%s", self.notice)
        self._limits = {id: kept for id, kept in self._limits.items() if id in self._keys.by_id}


def _check(record: KeyRecord, scopes: Collection[str], model: str | None) -> None:
    if not record.allows(scopes):
        raise Forbidden(
            f"the key '{record.name}' has the scopes {', '.join(record.scopes)}, and this needs "
            f"{' or '.join(sorted(scopes))}; ask the operator for another key"
        )
    if not record.reaches(model):
        what = "all models together" if model == EVERY_MODEL else "another model"
        raise Forbidden(
            f"the key '{record.name}' is for {', '.join(record.models)[:400]}, and this concerns {what}; ask the "
            "operator for another key"
        )


def _key_in(authorization: str) -> str:
    """The key in an Authorization header: ``Bearer KEY``, or Basic with the key as the password, as browsers send.

    Empty where there is none. Source: RFC 6750 §2.1, RFC 7617 §2.
    """
    scheme, _, rest = authorization[:_LONGEST_KEY].strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except ValueError:  # neither base64 nor UTF-8, or not ASCII
            return ""
    return ""
