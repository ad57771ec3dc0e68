"""A device and the thread that owns it: versions are made ready there, and run."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ...models.errors import NotReady
from .device import DeviceThread

logger = logging.getLogger("halfeven.device")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """The device where versions serve. ``fallback``: a refused half may be replaced by its FP32 original; ``rescue``:
    the original stays loaded beside an active half; ``scarce``: no memory for all forms of a version together;
    ``stopping``: an event that a server sets when it shuts down; None: never."""

    device: torch.device
    thread: DeviceThread
    fallback: bool = True
    rescue: bool = True
    scarce: bool = False
    stopping: threading.Event | None = None

    @property
    def apart(self) -> bool:
        """True if the compared forms are loaded one at a time, as on a device with memory of its own."""
        return self.scarce or self.device.type != "cpu"

    def until(self, stopping: threading.Event) -> "Place":
        """A copy of this place. Its `call` raises NotReady once the event ``stopping`` is set."""
        return replace(self, stopping=stopping)

    def call(self, fn: Callable[[], T]) -> T:
        """Run ``fn`` on the device thread, between two batches, and wait for it. Raises NotReady where the server shuts
        down."""
        if self.stopping is not None and self.stopping.is_set():
            raise NotReady("the server is shutting down and makes nothing ready any more")
        return self.thread.call(fn).result()

    def answers_within(self, timeout_s: float) -> bool:
        """False if the device has run nothing new after ``timeout_s`` seconds: then its engines cannot be closed."""
        try:
            self.thread.call(lambda: None).result(timeout_s)
        except TimeoutError:
            logger.error("device %s: a batch does not end, so that its engines are not closed", self.device)
            return False
        except NotReady:  # the thread has ended
            pass
        return True

    @property
    def lost(self) -> str | None:
        """The reason why nothing is computed until the process is started anew; None while the device computes."""
        if self.thread.lost is not None:
            return f"device {self.device} is lost: {self.thread.lost}; restart the server"
        return None if self.thread.alive else f"the thread of device {self.device} has ended"
