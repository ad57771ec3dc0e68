"""The base of every engine: it runs batches of one program on one device.

Tests replace it by a fake of ten lines. No code outside of this package depends on the kind of an engine.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .cpu.setup import PLAIN, CpuSetup

if TYPE_CHECKING:  # it brings ONNX Runtime
    from .onnx_placement import Placement

BRIEF_SECONDS = 1e-4  # to wake a thread and to be woken by it takes as long
HALF_MUST_GAIN = 1.1  # times as fast as the best original, or the original serves
LIVE_FILE = "live.json"  # of a version in the live form: where its code is
SHORT_SECONDS = 1e-3  # a shorter batch ends before a second thread has begun, and HTTP needs the core


class Launched(Protocol):
    """A batch on its way on a device."""

    def wait(self) -> list[np.ndarray]:
        """The batch's outputs, as ``run`` gives them; blocks until they are here. Raises what the run raised."""
        ...


class InBackground(Launched, Protocol):
    """A launched batch that the device computes without the host. Any thread may call ``synchronize``; ``wait`` is for
    the thread that launched the batch."""

    def synchronize(self) -> None:
        """Block until ``wait`` would not. Raises the device's error, which ``wait`` raises as well."""
        ...


@dataclass(slots=True, eq=False)
class Postponed:
    """A batch that is run when it is waited for."""

    run: Callable[[], list[np.ndarray]]

    def wait(self) -> list[np.ndarray]:
        return self.run()


class Engine:
    """A program loaded on a device. All calls come from the one thread that owns the device.

    ``run(parts)`` is ``launch(parts).wait()``. At most ``in_flight`` batches are launched and not yet waited for: where
    it is more than one, the next batch is taken while one is computing. A ``brief`` engine takes less time for its
    largest batch than to wake a thread: another thread may then run it while the owner sleeps, never both.
    """

    form: str  # ``torch``, ``onnx`` or ``live``
    precision: str  # ``fp32``, ``fp16`` or ``bf16``: what the program computes in
    device: str  # ``cpu`` or ``cuda:N``, as torch writes it
    in_flight: int = 1
    brief: bool = False
    assemble_ns: int = 0  # of the last batch: how long its requests took to be joined
    setup: CpuSetup = PLAIN  # how a CPU is used
    possible: Set[str] = frozenset()  # the passes that this program allows on a CPU
    provider: str | None = None  # ONNX Runtime's execution provider
    placement: "Placement | None" = None  # of its nodes, on a device other than a CPU

    def warm_up(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """Run the batch and drop the answers, in every slot that the engine has, so that no request waits for one-time
        work."""
        self.run(parts)

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Run one batch.

        ``parts[i]`` are the arrays that joined along the first axis make input ``i`` (in the spec's order): one
        C-contiguous array per request. Gives the outputs of the whole batch in the spec's order.
        """
        raise NotImplementedError

    def launch(self, parts: Sequence[Sequence[np.ndarray]]) -> Launched:
        """Begin one batch and return at once."""
        return Postponed(lambda: self.run(parts))

    def close(self) -> None:
        """Give the memory back."""
