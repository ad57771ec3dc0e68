"""The requests of a share are chosen evenly, and the same way in every process and every run."""

from hashlib import blake2b

_ALL = 2**64
# Weyl's sequence of the golden ratio: any n requests in a row hold the share to within about one request, and
# callers that ask in a regular rhythm do not coincide with it.
_STEP = 0x9E3779B97F4A7C15


class Spread:
    """Takes a share (0 to 1) of the calls. Use it from one thread."""

    def __init__(self, share: float) -> None:
        self._below = round(min(max(share, 0.0), 1.0) * _ALL)
        self._at = 0

    def takes(self) -> bool:
        self._at = (self._at + _STEP) % _ALL
        return self._at < self._below


class Sticky:
    """Takes a share of the keys, always the same ones; a larger share of one ``salt`` keeps those and adds more.

    Another salt takes other keys. A request without a key is spread.
    """

    def __init__(self, share: float, salt: str) -> None:
        self._below = round(min(max(share, 0.0), 1.0) * _ALL)
        self._salt = blake2b(salt.encode(), digest_size=16).digest()
        self._spread = Spread(share)

    def takes(self, key: str | None) -> bool:
        if not key:
            return self._spread.takes()
        digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8, key=self._salt).digest()
        return int.from_bytes(digest) < self._below
