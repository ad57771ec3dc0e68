"""Two batches on their way through a device, on a device made of lists: whatever order it may choose is tried."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
import torch
from halfeven.models.engines.staging import SLOTS, Staging, StreamName
from torch import Tensor


@dataclass(eq=False)
class Work:
    do: Callable[[], None]
    after: "Work | None"
    device: "Shuffled"
    done: bool = False
    error: BaseException | None = None

    def synchronize(self) -> None:
        while not self.done:
            assert self.device.step(), "waits for something that was never enqueued"
        if self.error is not None:
            raise self.error


@dataclass(eq=False)
class Shuffled:
    """Each stream in its order, and nothing before what it is to come after; else any order, by chance.

    Like torch's allocator it hands out memory again that nobody refers to, here filled with rubbish.
    """

    chance: random.Random
    streams: dict[str, deque[Work]] = field(
        default_factory=lambda: {"in": deque(), "compute": deque(), "out": deque()}
    )
    order: list[str] = field(default_factory=list)

    def enqueue(self, name: StreamName, work: Callable[[], None], after: Work | None = None) -> Work:
        made = Work(work, after, self)
        self.streams[name].append(made)
        while self.chance.random() < 0.5 and self.step():
            pass
        return made

    def step(self) -> bool:
        able = [
            stream
            for stream, waiting in self.streams.items()
            if waiting and (waiting[0].after is None or waiting[0].after.done)
        ]
        if not able:
            return False
        stream = self.chance.choice(able)
        work = self.streams[stream].popleft()
        self.order.append(stream)
        try:
            if work.after is not None and work.after.error is not None:
                raise work.after.error
            work.do()
        except BaseException as error:
            work.error = error
        work.done = True
        return True

    def on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), 77).to(dtype)

    def on_device(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 99, dtype=torch.uint8)


def doubled(x: Tensor, n: Tensor) -> list[Tensor]:
    x.mul_(2)  # a program may write over its inputs
    return [x, n + 1, x.t()[:1].t()]


def batch(rows: Sequence[int], width: int) -> list[list[np.ndarray]]:
    numbers = np.random.default_rng()
    return [
        [numbers.random((n, width), np.float32) for n in rows],
        [numbers.integers(0, 9, (n,)) for n in rows],
    ]


def assert_right(came: list[np.ndarray], parts: list[list[np.ndarray]]) -> None:
    x, n = (np.concatenate(part) for part in parts)
    np.testing.assert_array_equal(came[0], x * 2)
    np.testing.assert_array_equal(came[1], n + 1)
    np.testing.assert_array_equal(came[2], x[:, :1] * 2)


def test_the_next_batch_is_copied_in_while_this_one_computes() -> None:
    device = Shuffled(random.Random(0))
    device.chance.random = lambda: 1.0  # type: ignore[method-assign]  # nothing is done before it is waited for
    device.chance.choice = lambda able: able[0]  # type: ignore[method-assign]  # "in" first
    staging = Staging(device, doubled)  # type: ignore[arg-type]
    first, second = (staging.launch(batch([2], 3)) for _ in range(2))
    first.wait()
    assert device.order.index("compute") > 1 and device.order[:2] == ["in", "in"]
    second.wait()


def test_more_batches_than_slots_are_refused_and_lose_nothing() -> None:
    staging = Staging(Shuffled(random.Random(1)), doubled)  # type: ignore[arg-type]
    parts = [batch([2, 1], 3) for _ in range(SLOTS)]
    flying = [staging.launch(part) for part in parts]
    with pytest.raises(RuntimeError, match=f"{SLOTS} batches are on their way"):
        staging.launch(batch([1], 3))
    for staged, part in zip(flying, parts, strict=True):
        assert_right(staged.wait(), part)


def test_memory_of_a_slot_is_used_again_and_only_grows() -> None:
    device = Shuffled(random.Random(2))
    asked: list[int] = []
    device.on_device = lambda nbytes: asked.append(nbytes) or torch.zeros(nbytes, dtype=torch.uint8)  # type: ignore
    staging = Staging(device, doubled)  # type: ignore[arg-type]
    for rows in (4, 2, 4, 1, 8, 8, 3, 2):
        staging.launch(batch([rows], 3)).wait()
    assert len(asked) == 8 and asked.count(8 * 3 * 4) == 2, "two inputs, two slots, grown once each"


@pytest.mark.parametrize("first", [(), (2,)], ids=["a new slot", "a slot that grows"])
def test_a_slot_whose_memory_could_not_be_had_takes_smaller_batches(first: Sequence[int]) -> None:
    device = Shuffled(random.Random(6))
    plain = device.on_device
    staging = Staging(device, doubled, slots=1)  # type: ignore[arg-type]
    for rows in first:
        staging.launch(batch([rows], 3)).wait()

    def none_left(nbytes: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    device.on_device = none_left  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        staging.launch(batch([8], 3))
    device.on_device = plain  # type: ignore[method-assign]
    for rows in (4, 1, 8, 16):
        parts = batch([rows], 3)
        assert_right(staging.launch(parts).wait(), parts)


def test_what_the_device_meets_is_raised_to_who_waits_and_the_slot_is_free_again() -> None:
    def poison(x: Tensor) -> list[Tensor]:
        if (x < 0).any():
            raise ValueError("poison")
        return [x * 2]

    device = Shuffled(random.Random(4))
    device.chance.random = lambda: 1.0  # type: ignore[method-assign]
    staging = Staging(device, poison)  # type: ignore[arg-type]
    for _ in range(5):
        bad = staging.launch([[np.full((1, 2), -1.0, np.float32)]])
        good = staging.launch([[np.ones((1, 2), np.float32)]])
        with pytest.raises(ValueError, match="poison"):
            bad.wait()
        assert good.wait()[0].tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.uint8, np.int64, np.bool_, np.float64])
def test_every_datatype_and_scalars_and_nothing_go_through(dtype: type) -> None:
    staging = Staging(Shuffled(random.Random(5)), lambda *inputs: list(inputs))  # type: ignore[arg-type]
    inputs = [np.ones((2, 3), dtype), np.array(1, dtype), np.ones((0, 3), dtype), np.ones((1, 3), dtype)]
    parts = [[inputs[0], inputs[3]], [inputs[1]], [inputs[2]]]
    for _ in range(3):
        came = staging.launch(parts).wait()
        assert [array.shape for array in came] == [(3, 3), (), (0, 3)]
        assert all(array.dtype == dtype and (array == 1).all() for array in came)
    assert staging.assemble_ns > 0
