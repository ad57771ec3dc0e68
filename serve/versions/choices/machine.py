"""What measuring again asks of the machine that it runs on."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ....models.engines.engine import Engine
from ....models.usable_cores import usable_cores
from ...batching.core_wait import Crowding
from ..loading.cpu_choice import Parts, batch_seconds
from ..loading.release import free_bytes, give_back, give_back_tried


@dataclass(frozen=True, slots=True)
class Machine:
    """What measuring asks of this machine; tests give other facts. ``idle``: whether the device has nothing to do."""

    idle: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    cores: Callable[[], int] = usable_cores
    crowding: Callable[[], Crowding] = Crowding
    batch_seconds: Callable[[Engine, Parts], float] = batch_seconds
    loading_clock: Callable[[], float] = time.thread_time
    free_bytes: Callable[[], int] = free_bytes
    tidy: Callable[[bool], None] = lambda exchanged: give_back() if exchanged else give_back_tried()
