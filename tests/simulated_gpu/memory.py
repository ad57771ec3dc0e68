"""The device's memory and torch's caching allocator: freed memory is used again at once by the same stream.

Torch keeps freed blocks by the stream that they were allocated on and gives them to that stream's next allocation
without waiting, because work of one stream is in order. Work of another stream that still uses the block is not
waited for: here it then reads or leaves rubbish, because a freed block is overwritten in its stream's order.
"""

import weakref

import torch
from torch import Tensor

from .work_queues import WorkQueues

_ROUND = 512  # bytes, as torch's allocator rounds
RUBBISH = 0xFF


class Block:
    """Memory in use; it is free when no tensor refers to it any more."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


class Allocator:
    """``capacity`` in bytes; ``taken`` of them are in use, ``cached`` are kept unused; ``peak`` is the most ever taken.

    ``count`` allocations were asked for, ``fresh`` of them took memory that was not cached. ``fail_at``: the one that
    finds no memory, by its number.
    """

    def __init__(self, queues: WorkQueues, capacity: int) -> None:
        self.capacity = capacity
        self.taken = self.peak = self.count = self.fresh = 0
        self.fail_at: int | None = None
        self._queues = queues
        self.pool: object = None  # that a capture takes memory of
        self._free: dict[object, list[Tensor]] = {}  # by stream; the memory of a capture by its pool
        self._ever: list[Tensor] = []  # so that an address that is read too late is rubbish and not a crash

    @property
    def cached(self) -> int:
        return sum(memory.numel() for kept in self._free.values() for memory in kept)

    def take(self, nbytes: int, stream: int) -> Block:
        """Raises torch.OutOfMemoryError."""
        with self._queues.changed:
            self.count += 1
            size = -(-max(nbytes, 1) // _ROUND) * _ROUND
            owner = (stream, self.pool)
            kept = self._free.setdefault(owner, [])
            fitting = [memory for memory in kept if size <= memory.numel() <= 2 * size]
            if self.count == self.fail_at:
                raise _out_of_memory(nbytes)
            if fitting:
                memory = min(reversed(fitting), key=Tensor.numel)  # what was freed last: the soonest use
                kept[:] = [other for other in kept if other is not memory]
            else:
                memory = self._new(size, nbytes)
            self.taken += memory.numel()
            self.peak = max(self.peak, self.taken)
            block = Block(memory)
            weakref.finalize(block, self._give_back, memory, stream, owner)
            return block

    def empty_cache(self) -> None:
        """Waits for the device, as cudaFree does."""
        with self._queues.changed:
            own = [owner for owner in self._free if owner[1] is None]  # type: ignore[index]
            if any(self._free[owner] for owner in own):
                self._queues.synchronize()
            for owner in own:
                del self._free[owner]

    def _new(self, size: int, nbytes: int) -> Tensor:
        if self.taken + self.cached + size > self.capacity:
            self.empty_cache()
        if self.taken + size > self.capacity:
            raise _out_of_memory(nbytes)
        self.fresh += 1
        self._ever.append(torch.full((size,), RUBBISH, dtype=torch.uint8))
        return self._ever[-1]

    def _give_back(self, memory: Tensor, stream: int, owner: object) -> None:
        with self._queues.changed:
            self.taken -= memory.numel()
            if self._queues.lost is None:
                self._queues.put(stream, lambda: memory.fill_(RUBBISH))
                self._free.setdefault(owner, []).append(memory)


def _out_of_memory(nbytes: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes (simulated)")
