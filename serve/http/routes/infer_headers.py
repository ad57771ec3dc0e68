"""The headers of an infer request that matter, read in one pass."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ....models.errors import BadRequest

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")  # may be sent back and logged as it is
_KNOWN = frozenset(
    (
        b"inference-header-content-length",
        b"content-encoding",
        b"accept-encoding",
        b"x-request-id",
        b"triton-request-id",
        b"endpoint-load-metrics-format",
    )
)


class HeaderFields(NamedTuple):
    """The codings as they came (several joined by commas), None where they are absent.

    ``ids`` are the request ids that are sent back under the same names. ``load_format``: how the answer is to say the
    server's load (`server_load.py`).
    """

    coding: str | None = None
    accepted: str | None = None
    ids: tuple[tuple[bytes, bytes], ...] = ()
    load_format: str | None = None

    @property
    def request_id(self) -> str | None:
        """The first of the request's ids, for the log."""
        return self.ids[0][1].decode() if self.ids else None


NOTHING = HeaderFields()


def scan(headers: Sequence[tuple[bytes, bytes]]) -> tuple[str | None, HeaderFields]:
    """Inference-Header-Content-Length as it came, and the rarer fields: `NOTHING` where the request has none of them.

    Names are in lower case, as ASGI gives them. Raises BadRequest where two lengths of the JSON part disagree. An
    id that is too long or not printable ASCII is ignored: it is not sent back.
    """
    length = None
    for name, value in headers:
        if name in _KNOWN:
            if name != b"inference-header-content-length" or length is not None:
                return _scan_all(headers)
            length = value
    return (None if length is None else length.decode("latin-1")), NOTHING


def _scan_all(headers: Sequence[tuple[bytes, bytes]]) -> tuple[str | None, HeaderFields]:
    found = [item for item in headers if item[0] in _KNOWN]
    ids = tuple(item for item in found if item[0].endswith(b"request-id") and _REQUEST_ID.fullmatch(item[1]))
    fields = HeaderFields(
        ", ".join(_values(found, b"content-encoding")) or None,
        ", ".join(_values(found, b"accept-encoding")) or None,
        ids[:2],
        next(iter(_values(found, b"endpoint-load-metrics-format")), None),
    )
    return _length(_values(found, b"inference-header-content-length")), fields


def _values(found: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in found if key == name]


def _length(values: list[str]) -> str | None:
    if len(set(values)) > 1:
        raise BadRequest(
            f"Inference-Header-Content-Length came {len(values)} times with different values: "
            f"{', '.join(values)[:80]!r}; send it once"
        )
    return values[0] if values else None
