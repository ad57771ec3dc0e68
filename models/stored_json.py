"""JSON that was written to the store, and may be damaged since."""

import json
from typing import Any


def json_of(text: bytes) -> Any:
    """The value. Raises ValueError for what is no JSON, and for what is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
