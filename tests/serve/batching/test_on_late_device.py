"""Batches of the real engine on a simulated CUDA device that is late, under the batcher and the device thread."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import torch
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import EngineFailed
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.device import DeviceThread
from torch import Tensor, nn

from tests.programs import whole
from tests.serve.batching.stage import async_test, rows_of, serving, spec
from tests.simulated_gpu import SimulatedGpu


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * 2 + 0


PROGRAM = whole(Doubled(), {"x": torch.randn(8, 4)}).program


@asynccontextmanager
async def late(rows: int, pace: float) -> AsyncIterator[tuple[Batcher, DeviceThread, SimulatedGpu]]:
    with SimulatedGpu(random.Random(0), pace) as gpu:
        engine = TorchEngine(PROGRAM, "fp32", gpu.device)
        async with serving(engine, spec(rows=rows)) as (batcher, device):
            device.call(gpu.operations.__enter__).result(30)
            try:
                yield batcher, device, gpu
            finally:
                gpu.queues.go()


async def launched(gpu: SimulatedGpu, points: int) -> None:
    """Return when one more batch was put into the queues, which had so many points: one in each of its streams."""
    while gpu.queues.points < points + 3:
        await asyncio.sleep(0)


@async_test
async def test_a_full_batch_is_launched_while_the_device_has_not_ended_the_first() -> None:
    async with late(rows=2, pace=0.0) as (batcher, _, gpu):
        gpu.queues.hold()
        points, done = gpu.queues.points, gpu.queues.done
        futures = [batcher.submit(rows_of(i), 1) for i in range(2)]
        await launched(gpu, points)
        futures += [batcher.submit(rows_of(i), 1) for i in range(2, 4)]
        await launched(gpu, points + 3)
        assert gpu.queues.done == done and not any(future.done() for future in futures)
        gpu.queues.go()
        answers = await asyncio.gather(*futures)
    assert [answer.outputs[0].item() for answer in answers] == [0, 2, 4, 6]


@async_test
async def test_many_callers_get_their_own_answers_from_a_device_in_whatever_order_it_works() -> None:
    async with late(rows=4, pace=0.5) as (batcher, _, _):
        values = np.random.default_rng().permutation(60)
        answers = await asyncio.gather(*[batcher.submit(rows_of(value), 1) for value in values])
    assert [answer.outputs[0].item() for answer in answers] == [2 * value for value in values]


@async_test
async def test_after_a_sticky_error_every_caller_is_told_and_nothing_hangs() -> None:
    async with late(rows=2, pace=0.0) as (batcher, device, gpu):
        await batcher.submit(rows_of(1), 1)
        gpu.fail(3)
        futures = [batcher.submit(rows_of(i), 1) for i in range(8)]
        found = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(one, EngineFailed) for one in found)
        assert device.lost is not None and "illegal memory access" in device.lost
