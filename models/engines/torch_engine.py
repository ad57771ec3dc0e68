"""Runs an exported program with torch, eagerly, on a CPU or a CUDA device."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import GraphModule

from ..program import runnable
from ..spec import ModelSpec
from .arrays import joined, to_numpy, to_torch
from .engine import BRIEF_SECONDS, SHORT_SECONDS, Launched
from .in_place import write_in_place
from .index_guard import Guard, GuardedLaunch, guard_indices, rows_alone
from .one_product import make_one_product
from .packed import pack_weights
from .row_shares import FEWEST_SHARED, LONG_ROW_SECONDS, RowShares, wait_for_all_shares
from .scripted import without_the_lock
from .staging import SLOTS, Staging, cuda_lanes


class TorchEngine:
    """One program on one device. Bound to the thread that calls it: intra-op threads are that thread's.

    ``threads`` on a CPU; 0: found out at the warm-up. ``packed``: on a CPU, weights in oneDNN's layout.
    ``rows_apart``: the first axis of inputs and outputs is the batch, so that rows may run on different cores.
    ``spec``: what its inputs are held against before they come here; what that proves is not checked again on a CPU.
    """

    form = "torch"
    assemble_ns = 0  # of the last batch: how long its requests took to be joined
    brief = False
    _guard: Guard | None = None

    def __init__(
        self,
        program: ExportedProgram | GraphModule,
        precision: str,
        device: torch.device,
        threads: int = 0,
        packed: bool = True,
        rows_apart: bool = False,
        spec: ModelSpec | None = None,
    ) -> None:
        self._place(precision, device, threads)
        if device.type == "cuda" and isinstance(program, ExportedProgram):
            program = move_to_device_pass(program, device)
        module = runnable(program) if isinstance(program, ExportedProgram) else program
        if device.type == "cpu" and packed:
            pack_weights(module)
        write_in_place(module)
        make_one_product(module)
        # Requests may have been read against the ranges of another version: on a CPU the kernels refuse those.
        self._guard = guard_indices(module, spec if device.type == "cpu" else rows_alone(spec))
        # On a GPU operations are only launched; whether this launches them sooner has not been measured.
        self._module = without_the_lock(module) if device.type == "cpu" else module
        self._rows_apart = rows_apart and self._module is not module
        if self._guard is not None and device.type == "cpu":
            self._module = self._guard.around(self._module)
        self._stage()

    def warm_up(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """Run a few times; on a CPU also find out whether this model gains from several threads."""
        if self._device.type == "cpu":
            self._calibrate(parts)
        self.run(parts)

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        if self._staging is not None:
            return self.launch(parts).wait()
        with self._no_autograd:
            return self._run_on_cpu(parts)

    @property
    def in_flight(self) -> int:
        """How many batches it takes ahead.

        On a CPU the second would only wait for the same cores, except where rows are shared: there the core that is
        done first goes on with it.
        """
        if self._staging is not None:
            return SLOTS
        return 1 if self._shares is None else 2

    def launch(self, parts: Sequence[Sequence[np.ndarray]]) -> Launched:
        """Begin one batch and return at once; on a CPU a batch that is not shared is run when it is waited for."""
        if self._staging is None:
            return self._launched_on_cpu(parts)
        staged = self._staging.launch(parts)
        self.assemble_ns = self._staging.assemble_ns
        return staged if self._guard is None else GuardedLaunch(staged, self._guard)

    def change_inputs(self, change: Callable[..., Sequence[torch.Tensor]]) -> None:
        """From now on ``change`` gets every batch's tensors, on the device, before the program does."""
        program = self._module
        self._module = lambda *inputs: program(*change(*inputs))

    def close(self) -> None:
        self._end_shares()
        del self._module
        self._staging = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _place(self, precision: str, device: torch.device, threads: int) -> None:
        self.precision = precision
        self.device = str(device)
        self._device = device
        self._asked_threads = self._threads = threads  # 0: not calibrated yet, as torch has it
        self._shares: RowShares | None = None
        self._rows_apart = False
        # One for all batches: to make one takes 10 µs after a sleep, a fifth of a small batch.
        self._no_autograd = torch.inference_mode()

    def _stage(self) -> None:
        """Before the first batch, once the program is on its device: what takes batches there, if it is no CPU."""
        self._staging: Staging | None = None
        if self._device.type == "cuda":
            lanes = cuda_lanes(self._device)
            lanes.adopt()
            self._staging = Staging(lanes, lambda *inputs: self._module(*inputs))

    def _run_on_cpu(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        if self._are_shared(parts):
            return self._launched_on_cpu(parts).wait()
        self._take_threads()
        return [to_numpy(tensor) for tensor in self._module(*self._joined(parts))]

    def _take_threads(self) -> None:
        """OpenMP's number is each thread's own, MKL's is everybody's: who computed shares has set it to one."""
        if self._threads > 1:
            wait_for_all_shares()
            torch.set_num_threads(self._threads)
        elif self._threads and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def _launched_on_cpu(self, parts: Sequence[Sequence[np.ndarray]]) -> Launched:
        if self._shares is not None and self._are_shared(parts):
            return self._shares.launch(*self._joined(parts))
        return Postponed(lambda: self.run(parts))

    def _are_shared(self, parts: Sequence[Sequence[np.ndarray]]) -> bool:
        return self._shares is not None and sum([len(part) for part in parts[0]]) >= FEWEST_SHARED

    def _joined(self, parts: Sequence[Sequence[np.ndarray]]) -> list[torch.Tensor]:
        began_ns = time.monotonic_ns()
        inputs = [to_torch(joined(part)) for part in parts]
        self.assemble_ns = time.monotonic_ns() - began_ns
        return inputs

    def _end_shares(self) -> None:
        if self._shares is not None:
            self._shares.close()
            self._shares = None

    def _calibrate(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """One thread for a batch that is short, all cores for any other; rows that take long are shared among them.

        Not the faster of the two as measured now: while a model is loaded something else often has a core, and
        two threads on one core look worse than they are for as long as the server then lives.
        """
        self._end_shares()  # of an earlier warm-up
        self._threads = self._asked_threads or 1
        took_s = seconds_of(lambda: self.run(parts))[0]
        row_s = took_s * self._threads / max(sum(len(part) for part in parts[0]), 1)  # on one core
        if not self._asked_threads and took_s >= SHORT_SECONDS:
            self._threads = len(os.sched_getaffinity(0))
        self.brief = self._threads == 1 and took_s < BRIEF_SECONDS
        if self._threads > 1 and self._rows_apart and row_s >= LONG_ROW_SECONDS:
            self._shares = RowShares(lambda *rows: self._module(*rows), self._threads)


@dataclass(slots=True, eq=False)
class Postponed:
    """A batch that is run when somebody waits for it."""

    run: Callable[[], list[np.ndarray]]

    def wait(self) -> list[np.ndarray]:
        return self.run()


def seconds_of(run: Callable[[], object], budget_s: float = 0.15) -> list[float]:
    """What up to nine runs took after one that is not counted, within about ``budget_s``: the shortest first.

    The shortest is the program's own, what the others took longer is somebody else's.
    """
    run()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 9 and sum(times) < budget_s):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)


def use_true_fp32() -> None:
    """No TF32, and half products accumulate in FP32: what is proven is what runs (process-wide)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
