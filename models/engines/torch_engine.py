"""Loads an exported program of a version, and runs it with torch, eagerly, on a CPU or a CUDA device."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.export import ExportedProgram
from torch.fx import GraphModule

from ..archive.archive import load_program
from ..archive.plain_program import read_module
from ..errors import DamagedFile
from ..program import on_device, runnable
from ..spec.spec import ModelSpec
from ..store.store import Version
from .arrays import to_numpy, to_torch
from .cpu.in_place import write_in_place
from .cpu.one_product import make_one_product
from .cpu.packed import pack_weights, packable
from .cpu.row_shares import FEWEST_SHARED, RowShares, wait_for_all_shares
from .cpu.scripted import without_the_lock
from .cpu.setup import PACKED, PLAIN, SHARED_ROWS, WITHOUT_LOCK, CpuSetup
from .cuda_graphs import Graphs, NotRecorded, adds_in_any_order, agreement_of, host_reads
from .engine import Launched, Postponed
from .faults import give_back_cached_memory
from .index_guard import Guard, GuardedLaunch, guard_indices, rows_alone
from .staged_engine import StagedEngine, joined, run_in_every_slot
from .staging import Staging, cuda_streams, slots_on
from .true_fp32 import use_true_fp32


class TorchEngine(StagedEngine):
    """One program on one device. Bound to the thread that calls it: intra-op threads are that thread's.

    ``setup`` says how a CPU is used; of its passes those are taken that this program allows (``possible``), and
    ``self.setup`` has those. ``rows_apart``: the first axis of inputs and outputs is the batch, so that rows
    may run on different cores.
    ``spec``: the inputs have been checked against it; indices that it proves are not checked again on a CPU.
    """

    form = "torch"
    host_reads: Sequence[str] = ()  # operations of the program that no CUDA graph can hold
    in_any_order: Sequence[str] = ()  # operations that may give other bits in each run on CUDA
    _guard: Guard | None = None

    def __init__(
        self,
        program: ExportedProgram | GraphModule,
        precision: str,
        device: torch.device,
        setup: CpuSetup = PLAIN,
        rows_apart: bool = False,
        spec: ModelSpec | None = None,
    ) -> None:
        self._place(precision, device, setup)
        if device.type == "cuda" and isinstance(program, ExportedProgram):
            program = on_device(program, device)
        module = runnable(program) if isinstance(program, ExportedProgram) else program
        if device.type == "cpu":
            self._module = self._prepared_for_cpu(module, spec, rows_apart)
        else:  # another version's ranges may have let a request in, and there an index out of range is fatal
            self.host_reads, self.in_any_order = host_reads(module), adds_in_any_order(module)
            self._module = _written(module)
            self._guard = guard_indices(self._module, rows_alone(spec))
        self._stage()

    def _prepared_for_cpu(
        self, module: GraphModule, spec: ModelSpec | None, rows_apart: bool
    ) -> Callable[..., Any]:
        """The program with those passes of the setup that it allows, which are known after that."""
        possible = {*packable(module), WITHOUT_LOCK}
        if packs := self.setup.passes & PACKED:
            pack_weights(module, packs)
        _written(module)
        self._guard = guard_indices(module, spec)
        scripted = WITHOUT_LOCK in self.setup.passes
        program = without_the_lock(module) if scripted else module
        if scripted and program is module:  # control flow stays in Python
            possible.discard(WITHOUT_LOCK)
        elif scripted and rows_apart and self.setup.threads > 1:  # else rows would wait for Python's lock
            possible.add(SHARED_ROWS)
        self.setup, self.possible = self.setup.only(possible), possible
        if SHARED_ROWS in self.setup.passes:
            self._shares = RowShares(lambda *rows: self._module(*rows), self.setup.threads)
            # The core that is ready first begins it. Without shares a second batch would wait for the same cores.
            self.in_flight = 2
        return program if self._guard is None else self._guard.around(program)

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        if self._staging is not None:
            return self.launch(parts).wait()
        with self._no_autograd:
            return self._run_on_cpu(parts)

    def launch(self, parts: Sequence[Sequence[np.ndarray]]) -> Launched:
        """Begin one batch and return at once; on a CPU a batch whose rows are not shared runs when it is waited for."""
        if self._staging is None:
            return self._launched_on_cpu(parts)
        staged = self._staged(self._staging, parts)
        return staged if self._guard is None else GuardedLaunch(staged, self._guard)

    def change_inputs(self, change: Callable[..., Sequence[torch.Tensor]]) -> None:
        """From now on ``change`` gets every batch's tensors, on the device, before the program does."""
        program = self._module
        self._module = lambda *inputs: program(*change(*inputs))

    def record(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """Record batches of these shapes in every slot, to be replayed from now on (`cuda_graphs.py`); on CUDA alone,
        after the largest batch has been run.

        Raises NotRecorded naming the operation where the program needs the host, and what `Graphs.record` raises.
        """
        if self._staging is None:
            raise NotRecorded(f"{self.device} records nothing")
        if self.host_reads:
            raise NotRecorded(f"the host has to know the result of {', '.join(self.host_reads)}")
        agreement = agreement_of(self.precision, self.in_any_order)
        while len(self._graphs) < self._staging.slots:
            self._graphs.append(Graphs(self._eagerly, cuda_streams(self._device), agreement))
        self._compute = self._recorded
        try:
            run_in_every_slot(self, parts)
        finally:
            self._compute = self._replayed

    def forget_recordings(self) -> None:
        """Compute every batch operation by operation again."""
        self._compute = self._eagerly
        while self._graphs:
            self._graphs.pop().close()

    def _eagerly(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._module(*inputs)

    def _recorded(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._graphs_of_slot.record(*inputs)

    def _replayed(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._graphs_of_slot(*inputs)

    @property
    def _graphs_of_slot(self) -> Graphs:
        assert self._staging is not None, "batches are recorded and replayed on CUDA alone"
        return self._graphs[self._staging.slot]

    def close(self) -> None:
        self._end_shares()
        self.forget_recordings()
        del self._module
        self._staging = None
        if self._device.type == "cuda":
            give_back_cached_memory()

    def _place(self, precision: str, device: torch.device, setup: CpuSetup) -> None:
        self.precision = precision
        self.device = str(device)
        self._device = device
        self.setup = setup
        self._shares: RowShares | None = None
        self._graphs: list[Graphs] = []  # by slot
        # One for all batches: to make one takes 10 µs after a sleep, a fifth of a small batch.
        self._no_autograd = torch.inference_mode()

    def _stage(self) -> None:
        """The staging of batches for a device other than a CPU; made before the first batch, once the program is
        there."""
        if self._device.type == "cuda":
            streams = cuda_streams(self._device)
            streams.adopt()
            self._compute: Callable[..., Sequence[torch.Tensor]] = self._eagerly
            self._staging = Staging(streams, lambda *inputs: self._compute(*inputs), slots_on(self._device))
            self.in_flight = self._staging.slots

    def _run_on_cpu(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        if self._are_shared(parts):
            return self._launched_on_cpu(parts).wait()
        self._take_threads()
        return [to_numpy(tensor) for tensor in self._module(*self._joined(parts))]

    def _take_threads(self) -> None:
        """Set the number of threads: OpenMP's belongs to each thread, MKL's to the process, where shares set it to
        one."""
        threads = self.setup.threads
        if threads > 1:
            wait_for_all_shares()
            torch.set_num_threads(threads)
        elif threads and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

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


def _written(module: GraphModule) -> GraphModule:
    """The program with the two changes that made no device slower in any measurement."""
    write_in_place(module)
    make_one_product(module)
    return module


def original_program(version: Version) -> ExportedProgram:
    """The FP32 original with its weights. Raises DamagedFile naming the file."""
    with version.opened("original.pt2") as file:
        return load_program(file, _weights(version))


def half_program(version: Version) -> ExportedProgram:
    """The half with its weights. Raises DamagedFile naming the file."""
    with version.opened("half.pt2") as file:
        return load_program(file)


def original_module(version: Version) -> GraphModule:
    """The FP32 original as a graph that can be called, on a CPU. Raises DamagedFile naming the file."""
    program = _runnable(version, "original.pt2", torch.device("cpu"), _weights(version))
    return program if isinstance(program, GraphModule) else runnable(program)


def _weights(version: Version) -> dict[str, torch.Tensor]:
    with version.opened("weights.safetensors") as weights:
        try:
            return load_file(weights.again)
        except Exception as error:
            raise DamagedFile(f"{weights.path} is not a safetensors file: {error}") from error


def _runnable(
    version: Version, name: str, device: torch.device, state: dict[str, torch.Tensor] | None = None
) -> ExportedProgram | GraphModule:
    """A program as a graph that runs, where it can be read without torch.export; only that can move one to a GPU."""
    with version.opened(name) as file:
        module = read_module(file, state) if device.type == "cpu" else None
        return module if module is not None else load_program(file, state)


def load_program_engine(
    version: Version, name: str, device: torch.device, setup: CpuSetup = PLAIN
) -> TorchEngine:
    """The program ``original.pt2`` or ``half.pt2`` as an engine."""
    use_true_fp32()
    is_half, spec = name == "half.pt2", version.spec()
    program = _runnable(version, name, device, None if is_half else _weights(version))
    precision = version.manifest["half"] if is_half else "fp32"
    return TorchEngine(program, precision, device, setup, rows_apart=spec.batched, spec=spec)
