"""A version with other inputs becomes active while requests for the old one are on their way."""

import asyncio

import numpy as np
import pytest
from halfeven.models.errors import NotReady

from tests.patience import PATIENCE_S
from tests.serve.batching.stage import Fake, async_test, gated, prepared, rows_of, serving, spec

WIDE = spec(width=6)


def wide(*values: float) -> list[np.ndarray]:
    return rows_of(*values, width=6)


@async_test
async def test_what_was_handed_over_is_answered_by_the_old_version_before_it_goes() -> None:
    old, inside = gated()
    new = Fake(factor=2.0)
    async with serving(old, spec(rows=3)) as (batcher, device):
        first = batcher.submit(rows_of(1), 1)
        await inside.wait()
        queued = [batcher.submit(rows_of(i), 1) for i in range(7)]
        large = batcher.submit(rows_of(*range(8)), 8)
        await asyncio.sleep(0)  # handed over
        swapped = device.call(lambda: batcher.swap(prepared(new, "2"), WIDE))
        old.gate.set()
        (await asyncio.wrap_future(swapped)).engine.close()
        answers = await asyncio.gather(first, *queued, large)
        assert {answer.prepared.version for answer in answers} == {"1"}
        assert (await batcher.submit(wide(4), 1)).outputs[0].item() == 8
    assert new.batches == [[(1, 6)]]


@async_test
async def test_a_request_that_was_not_handed_over_in_time_is_told_to_look_again_and_not_run() -> None:
    new = Fake()
    async with serving(Fake()) as (batcher, device):
        swapped = device.call(lambda: batcher.swap(prepared(new, "2"), WIDE))
        late = [batcher.submit(rows_of(1), 1), batcher.submit(rows_of(*range(70)), 70)]
        swapped.result(PATIENCE_S)  # on the loop, so that nothing is handed over before
        for future in late:
            with pytest.raises(NotReady, match=r"other inputs or outputs .* metadata"):
                await future
        assert batcher.waiting == 0
    assert new.batches == []


@async_test
async def test_a_request_checked_against_the_old_signature_is_not_let_in_by_the_new_one() -> None:
    async with serving(Fake()) as (batcher, device):
        await asyncio.wrap_future(device.call(lambda: batcher.swap(prepared(Fake(), "2"), WIDE)))
        with pytest.raises(NotReady, match="'toy' with other inputs"):
            batcher.submit(rows_of(1), 1)
        with pytest.raises(NotReady):
            batcher.submit([*wide(1), *wide(1)], 1)
        with pytest.raises(NotReady):
            batcher.submit([wide(1)[0].astype(np.float64)], 1)
        assert (await batcher.submit(wide(1), 1)).prepared.version == "2"


@async_test
async def test_requests_of_two_signatures_in_one_iteration_of_the_loop_are_kept_apart() -> None:
    new = Fake()
    async with serving(Fake()) as (batcher, device):
        device.hold()
        old = batcher.submit(rows_of(1), 1)
        device.call(lambda: batcher.swap(prepared(new, "2"), WIDE)).result(PATIENCE_S)
        fresh = batcher.submit(wide(2), 1)
        device.release()
        with pytest.raises(NotReady):
            await old
        assert (await fresh).outputs[0].item() == 2
    assert new.batches == [[(1, 6)]]


@async_test
async def test_other_limits_alone_are_no_other_signature() -> None:
    old, new = Fake(), Fake()
    async with serving(old) as (batcher, device):
        device.hold()
        waiting = batcher.submit(rows_of(1), 1)
        await asyncio.sleep(0)
        device.call(lambda: batcher.swap(prepared(new, "2"), spec(rows=8, queue=5, max_queue_ms=1))).result(
            30
        )
        device.release()
        assert (await waiting).prepared.version == "2"
    assert old.batches == []


@async_test
async def test_narrower_bounds_of_a_free_dimension_are_another_signature() -> None:
    old, new = Fake(), Fake()
    async with serving(old, spec(width=-1)) as (batcher, device):
        device.hold()
        long = batcher.submit(rows_of(1, width=9), 1)
        await asyncio.sleep(0)
        device.call(lambda: batcher.swap(prepared(new, "2"), spec(width=4))).result(PATIENCE_S)
        assert (await long).prepared.version == "1"
