"""The protocol of an engine: it runs batches of one program on one device.

Tests replace it by a fake of ten lines. No code outside of this package depends on the kind of an engine.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

BRIEF_SECONDS = 1e-4  # to wake a thread and to be woken by it takes as long
SHORT_SECONDS = 1e-3  # a shorter batch ends before a second thread has begun, and HTTP needs the core


class Engine(Protocol):
    """A program loaded on a device. All calls come from the one thread that owns the device.

    One that can tell has ``assemble_ns`` as well: how long the requests of its last batch took to be joined. One with
    ``brief`` takes less time for its largest batch than to wake a thread: another may then run it while the owner
    sleeps, never both. One on ONNX Runtime has ``provider``, the name of its execution provider.
    """

    @property
    def form(self) -> str:
        """``torch``, ``onnx`` or ``live``."""
        ...

    @property
    def precision(self) -> str:
        """``fp32``, ``fp16`` or ``bf16``: what the program computes in."""
        ...

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``, as torch writes it."""
        ...

    def warm_up(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """Run the batch and drop the answers, in every slot that the engine has, so that no request waits for one-time
        work."""
        ...

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Run one batch.

        ``parts[i]`` are the arrays that joined along the first axis make input ``i`` (in the spec's order): one
        C-contiguous array per request. Gives the outputs of the whole batch in the spec's order.
        """
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Launched(Protocol):
    """A batch on its way on a device."""

    def wait(self) -> list[np.ndarray]:
        """Its outputs, as ``run`` gives them; blocks until they are here. Raises what the run raised."""
        ...


class InBackground(Launched, Protocol):
    """A launched batch that the device computes without the host. Any thread may call ``synchronize``; ``wait`` is for
    the thread that launched the batch."""

    def synchronize(self) -> None:
        """Block until ``wait`` would not. Raises the device's error, which ``wait`` raises as well."""
        ...


class Launching(Engine, Protocol):
    """An engine that takes the next batch while one is computing: copies in and computing overlap.

    ``run(parts)`` is ``launch(parts).wait()``. At most ``in_flight`` batches are launched and not yet waited for.
    """

    @property
    def in_flight(self) -> int: ...

    def launch(self, parts: Sequence[Sequence[np.ndarray]]) -> Launched:
        """Begin one batch and return at once."""
        ...
