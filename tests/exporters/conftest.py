"""Conversions beside each other: one thread each, and all that is claimed of one corpus model in one process."""

from collections.abc import Iterator

import pytest
import torch

from tests.corpus import CORPUS
from tests.forked_workers import workers


def pytest_itemcollected(item: pytest.Item) -> None:
    """A model is captured and converted once for all claims about it, in whatever files they are."""
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        name = item.callspec.params.get("name")
        if isinstance(name, str) and name in CORPUS:
            item.add_marker(pytest.mark.together(f"corpus model '{name}'"))


@pytest.fixture(autouse=True, scope="package")
def one_thread_for_each_worker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two workers on two cores with two threads each mostly wait for each other: a corpus takes ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // max(1, workers(request.config))))
    yield
    torch.set_num_threads(threads)
