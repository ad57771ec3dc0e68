"""Conversions beside each other: one thread each."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread_for_each_worker() -> Iterator[None]:
    """Two workers on two cores with two threads each mostly wait for each other: a corpus takes ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
    yield
    torch.set_num_threads(threads)
