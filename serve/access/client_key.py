"""The key that the client commands send: that of the environment variable HALFEVEN_API_KEY, so that no process list
shows it."""

import os

VARIABLE = "HALFEVEN_API_KEY"


def key_headers() -> dict[str, str]:
    """The header with the key; empty where the variable is not set."""
    key = os.environ.get(VARIABLE, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}
