"""A client of the server around the roster."""

from collections.abc import Iterator

import httpx
import pytest

from tests.patience import PATIENCE_S


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server}", timeout=PATIENCE_S) as client:
        yield client
