"""Batches on their way through a device: copied in, computed and copied out, each in a queue of its own.

While one batch computes, the next is gathered in page-locked memory and copied in, and the one before is copied out.
CUDA keeps the order within a stream, and only events keep it between streams (CUDA C++ Programming Guide, "Streams").

A slot is the memory of one batch under way: where its requests are joined, and where the device reads them. Slots
are used again and only grow, so that their addresses on the device stay the same: a CUDA graph per slot and bucket can
later replace ``compute``. A slot is free again when its answers have been taken. Answers are in memory of their own,
which is handed over to the caller and never written again.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from .arrays import to_numpy, to_torch
from .switched_off import PINNED_STAGING, TWO_IN_FLIGHT, is_off

StreamName = Literal["in", "compute", "out"]
SLOTS = 2  # one computing, one being filled: a third would only wait


class Reached(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block until the device has reached the point; other threads run meanwhile. Raises the error of its work."""
        ...


class Streams(Protocol):
    """A device's queues of work, and its memory. A fake shows the order without a device."""

    def enqueue(self, name: StreamName, work: Callable[[], None], after: Reached | None = None) -> Reached:
        """Do ``work`` after the work that the stream has already, and not before ``after``."""
        ...

    def on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def on_device(self, nbytes: int) -> Tensor:
        """Memory that the stream "in" writes first."""
        ...


class CudaStreams:
    """Three streams of one device. Memory on the host is page-locked, of torch's caching allocator.

    Where pinned staging is switched off, it is pageable, and the host waits for the device after each step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        names: tuple[StreamName, ...] = ("in", "compute", "out")
        self._streams = {name: torch.cuda.Stream(device) for name in names}
        self._addresses = {stream.cuda_stream for stream in self._streams.values()}  # of all that were made
        self._free: list[Any] = []

    def enqueue(self, name: StreamName, work: Callable[[], None], after: Reached | None = None) -> Reached:
        stream = self._streams[name]
        if isinstance(after, torch.cuda.Event):
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            work()
        reached = torch.cuda.Event(blocking=True)  # sleeps: a spinning wait would take the HTTP side's core
        reached.record(stream)
        if is_off(PINNED_STAGING, self._device):
            torch.cuda.synchronize(self._device)
        return reached

    @property
    def computing(self) -> int:
        """The address of the stream "compute", for libraries beside torch."""
        return self._streams["compute"].cuda_stream

    def take(self) -> Any:
        """A stream for the caller alone. Raises RuntimeError where there is none: torch makes 32 of a device, and then
        hands out the same ones again."""
        if self._free:
            return self._free.pop()
        stream = torch.cuda.Stream(self._device)
        if stream.cuda_stream in self._addresses:
            raise RuntimeError(f"all {len(self._addresses)} streams of {self._device} are taken")
        self._addresses.add(stream.cuda_stream)
        return stream

    def give_back(self, stream: Any) -> None:
        self._free.append(stream)

    def adopt(self) -> None:
        """Compute nothing before the current stream's work is done (the copy of a program's weights)."""
        self._streams["compute"].wait_stream(torch.cuda.current_stream(self._device))

    def on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if is_off(PINNED_STAGING, self._device):
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def on_device(self, nbytes: int) -> Tensor:
        # Torch keeps freed memory by stream and does not wait for it: work that another stream has not done yet may
        # still use the default stream's (docs.pytorch.org, notes/cuda, "Memory management").
        with torch.cuda.stream(self._streams["in"]):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


@cache
def cuda_streams(device: torch.device) -> CudaStreams:
    """The streams of a device, which all its models share: they run one after another in any case."""
    return CudaStreams(device)


def slots_on(device: torch.device) -> int:
    """The number of batches that an engine on the device holds at once: one is computed while the next one is taken."""
    return 1 if is_off(TWO_IN_FLIGHT, device) else SLOTS


@dataclass(slots=True, eq=False)
class _Slot:
    """The bytes of each input on the host and on the device; and the outputs of the batch under way."""

    number: int
    hosts: list[Tensor] = field(default_factory=list)
    devices: list[Tensor] = field(default_factory=list)
    answers: Sequence[Tensor] = ()
    taken: list[Tensor] = field(default_factory=list)


class Staging:
    """Takes batches for ``compute``, which gets tensors on the device and gives tensors there.

    ``assemble_ns`` is how long the requests of the batch launched last took to be joined, ``slot`` the number of its
    slot. ``slots``: how many batches may be under way.
    """

    def __init__(
        self, streams: Streams, compute: Callable[..., Sequence[Tensor]], slots: int = SLOTS
    ) -> None:
        self._streams = streams
        self._compute = compute
        self.slots = slots
        self._free = deque(_Slot(number) for number in range(slots))
        self.assemble_ns = self.slot = 0

    def launch(self, parts: Sequence[Sequence[np.ndarray]]) -> "Staged":
        """Begin one batch. Raises RuntimeError where ``slots`` batches are under way, and errors of ``compute``."""
        if not self._free:
            raise RuntimeError(f"{self.slots} batches are on their way: wait for the first of them")
        slot = self._free.popleft()
        self.slot = slot.number
        try:
            began_ns = time.monotonic_ns()
            hosts = [self._gathered(slot, index, part) for index, part in enumerate(parts)]
            self.assemble_ns = time.monotonic_ns() - began_ns
            devices = [_shaped(slot.devices[index], host) for index, host in enumerate(hosts)]
            copied = self._streams.enqueue("in", lambda: _copy(hosts, devices))
            computed = self._streams.enqueue("compute", lambda: self._run(slot, devices), copied)
            return Staged(self, slot, self._streams.enqueue("out", lambda: self._take(slot), computed))
        except BaseException:
            self._abandon(slot)
            raise

    def _gathered(self, slot: _Slot, index: int, part: Sequence[np.ndarray]) -> Tensor:
        """The requests' arrays, joined in the slot's memory on the host."""
        first = part[0]
        shape = (sum([len(array) for array in part]), *first.shape[1:]) if first.ndim else ()
        dtype = _torch_dtype(first.dtype)
        nbytes = math.prod(shape) * first.dtype.itemsize
        if index == len(slot.hosts) or slot.hosts[index].numel() < nbytes:
            # The two buffers are made before either is kept: where the device has no memory, the slot stays as it was.
            host, device = self._streams.on_host((nbytes,), torch.uint8), self._streams.on_device(nbytes)
            slot.hosts[index : index + 1], slot.devices[index : index + 1] = [host], [device]
        joined = slot.hosts[index][:nbytes].view(dtype).view(shape)
        if len(part) == 1:
            np.copyto(to_numpy(joined), first)
        else:
            np.concatenate(part, out=to_numpy(joined))
        return joined

    def _run(self, slot: _Slot, devices: Sequence[Tensor]) -> None:
        with torch.inference_mode():
            slot.answers = self._compute(*devices)

    def _take(self, slot: _Slot) -> None:
        """Copy the answers into new memory on the host; they stay referenced until they have arrived there."""
        for answer in slot.answers:
            host = self._streams.on_host(answer.shape, answer.dtype)
            slot.taken.append(host.copy_(answer, non_blocking=True))

    def _abandon(self, slot: _Slot) -> None:
        """Free the slot of a launch that failed, once its first kernels do not read it any more."""
        try:
            for stream in ("in", "compute"):
                self._streams.enqueue(stream, _nothing).synchronize()
        finally:
            self.release(slot)

    def release(self, slot: _Slot) -> None:
        slot.answers, slot.taken = (), []
        self._free.append(slot)


@dataclass(slots=True, eq=False)
class Staged:
    """A batch under way; wait for it once."""

    staging: Staging
    slot: _Slot
    arrived: Reached

    def synchronize(self) -> None:
        """Block until the outputs are here, on any thread. Raises the device's error."""
        self.arrived.synchronize()

    def wait(self) -> list[np.ndarray]:
        """The outputs of the batch, in memory that belongs to the caller. Raises the device's error."""
        try:
            self.synchronize()
            return [to_numpy(host) for host in self.slot.taken]
        finally:
            self.staging.release(self.slot)


def _copy(hosts: Sequence[Tensor], devices: Sequence[Tensor]) -> None:
    for host, device in zip(hosts, devices, strict=True):
        device.copy_(host, non_blocking=True)


def _shaped(memory: Tensor, like: Tensor) -> Tensor:
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _nothing() -> None:
    return None


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return to_torch(np.empty(0, dtype)).dtype
