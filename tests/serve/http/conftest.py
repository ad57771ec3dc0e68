"""The short way of a request, from the parser to the batcher, seen by tests."""

from typing import Any

import pytest
from halfeven.serve.http.connection.hot_protocol import HotProtocol


@pytest.fixture
def hot_requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each request that took the short way."""
    seen: list[Any] = []
    submit = HotProtocol._submit
    monkeypatch.setattr(HotProtocol, "_submit", lambda self, hot: (seen.append(hot), submit(self, hot)))
    return seen
