"""Two batches in flight on a real device: right answers, real overlap, real lack of memory. Skipped without one."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines.faults import device_lost, give_back_cached_memory, out_of_memory
from halfeven.models.engines.memory import cuda_peak_bytes, free_cuda_bytes, rows_that_fit
from halfeven.models.engines.staging import SLOTS, Staging, cuda_streams
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.engines.true_fp32 import use_true_fp32
from torch import Tensor, nn

from tests.programs import original

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")
WIDTH = 512


class Net(nn.Module):
    """A net that writes over its input, and gives a float, an integer and a tensor that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2.0)
        y = self.linear(x).relu()
        return y, y.argmax(dim=1), y.t()[:3].t()


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[TorchEngine, TorchEngine]]:
    use_true_fp32()
    captured = original(Net(), {"x": torch.randn(8, WIDTH)})
    here = TorchEngine(captured.program, "fp32", torch.device("cpu"))
    there = TorchEngine(captured.program, "fp32", CUDA)
    yield here, there
    there.close()


def batch(rows: list[int]) -> list[list[np.ndarray]]:
    random = np.random.default_rng()
    return [[random.standard_normal((n, WIDTH)).astype(np.float32) for n in rows]]


def test_batches_in_flight_get_their_own_answers_and_keep_them(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    here, there = engines
    assert (here.in_flight, there.in_flight) == (1, SLOTS)
    flying: deque[tuple[Any, list[list[np.ndarray]]]] = deque()
    taken = []
    for number in range(60):
        parts = batch([number % 7 + 1, number % 3 + 1])
        flying.append((there.launch(parts), parts))
        if len(flying) == SLOTS:
            staged, parts = flying.popleft()
            taken.append((staged.wait(), parts))
    for staged, parts in flying:
        taken.append((staged.wait(), parts))
    for came, parts in taken:
        expected = here.run(parts)
        np.testing.assert_allclose(came[0], expected[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(came[2], expected[2], rtol=1e-4, atol=1e-4)
        assert came[1].shape == expected[1].shape and all(array.flags.c_contiguous for array in came)


def test_what_came_off_the_wire_is_not_written_to(engines: tuple[TorchEngine, TorchEngine]) -> None:
    parts = batch([3])
    before = parts[0][0].copy()
    parts[0][0].setflags(write=False)
    engines[1].run(parts)
    assert np.array_equal(parts[0][0], before)


def test_copies_overlap_computing() -> None:
    """Large copies and long computing: in flight they take less than one after the other."""
    square = torch.randn(4096, 4096, device=CUDA)
    torch.cuda.synchronize()  # made on another stream than it is used on

    def compute(x: Tensor) -> list[Tensor]:
        for _ in range(8):
            torch.mm(square, square)
        return [x[:1]]

    staging = Staging(cuda_streams(CUDA), compute)
    parts = [[np.zeros((64, 2**20), np.float32)]]

    def seconds(ahead: int) -> float:
        began, flying = time.perf_counter(), deque[Any]()
        for _ in range(10):
            flying.append(staging.launch(parts))
            if len(flying) == ahead:
                flying.popleft().wait()
        while flying:
            flying.popleft().wait()
        return time.perf_counter() - began

    seconds(2)
    one, two = min(seconds(1) for _ in range(3)), min(seconds(2) for _ in range(3))
    assert two < 0.9 * one, f"in flight {two:.3f} s, one by one {one:.3f} s"


def test_waiting_lets_other_threads_run() -> None:
    square = torch.randn(8192, 8192, device=CUDA)
    torch.cuda.synchronize()
    staging = Staging(cuda_streams(CUDA), lambda x: [torch.stack([(square @ square)[:1] for _ in range(20)])])
    staging.launch([[np.zeros((1, 1), np.float32)]]).wait()
    staged = staging.launch([[np.zeros((1, 1), np.float32)]])
    used, began = time.process_time(), time.perf_counter()
    staged.wait()
    waited = time.perf_counter() - began
    assert time.process_time() - used < 0.5 * waited, "the wait spins"


def test_a_batch_that_does_not_fit_is_out_of_memory_and_the_next_one_is_answered(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    def huge(x: Tensor) -> list[Tensor]:
        if len(x) > 1:
            torch.empty(2**50, device=CUDA)
        return [x + 1]

    staging = Staging(cuda_streams(CUDA), huge)
    for _ in range(3):
        ahead = staging.launch([[np.ones((1, 2), np.float32)]])
        with pytest.raises(torch.OutOfMemoryError) as caught:
            staging.launch([[np.ones((2, 2), np.float32)]])
        assert out_of_memory(caught.value) and not device_lost(caught.value)
        give_back_cached_memory()
        assert ahead.wait()[0].tolist() == [[2.0, 2.0]]


def test_what_a_run_takes_is_measured_and_rows_that_fit_follow(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    there = engines[1]
    small, large = (cuda_peak_bytes(there, batch([rows])) for rows in (1, 1024))
    assert large - small >= 1023 * WIDTH * 4, "at least one activation per row"
    buckets = tuple(2**power for power in range(16))
    fits = rows_that_fit(there, lambda rows: batch([rows]), buckets, 2**25)
    assert 1 < fits < 2**15 and cuda_peak_bytes(there, batch([fits])) <= 2**25
    assert rows_that_fit(there, lambda rows: batch([rows]), buckets, free_cuda_bytes(CUDA)) == buckets[-1]
