"""The number of jobs that a server runs at once, and the memory of a trainer."""

import logging

from ....models.order.one_order import SHARE
from ....models.usable_cores import usable_cores
from ....models.usable_memory import usable_memory
from ...settings import Settings

logger = logging.getLogger("halfeven.finetune")


def jobs_at_once(settings: Settings, device: str) -> int:
    """As many as were asked for, on a processor at most as many as its cores hold with the threads of each."""
    asked, cores = settings.jobs, usable_cores()
    most = max(1, cores // (settings.trainer_threads * settings.trainer_processes))
    if device == "cuda" or asked <= most:
        return asked
    logger.warning("--jobs %d: %d cores hold %d trainers, so %d jobs run at once", asked, cores, most, most)
    return most


def trainer_memory(settings: Settings, device: str, at_once: int = 1) -> int:
    """Bytes of private memory that each of ``at_once`` trainers may have. On a CUDA device only what was asked for: the
    driver's mappings count too."""
    if settings.trainer_memory_mib is not None:
        return settings.trainer_memory_mib * 2**20
    return 0 if device == "cuda" else int(SHARE * usable_memory()) // at_once
