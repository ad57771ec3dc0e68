"""The threads that OpenMP keeps for a thread are ended and started again; threads are counted by proc(5)."""

import sys
from pathlib import Path

import pytest
import torch
from halfeven.models.engines.cpu import openmp
from halfeven.models.engines.cpu.openmp import end_openmp_threads


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by proc(5)")
def test_the_threads_end_and_the_next_operation_gives_the_same_bits() -> None:
    count = torch.get_num_threads()
    torch.set_num_threads(4)
    x, ended = torch.randn(1 << 18), list[int]()
    try:
        for _ in range(5):  # a thread of another test may end meanwhile
            found, during = torch.sin(x), threads()
            end_openmp_threads()
            ended.append(during - threads())
            assert torch.equal(torch.sin(x), found)
    finally:
        torch.set_num_threads(count)
        end_openmp_threads()
    assert 3 in ended


def test_without_openmp_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp.torch, "__file__", "/nowhere/torch/__init__.py")
    openmp._pause.cache_clear()
    try:
        end_openmp_threads()
    finally:
        openmp._pause.cache_clear()
