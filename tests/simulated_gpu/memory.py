"""The device's memory and torch's caching allocator: freed memory is used again at once by the same stream.

Torch keeps freed blocks by the stream that they were allocated on and gives them to that stream's next allocation
without waiting, because work of one stream is in order. Work of another stream that still uses the block is not
waited for: here it then reads or leaves rubbish, because a freed block is overwritten in its stream's order.
"""

import weakref
from collections import Counter

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
    finds no memory, by its number. ``emptied``: how often the cache was emptied.

    A capture's memory is of its pool, which is kept while a graph uses it. While a capture is underway nothing is given
    back to the device (c10/cuda/CUDACachingAllocator.cpp, ``captures_underway``).
    """

    def __init__(self, queues: WorkQueues, capacity: int) -> None:
        self.capacity = capacity
        self.taken = self.peak = self.count = self.fresh = 0
        self.fail_at: int | None = None
        self._queues = queues
        self.emptied = 0
        self._pooled = Counter[object]()  # bytes in use, by pool
        self._of_the_host: list[
            object
        ] = []  # pools of captures that torch's page-locked memory knows as underway
        self._underway: dict[int, object] = {}  # pools that captures take memory of, by stream
        self._uses = Counter[object]()  # graphs of each pool
        self._unmapped: set[int] = set()  # addresses that were given back to the device
        self._free: dict[tuple[int, object], list[Tensor]] = {}  # by stream and pool
        self._ever: list[Tensor] = []  # so that an address that is read too late is rubbish and not a crash

    @property
    def cached(self) -> int:
        return sum(memory.numel() for kept in self._free.values() for memory in kept)

    @property
    def in_pools(self) -> int:
        """Bytes that pools of captures have of the device, in use or not."""
        cached = sum(memory.numel() for owner, kept in self._free.items() if owner[1] for memory in kept)
        return cached + sum(self._pooled.values())

    def take(self, nbytes: int, stream: int) -> Block:
        """A block of memory for the stream. Raises torch.OutOfMemoryError."""
        with self._queues.changed:
            self.count += 1
            size = -(-max(nbytes, 1) // _ROUND) * _ROUND
            owner = (stream, self._underway.get(stream))
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
            self._pooled[owner[1]] += memory.numel() if owner[1] else 0
            self.peak = max(self.peak, self.taken)
            block = Block(memory)
            weakref.finalize(block, self._give_back, memory, stream, owner)
            return block

    def begin(self, stream: int, pool: object) -> None:
        """Take what the stream allocates from now on from the pool."""
        if pool in self._uses and not self._uses[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED (simulated)")
        self._underway[stream] = pool
        self._uses[pool] += 1
        if pool in self._of_the_host:
            raise RuntimeError("beginAllocateToPool: already recording to pool_id (simulated)")
        self._of_the_host.append(pool)

    def end(self, pool: object) -> None:
        streams = [stream for stream, other in self._underway.items() if other is pool]
        if not streams:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id (simulated)")
        for stream in streams:
            del self._underway[stream]

    def end_of_the_host(self, pool: object) -> None:
        """End the host's side of a recording. Only a graph does so, where CUDA gave one: torch has no other way."""
        self._of_the_host.remove(pool)

    def release(self, pool: object) -> None:
        self._uses[pool] -= 1
        assert self._uses[pool] >= 0, "a pool is released more often than it is used"

    def empty_cache(self) -> None:
        """Give free memory back; the host waits for the device, as cudaFree does."""
        with self._queues.changed:
            if self._underway:
                raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED (simulated)")
            self.emptied += 1
            own = [owner for owner in self._free if owner[1] is None or not self._uses[owner[1]]]
            if any(self._free[owner] for owner in own):
                self._queues.synchronize()
            for owner in own:
                self._unmapped |= {memory.data_ptr() for memory in self._free.pop(owner)}
            for pool in [pool for pool, uses in self._uses.items() if not uses and not self._pooled[pool]]:
                del self._uses[pool]  # a pool without a graph and without memory is forgotten

    def check_mapped(self, *contents: Tensor) -> None:
        """Raise where a kernel reads or writes memory that the device has taken back."""
        if self._unmapped and any(
            one.untyped_storage().data_ptr() in self._unmapped for one in contents if one.numel()
        ):
            raise RuntimeError("an illegal memory access was encountered")

    def _new(self, size: int, nbytes: int) -> Tensor:
        if self.taken + self.cached + size > self.capacity and not self._underway:
            self.empty_cache()
        if self.taken + self.cached + size > self.capacity:
            raise _out_of_memory(nbytes)
        self.fresh += 1
        self._ever.append(torch.full((size,), RUBBISH, dtype=torch.uint8))
        return self._ever[-1]

    def _give_back(self, memory: Tensor, stream: int, owner: tuple[int, object]) -> None:
        with self._queues.changed:
            self.taken -= memory.numel()
            self._pooled[owner[1]] -= memory.numel() if owner[1] else 0
            if self._queues.lost is None:
                self._queues.put(stream, lambda: memory.fill_(RUBBISH))
                self._free.setdefault(owner, []).append(memory)


def _out_of_memory(nbytes: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes (simulated)")
