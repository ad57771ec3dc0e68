"""The one verb: an engine runs batches of one program on one device.

A fake of ten lines replaces it in every test. Nothing above this room knows how many kinds there are.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

BRIEF_SECONDS = 1e-4  # waking a thread and being woken by it takes as long
SHORT_SECONDS = 1e-3  # below this a batch is over before a second thread has begun, and HTTP needs the core


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
        """Run once and throw the answer away, so that the first caller pays for nothing."""
        ...

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Run one batch.

        ``parts[i]`` is what is to be joined along the first axis to make input ``i`` (in the spec's
        order): one C-contiguous array per request. The outputs come in the spec's order, whole.
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


class Launching(Engine, Protocol):
    """An engine that takes the next batch while one is computing: copies in and computing overlap.

    ``run(parts)`` is ``launch(parts).wait()``. At most ``in_flight`` batches are launched and not yet waited for.
    """

    @property
    def in_flight(self) -> int: ...

    def launch(self, parts: Sequence[Sequence[np.ndarray]]) -> Launched:
        """Begin one batch and return at once."""
        ...
