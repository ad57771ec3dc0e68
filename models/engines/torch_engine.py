"""Runs an exported program with torch, eagerly, on a CPU or a CUDA device."""

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from ..program import runnable
from .arrays import joined, to_numpy, to_torch
from .in_place import write_in_place

_SHORT_SECONDS = 1e-3  # below this a batch is over before a second thread has begun, and HTTP needs the core


class TorchEngine:
    """One program on one device. Bound to the thread that calls it: intra-op threads are that thread's."""

    form = "torch"

    def __init__(self, program: ExportedProgram, precision: str, device: torch.device) -> None:
        self.precision = precision
        self.device = str(device)
        self._device = device
        self._threads = 0  # not calibrated: as torch has it
        if device.type == "cuda":
            program = move_to_device_pass(program, device)
        self._module = runnable(program)
        write_in_place(self._module)

    def warm_up(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """Run a few times; on a CPU also find out whether this model gains from several threads."""
        if self._device.type == "cpu":
            self._threads = self._calibrated(parts)
        self.run(parts)

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        with torch.inference_mode():
            return self._run_on_cuda(parts) if self._device.type == "cuda" else self._run_on_cpu(parts)

    def close(self) -> None:
        del self._module
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run_on_cpu(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        if self._threads and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return [to_numpy(tensor) for tensor in self._module(*[to_torch(joined(part)) for part in parts])]

    def _run_on_cuda(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """One copy in and one out per tensor, through page-locked memory of torch's caching host allocator."""
        inputs = [self._staged(part).to(self._device, non_blocking=True) for part in parts]
        answers = self._module(*inputs)
        hosts = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in answers
        ]
        torch.cuda.current_stream(self._device).synchronize()
        return [to_numpy(host) for host in hosts]

    def _staged(self, part: Sequence[np.ndarray]) -> torch.Tensor:
        first = part[0]
        rows = sum(array.shape[0] for array in part) if first.ndim else 0
        shape = (rows, *first.shape[1:]) if first.ndim else ()
        tensor = torch.empty(shape, dtype=to_torch(np.empty(0, first.dtype)).dtype, pin_memory=True)
        if len(part) == 1:
            np.copyto(to_numpy(tensor), first)
        else:
            np.concatenate(part, out=to_numpy(tensor))
        return tensor

    def _calibrated(self, parts: Sequence[Sequence[np.ndarray]]) -> int:
        """One thread for a batch that is short, all cores for any other.

        Not the faster of the two as measured now: while a model is loaded something else often has a core, and
        two threads on one core look worse than they are for as long as the server then lives.
        """
        self._threads = 1
        alone = median_seconds(lambda: self.run(parts))
        return 1 if alone < _SHORT_SECONDS else len(os.sched_getaffinity(0))


def median_seconds(run: Callable[[], object], budget_s: float = 0.15) -> float:
    """The median of up to nine runs after one that is not counted, within about ``budget_s``."""
    run()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 9 and sum(times) < budget_s):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def use_true_fp32() -> None:
    """No TF32, and half products accumulate in FP32: what is proven is what runs (process-wide)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
