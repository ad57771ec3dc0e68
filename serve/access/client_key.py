"""The key that the client commands send: that of the environment variable HALFEVEN_API_KEY, so that no process list
shows it."""

import os
from collections.abc import Sequence

from ...models.errors import BadSetting

VARIABLE = "HALFEVEN_API_KEY"


def key_headers() -> dict[str, str]:
    """The header with the key; empty where the variable is not set."""
    key = os.environ.get(VARIABLE, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def request_headers(given: Sequence[str]) -> dict[str, str]:
    """The headers of ``--header 'NAME: VALUE'`` options, and that with the key unless they have their own. Raises
    BadSetting."""
    pairs = [line.partition(":") for line in given]
    if wrong := [line for line, (name, colon, _) in zip(given, pairs, strict=True) if not (name and colon)]:
        raise BadSetting(f"--header {wrong[0]!r}: expected 'NAME: VALUE'")
    sent = {name.strip(): value.strip() for name, _, value in pairs}
    return sent if "authorization" in map(str.lower, sent) else {**key_headers(), **sent}
