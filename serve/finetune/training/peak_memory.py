"""The most memory that this process has had, of all and by phase. Needs torch alone.

Read as the kernel counts it for the memory of this program (VmHWM): what getrusage gives outlives exec, and is that of
the server which started the process. Where there is no /proc it is getrusage's, and no phase has its own.
"""

import os
import resource
from pathlib import Path
from typing import Any

import torch

LOADING, CHOOSING, STEPS = "loading", "choosing", "steps"
EVALUATION, CHECKPOINT, PUBLISHING = "evaluation", "checkpoint", "publishing"
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The phases follow each other; one that comes again counts with its largest value. On CUDA the device has a peak
    of its own, that of torch's allocator."""

    def __init__(self, device: str) -> None:
        self._on_cuda = torch.device(device).type == "cuda"
        self._phase = LOADING
        self._host: dict[str, int] = {}
        self._device: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """The phase until now ends, and this one begins."""
        self._take()
        self._phase = phase
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            _RESET.write_text("5")  # VmHWM becomes what is resident now
        except OSError:
            return  # the peak of this phase is then at least that of those before

    def facts(self) -> dict[str, Any]:
        """``peak_memory_bytes``: resident; ``peak_device_bytes``: of tensors on a CUDA device, None on another; both
        by phase (``memory_by_phase``, ``device_memory_by_phase``)."""
        self._take()
        device = {"device_memory_by_phase": dict(self._device)} if self._on_cuda else {}
        return {
            "peak_memory_bytes": max(self._host.values()),
            "peak_device_bytes": max(self._device.values()) if self._on_cuda else None,
            "memory_by_phase": dict(self._host),
            **device,
        }

    def _take(self) -> None:
        self._host[self._phase] = max(self._host.get(self._phase, 0), resident_peak())
        if self._on_cuda:
            self._device[self._phase] = max(
                self._device.get(self._phase, 0), torch.cuda.max_memory_allocated()
            )


def resident_peak() -> int:
    """Bytes: the largest resident memory of this program since it was started, or since the last phase began."""
    try:
        line = next(one for one in _STATUS.read_text().splitlines() if one.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return found if os.uname().sysname == "Darwin" else found * 1024
