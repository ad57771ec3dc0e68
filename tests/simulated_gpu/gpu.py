"""The simulated device itself: torch's CUDA functions while it is entered, and what a test may do to it."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest.mock import patch

import torch
from halfeven.exporters.torch.autocast.kernels import half_kernels
from halfeven.models.engines import torch_engine
from torch._subclasses import fake_tensor

from .memory import Allocator
from .operations import DEVICE, Operations
from .work_queues import Point, WorkQueues

STREAMS = 32  # that torch makes of a device; then it hands out the same ones again (c10/cuda/CUDAStream.h)


class SimulatedGpu:
    """``with SimulatedGpu(random) as gpu:`` makes ``cuda:0`` of the process a late device; one at a time.

    ``pace``: see `WorkQueues`. ``capacity``: bytes of memory. A thread of its own makes tensors on the device only
    inside ``with gpu.operations``.
    """

    device = DEVICE

    def __init__(self, chance: random.Random, pace: float = 0.3, capacity: int = 1 << 40) -> None:
        self.queues = WorkQueues(chance, pace)
        self.memory = Allocator(self.queues, capacity)
        self.operations = Operations(self.queues, self.memory, lambda: self.current().number)
        self.replays = 0
        self._current = threading.local()
        self._default = _stream_type(self)(number=0)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        _forget()
        for name, replacement in _replacements(self).items():
            self._stack.enter_context(patch.object(torch.cuda, name, replacement))
        for name, replacement in _of_the_allocator(self).items():
            self._stack.enter_context(patch.object(torch._C, name, replacement))
        # A torch that was built for CUDA would make a context on a device that is not there.
        self._stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        self._stack.enter_context(self.operations)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        _forget()
        self.queues.lost = "the simulation has ended"

    def current(self) -> Any:
        """The calling thread's current stream."""
        return getattr(self._current, "stream", self._default)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self.current()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def fail(self, operations: int, text: str = "an illegal memory access was encountered") -> None:
        """Give the device a sticky error after ``operations`` more operations."""
        self.queues.fail_at, self.queues.fail_with = self.queues.done + operations, text

    def run_out(self, allocations: int) -> None:
        """The allocation after so many finds no memory; those after it do."""
        self.memory.fail_at = self.memory.count + allocations


def _forget() -> None:
    """Drop what is kept of a device for as long as the process lives: the next one is another."""
    torch_engine.cuda_streams.cache_clear()
    half_kernels.cache_clear()


def _stream_type(gpu: SimulatedGpu) -> type:
    queues, made, counter = gpu.queues, list[int](), itertools.count()

    def next_number() -> int:
        if len(made) < STREAMS:
            made.append(queues.new_stream())
        return made[next(counter) % STREAMS]

    class Stream:
        def __init__(self, device: object = None, priority: int = 0, number: int | None = None) -> None:
            self.number = next_number() if number is None else number
            self.cuda_stream = self.number  # its address, for libraries beside torch

        def wait_event(self, event: Any) -> None:
            if event.point is not None:  # one that was never recorded is not waited for
                queues.wait_in(self.number, event.point)

        def wait_stream(self, other: Any) -> None:
            queues.wait_in(self.number, queues.point(other.number))

        def synchronize(self) -> None:
            queues.synchronize(self.number)

    return Stream


def _event_type(gpu: SimulatedGpu) -> type:
    queues = gpu.queues

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            self.point: Point | None = None

        def record(self, stream: Any = None) -> None:
            self.point = queues.point((stream or gpu.current()).number)

        def query(self) -> bool:
            queues.check()
            return self.point is None or self.point.reached

        def synchronize(self) -> None:
            if self.point is not None:
                queues.wait_for(self.point)

    return Event


def _graph_type(gpu: SimulatedGpu) -> type:
    class CUDAGraph:
        """A recording whose work is done again on the same addresses, in the current stream. The order of steps, and
        what is left undone where one fails, are those of ATen/cuda/CUDAGraph.cpp of torch 2.13."""

        def __init__(self) -> None:
            self.work: list[Callable[[], object]] = []
            self._pool: object = None
            self._stream = 0
            self._ended = False

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            assert capture_error_mode == "thread_local", "another thread's calls would end the capture"
            self._pool, self._stream = object() if pool is None else pool, gpu.current().number
            gpu.memory.begin(self._stream, self._pool)
            gpu.queues.begin_capture(self._stream, self.work)

        def capture_end(self) -> None:
            gpu.queues.end_capture(self._stream)
            gpu.memory.end(self._pool)
            gpu.memory.end_of_the_host(self._pool)
            self._ended = True

        def replay(self) -> None:
            assert self._ended, "a graph is replayed that was not captured, or was reset"
            gpu.replays += 1
            for do in self.work:
                gpu.queues.put(gpu.current().number, do)

        def reset(self) -> None:
            if self._ended:
                self._ended = False
                gpu.operations.clear_workspaces(self._stream)
                gpu.memory.release(self._pool)

        def __del__(self) -> None:
            self.reset()

    return CUDAGraph


@contextmanager
def _capture(
    gpu: SimulatedGpu, graph: Any, pool: object, stream: Any, capture_error_mode: str
) -> Iterator[None]:
    """``torch.cuda.graph``: it empties the caches, and ends nothing itself where the end of the capture fails."""
    gpu.queues.synchronize()
    gpu.memory.empty_cache()
    with gpu.on(stream):
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


def _of_the_allocator(gpu: SimulatedGpu) -> dict[str, Any]:
    return {
        "_cuda_endAllocateToPool": lambda device, pool: gpu.memory.end(pool),
        "_cuda_releasePool": lambda device, pool: gpu.memory.release(pool),
    }


def _replacements(gpu: SimulatedGpu) -> dict[str, Any]:
    memory = gpu.memory

    def reset_peak(device: object = None) -> None:
        memory.peak = memory.taken

    return {
        "Stream": type(gpu._default),
        "Event": _event_type(gpu),
        "stream": gpu.on,
        "current_stream": lambda device=None: gpu.current(),
        "synchronize": lambda device=None: gpu.queues.synchronize(),
        "empty_cache": memory.empty_cache,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: "a simulated device",
        "get_device_capability": lambda device=None: (8, 0),
        "memory_allocated": lambda device=None: memory.taken,
        "memory_reserved": lambda device=None: memory.taken + memory.cached,
        "max_memory_allocated": lambda device=None: memory.peak,
        "reset_peak_memory_stats": reset_peak,
        "mem_get_info": lambda device=None: (memory.capacity - memory.taken - memory.cached, memory.capacity),
        "_lazy_init": lambda: None,
        "CUDAGraph": _graph_type(gpu),
        "graph": lambda graph, pool, stream, capture_error_mode: _capture(
            gpu, graph, pool, stream, capture_error_mode
        ),
        "graph_pool_handle": object,
    }
