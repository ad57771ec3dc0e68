"""Values that lead a model out of a table are refused to their caller alone: batch mates get their own answers."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import BadRequest
from halfeven.serve.batching.interface import PreparedVersion

from tests.index_nets import Binned
from tests.programs import original
from tests.serve.batching.stage import Fake, async_test, looked, rows_of, serving, spec, together

BAD = 7.0


class Refusing(Fake):
    """An engine like a half whose rounding leads it out of a table."""

    def run(self, parts: Any) -> list[np.ndarray]:
        outputs = super().run(parts)
        if (np.concatenate(parts[0]) == BAD).any():
            raise BadRequest("an index that is out of range for the table of 9 rows")
        return outputs


@async_test
async def test_batch_mates_get_the_answers_that_they_get_alone() -> None:
    net = original(Binned(), {"x": torch.rand(4, 3)})
    engine = TorchEngine(net.program, "fp32", torch.device("cpu"), spec=net.spec)
    drawn = [np.random.default_rng().random((1, 3), np.float32) for _ in range(9)]
    for row, value in ((2, 1.5), (6, np.nan)):
        drawn[row][0, 1] = value
    async with serving(engine, net.spec) as (batcher, device):
        found = await together(batcher, device, *([x] for x in drawn), return_exceptions=True)
    for row, (x, answer) in enumerate(zip(drawn, found, strict=True)):
        if row in (2, 6):
            assert isinstance(answer, BadRequest) and "out of range for the table of 10 rows" in str(answer)
        else:
            assert not isinstance(answer, BaseException)
            expected = net.run(torch.from_numpy(x))[0].numpy()
            np.testing.assert_allclose(answer.outputs[0], expected, rtol=1e-5, atol=1e-6)


@async_test
async def test_what_a_half_alone_refuses_its_original_answers() -> None:
    half, original_engine = Refusing(), Fake(factor=3.0)
    async with serving(half, spec(rows=8)) as (batcher, device):
        rescued = PreparedVersion("2", "sha", "fp16", half, original=original_engine)
        await asyncio.wrap_future(device.call(lambda: batcher.swap(rescued)))
        answers = await together(batcher, device, *(rows_of(value) for value in (1.0, BAD, 2.0)))
        await looked(device)
        counters = batcher.all_counters()[-1]
    assert [answer.outputs[0].item() for answer in answers] == [1.0, 21.0, 2.0]
    assert [answer.precision for answer in answers] == ["fp16", "fp32-rescued", "fp16"]
    assert (counters.requests, counters.rescued_rows) == (3, 1)


@async_test
async def test_a_request_that_is_refused_again_and_again_does_not_make_an_engine_suspect() -> None:
    engine = Refusing()
    async with serving(engine, spec(rows=8)) as (batcher, device):
        for _ in range(5):
            with pytest.raises(BadRequest):
                await batcher.submit(rows_of(BAD), 1)
        good, bad = await together(batcher, device, rows_of(1.0), rows_of(BAD), return_exceptions=True)
    assert not isinstance(good, BaseException) and isinstance(bad, BadRequest)
