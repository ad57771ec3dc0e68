"""Batches of the real engine on a simulated CUDA device that is late, under the batcher and the device thread."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import torch
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.engines.wire_widening import widened
from halfeven.models.errors import EngineFailed
from halfeven.models.spec.buckets import buckets_of
from halfeven.models.spec.datatypes import Wire
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.ceiling import Ceiling
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.versions.loading.warming import warm
from torch import Tensor, nn

from tests.patience import PATIENCE_S
from tests.programs import original
from tests.serve.batching.stage import async_test, rows_of, serving, spec
from tests.simulated_gpu import SimulatedGpu


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * 2 + 0


PROGRAM = original(Doubled(), {"x": torch.randn(8, 4)}).program


def test_after_the_warm_up_no_bucket_in_any_slot_and_datatype_takes_memory_or_blocks() -> None:
    toy = spec(rows=8)
    wired = replace(toy, inputs=(replace(toy.inputs[0], wire=Wire("UINT8", 0.5, 1.0)),))

    def batch_of(rows: int) -> list[list[np.ndarray]]:
        return [[np.random.default_rng().random((rows, 4)).astype(np.float32)]]

    with SimulatedGpu(random.Random(0)) as gpu:
        engine = widened(TorchEngine(PROGRAM, "fp32", gpu.device), wired)
        assert isinstance(engine, TorchEngine)
        warm(engine, wired, batch_of, Ceiling(), lambda fn: fn())
        before = gpu.memory.fresh, len(gpu.operations.waits)
        for rows in buckets_of(wired, "cuda:0"):
            small = [[np.full((rows, 4), 6, np.uint8)]]
            for parts, expected in ((batch_of(rows), None), (small, np.full((rows, 1), 8.0))):
                for launched in [engine.launch(parts) for _ in range(engine.in_flight)]:
                    (came,) = launched.wait()
                    np.testing.assert_array_equal(
                        came, parts[0][0][:, :1] * 2 if expected is None else expected
                    )
        assert (gpu.memory.fresh, len(gpu.operations.waits)) == before


@asynccontextmanager
async def late(rows: int, pace: float) -> AsyncIterator[tuple[Batcher, DeviceThread, SimulatedGpu]]:
    with SimulatedGpu(random.Random(0), pace) as gpu:
        engine = TorchEngine(PROGRAM, "fp32", gpu.device)
        async with serving(engine, spec(rows=rows)) as (batcher, device):
            device.call(gpu.operations.__enter__).result(PATIENCE_S)
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
