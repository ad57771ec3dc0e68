"""Where versions are made ready and run: a device and the thread that owns it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from .device import DeviceThread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where versions serve; ``fallback``: a refused half may be replaced by its FP32 whole; ``rescue``: the whole stays
    loaded beside an active half."""

    device: torch.device
    thread: DeviceThread
    fallback: bool = True
    rescue: bool = True

    def call(self, fn: Callable[[], T]) -> T:
        """Run ``fn`` on the device thread, between two batches, and wait for it."""
        return self.thread.call(fn).result()
