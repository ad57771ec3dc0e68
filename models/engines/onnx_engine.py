"""Runs an ONNX file with ONNX Runtime, on its CPU or its CUDA execution provider."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime

from ..errors import BadRequest, EngineFailed
from ..files.opened_file import OpenedFile
from ..machine.usable_cores import usable_cores
from .cpu.setup import BRIEF_SPINNING, NO_SPINNING, PLAIN, CpuSetup
from .engine import Launched
from .onnx_placement import RECORD, placement_of
from .staged_engine import StagedEngine, joined

if TYPE_CHECKING:
    import torch

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Measured on two cores: as fast alone as without an end (1.00 to 1.09, batches of 1 to 32), and beside one busy process
# 0.44 to 0.53 of that instead of 0.28 to 0.50. No spinning at all keeps 0.46 to 0.69, and loses 12 to 16 % at batch 1.
BRIEF_SPIN_US = 20
# ONNX Runtime 1.31's default optimisation segfaults on some valid half files (Scan, a small ViT) with this fusion.
DEADLY_IN_HALF = ["MatmulTransposeFusion"]
# The errors of ONNX Runtime's kernels for a CPU for an index out of range, from Gather to ScatterND and fused
# embeddings.
_OUT_OF_TABLE = re.compile(
    r"out of data bounds|invalid indi?(ce|ex) found|Out of range value in index tensor|input index out of range"
)


class OnnxEngine(StagedEngine):
    """One session on one device. It runs on the requested provider or raises; there is no silent fall-back.

    ``setup`` says how a CPU is used. ``packed`` False: without copies of the weights in the kernels' layout; slower, in
    half the memory. On CUDA it takes the next batch while one is computing (`staging.py`), and has ``placement``. On a
    CPU it needs no torch.
    """

    form = "onnx"

    def __init__(
        self,
        source: Path | OpenedFile,
        precision: str,
        device: "torch.device | str",
        setup: CpuSetup = PLAIN,
        packed: bool = True,
    ) -> None:
        self.precision = precision
        self.device = str(device)
        several = self.device == "cpu" and setup.threads != 1
        self.possible = {BRIEF_SPINNING, NO_SPINNING} if several else set[str]()
        self.setup = setup.only(self.possible)
        unfused = [] if precision == "fp32" else DEADLY_IN_HALF
        path, readable = (source, source) if isinstance(source, Path) else (source.path, source.again)
        self._session = _session(path, readable, self.device, self.setup, packed, unfused)
        self.provider = self._session.get_providers()[0]
        self._names = [value.name for value in self._session.get_inputs()]
        if self.device != "cpu":
            from .onnx_on_cuda import BoundRuns, staging_of

            self.placement = placement_of(self._session, readable)
            self._runs: Callable[..., list[torch.Tensor]]
            self._runs = BoundRuns(self._session, self.device, waits=bool(self.placement.on_cpu))
            self._staging = staging_of(self.device, lambda *inputs: self._runs(*inputs))
            self.in_flight = self._staging.slots

    def launch(self, parts: Sequence[Sequence[np.ndarray]]) -> Launched:
        """Begin one batch and return at once; on a CPU it runs when it is waited for."""
        return super().launch(parts) if self._staging is None else self._staged(self._staging, parts)

    def change_inputs(self, change: "Callable[..., Sequence[torch.Tensor]]") -> None:
        """``change`` gets every batch's tensors from now on, on the CUDA device, before the session does."""
        runs = self._runs
        self._runs = lambda *inputs: runs(*change(*inputs))

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        if self._staging is not None:
            return self.launch(parts).wait()
        began_ns = time.monotonic_ns()
        feed = {name: joined(part) for name, part in zip(self._names, parts, strict=True)}
        self.assemble_ns = time.monotonic_ns() - began_ns
        try:
            return [np.asarray(output) for output in self._session.run(None, feed)]
        except Exception as error:  # of the runtime's own kinds
            if _OUT_OF_TABLE.search(str(error)) is None:
                raise
            raise BadRequest(
                "the values of the inputs lead the model to an index that is out of range for a table; send values "
                f"like those that the model was made for. ONNX Runtime says: {str(error)[:300]}"
            ) from error

    def close(self) -> None:
        if self._staging is not None:
            self._staging = None
            del self._runs
        del self._session


def _session(
    path: Path, readable: Path, device: str, setup: CpuSetup, packed: bool, unfused: list[str]
) -> onnxruntime.InferenceSession:
    on_cuda = device != "cpu"
    provider = _PROVIDERS["cuda" if on_cuda else "cpu"]
    if provider not in onnxruntime.get_available_providers():
        raise EngineFailed(
            f"{path.name} is to run on {device}, but this ONNX Runtime ({onnxruntime.__version__}) offers "
            f"{onnxruntime.get_available_providers()}; run `halfeven doctor` to see what to install"
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = setup.threads or usable_cores()
    if NO_SPINNING in setup.passes:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    elif BRIEF_SPINNING in setup.passes:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(BRIEF_SPIN_US))
    options.add_session_config_entry("session.disable_prepacking", "0" if packed else "1")
    options.add_session_config_entry(RECORD, "1" if on_cuda else "0")
    settings = dict[str, str]()
    if on_cuda:
        from .onnx_on_cuda import settings_for

        settings = settings_for(device, path.name)
    try:
        session = onnxruntime.InferenceSession(
            readable, options, providers=[(provider, settings)], disabled_optimizers=unfused
        )
    except Exception as error:
        raise EngineFailed(f"ONNX Runtime cannot load {path}: {str(error)[:800]}") from error
    if session.get_providers()[0] != provider:
        raise EngineFailed(
            f"{path.name} was to run on {provider}, but ONNX Runtime fell back to {session.get_providers()}; "
            "run `halfeven doctor` to see which CUDA libraries are missing"
        )
    return session
