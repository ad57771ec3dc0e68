"""The key that the client commands send: that of the environment variable HALFEVEN_API_KEY, so that no process list
shows it, or that of ``--key`` or ``--key-file``, which takes its place in this process."""

import os
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from ...models.errors import BadSetting

VARIABLES = "HALFEVEN_"  # how every environment variable of ours begins
VARIABLE = f"{VARIABLES}API_KEY"
_LONGEST_FILE = 4096  # characters


def use_key(key: str | None) -> None:
    """Send this key from now on. Raises BadSetting for what no header can carry."""
    if key is not None:
        os.environ[VARIABLE] = _sendable(key)


def use_key_in(file: Path | None) -> None:
    """Send the key that is the text of the file. Raises BadSetting."""
    if file is None:
        return
    try:
        with file.open() as opened:  # a pipe too, as of a vault
            words = opened.read(_LONGEST_FILE).split()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"--key-file {file} cannot be read: {error}") from None
    if len(words) != 1:
        raise BadSetting(
            f"--key-file {file}: expected one key, as `halfeven keys add` printed it, got {len(words)} words"
        )
    use_key(words[0])


def key_headers(key: str | None = None) -> dict[str, str]:
    """The header with the key; empty where there is none. ``key`` None: that of the variable."""
    key = os.environ.get(VARIABLE, "").strip() if key is None else key
    return {"Authorization": f"Bearer {_sendable(key)}"} if key else {}


def _sendable(key: str) -> str:
    if not (key.isascii() and key.isprintable()):
        raise BadSetting(
            "the key has a character that no key has: expected one that `halfeven keys add` printed"
        )
    return key


def key_advice(status: int) -> str:
    """The advice that follows the words of a server that refused with 401; empty for another status."""
    if status != HTTPStatus.UNAUTHORIZED:
        return ""
    sent = "the key in it is none of this server's" if key_headers() else "it is not set"
    return (
        f" (commands send the key of --key-file, --key or the environment variable {VARIABLE}: {sent}. The server's "
        "operator makes one with `halfeven keys add NAME --store STORE`, or --key-file FILE where the server was "
        "started with one)"
    )


def request_headers(given: Sequence[str]) -> dict[str, str]:
    """The headers of ``--header 'NAME: VALUE'`` options, and that with the key unless they have their own. Raises
    BadSetting."""
    pairs = [line.partition(":") for line in given]
    if wrong := [line for line, (name, colon, _) in zip(given, pairs, strict=True) if not (name and colon)]:
        raise BadSetting(f"--header {wrong[0]!r}: expected 'NAME: VALUE'")
    sent = {name.strip(): value.strip() for name, _, value in pairs}
    return sent if "authorization" in map(str.lower, sent) else {**key_headers(), **sent}
