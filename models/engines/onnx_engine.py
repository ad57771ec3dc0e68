"""Runs an ONNX file with ONNX Runtime, on its CPU or its CUDA execution provider."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from ..errors import EngineFailed
from ..opened_file import OpenedFile
from .arrays import joined
from .cpu.setup import BRIEF_SPINNING, NO_SPINNING, PLAIN, CpuSetup
from .engine import BRIEF_SECONDS
from .torch_engine import seconds_of

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Measured on two cores: as fast alone as without an end (1.00 to 1.09, batches of 1 to 32), and beside one busy process
# 0.44 to 0.53 of that instead of 0.28 to 0.50. No spinning at all keeps 0.46 to 0.69, and loses 12 to 16 % at batch 1.
BRIEF_SPIN_US = 20
# ONNX Runtime 1.31's default optimisation segfaults on some valid half files (Scan, a small ViT) with this fusion.
DEADLY_IN_HALF = ["MatmulTransposeFusion"]


class OnnxEngine:
    """One session on one device. It runs on the requested provider or raises; there is no silent fall-back.

    ``setup`` says how a CPU is used. ``packed`` False: without copies of the weights in the kernels' layout; slower, in
    half the memory.
    """

    form = "onnx"
    assemble_ns = 0  # of the last batch: how long its requests took to be joined
    brief = False

    def __init__(
        self,
        source: Path | OpenedFile,
        precision: str,
        device: torch.device,
        setup: CpuSetup = PLAIN,
        packed: bool = True,
    ) -> None:
        self.precision = precision
        several = device.type == "cpu" and setup.threads != 1
        self.possible = {BRIEF_SPINNING, NO_SPINNING} if several else set[str]()
        self.setup = setup.only(self.possible)
        unfused = [] if precision == "fp32" else DEADLY_IN_HALF
        path, readable = (source, source) if isinstance(source, Path) else (source.path, _by_handle(source))
        self._session = _session(path, readable, device, self.setup, packed, unfused)
        self.device, self.provider = str(device), self._session.get_providers()[0]
        self._names = [value.name for value in self._session.get_inputs()]

    def warm_up(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """Run a few times; on a CPU with one thread also find out whether that takes longer than to wake a thread."""
        self.run(parts)
        if self.device == "cpu" and self.setup.threads == 1:
            self.brief = seconds_of(lambda: self.run(parts))[0] < BRIEF_SECONDS

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        began_ns = time.monotonic_ns()
        feed = {name: joined(part) for name, part in zip(self._names, parts, strict=True)}
        self.assemble_ns = time.monotonic_ns() - began_ns
        return [np.asarray(output) for output in self._session.run(None, feed)]

    def close(self) -> None:
        del self._session


def _by_handle(source: OpenedFile) -> Path:
    """The same file that was opened and checked, also where its path names another one by now."""
    return Path(f"/proc/self/fd/{source.handle.fileno()}")


def _session(
    path: Path, readable: Path, device: torch.device, setup: CpuSetup, packed: bool, unfused: list[str]
) -> onnxruntime.InferenceSession:
    provider = _PROVIDERS[device.type]
    if provider not in onnxruntime.get_available_providers():
        raise EngineFailed(
            f"{path.name} is to run on {device}, but this ONNX Runtime ({onnxruntime.__version__}) offers "
            f"{onnxruntime.get_available_providers()}; run `halfeven doctor` to see what to install"
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = setup.threads
    if NO_SPINNING in setup.passes:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    elif BRIEF_SPINNING in setup.passes:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(BRIEF_SPIN_US))
    options.add_session_config_entry("session.disable_prepacking", "0" if packed else "1")
    settings = {"device_id": str(device.index or 0), "use_tf32": "0"} if device.type == "cuda" else {}
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
