"""Runs an ONNX file with ONNX Runtime, on its CPU or its CUDA execution provider."""

import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from ..errors import EngineFailed
from ..opened_file import OpenedFile
from .arrays import joined
from .engine import BRIEF_SECONDS, SHORT_SECONDS
from .torch_engine import seconds_of

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# ONNX Runtime 1.31's default optimisation segfaults on some valid half files (Scan, a small ViT) with this fusion.
DEADLY_IN_HALF = ["MatmulTransposeFusion"]


class OnnxEngine:
    """One session on one device. Never falls back in silence: the provider asked for is the one that runs.

    ``packed`` False: without copies of the weights in the kernels' layout; slower, in half the memory.
    ``threads`` within an operation on a CPU; 0: as many as ONNX Runtime likes (one for each physical core).
    """

    form = "onnx"
    assemble_ns = 0  # of the last batch: how long its requests took to be joined
    brief = False
    _release: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        source: Path | OpenedFile,
        precision: str,
        device: torch.device,
        packed: bool = True,
        threads: int = 0,
    ) -> None:
        self.precision = precision
        unfused = [] if precision == "fp32" else DEADLY_IN_HALF
        path, readable = (source, source) if isinstance(source, Path) else (source.path, self._kept(source))
        self._on_one_thread = partial(_session, path, readable, device, packed, 1, unfused)
        self._threads = threads if device.type == "cpu" else -1
        self._session = _session(path, readable, device, packed, threads, unfused)
        self.device = f"{device} ({self._session.get_providers()[0]})"
        self._names = [value.name for value in self._session.get_inputs()]

    def _kept(self, source: OpenedFile) -> Path:
        """The same file, open as long as this engine: a session is made once more when it is warmed up."""
        handle = os.dup(source.handle.fileno())
        self._release = weakref.finalize(self, os.close, handle)
        return Path(f"/proc/self/fd/{handle}")

    def warm_up(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """Run a few times; on a CPU a batch that is short gets one thread: others would only spin beside it."""
        self.run(parts)
        if self._threads < 0:
            return
        seconds = seconds_of(lambda: self.run(parts))[0]
        if self._threads == 0 and seconds < SHORT_SECONDS:
            self._threads, self._session = 1, self._on_one_thread()
            seconds = seconds_of(lambda: self.run(parts))[0]
        self.brief = self._threads == 1 and seconds < BRIEF_SECONDS

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        began_ns = time.monotonic_ns()
        feed = {name: joined(part) for name, part in zip(self._names, parts, strict=True)}
        self.assemble_ns = time.monotonic_ns() - began_ns
        return [np.asarray(output) for output in self._session.run(None, feed)]

    def close(self) -> None:
        del self._session
        self._release()


def _session(
    path: Path, readable: Path, device: torch.device, packed: bool, threads: int, unfused: list[str]
) -> onnxruntime.InferenceSession:
    provider = _PROVIDERS[device.type]
    if provider not in onnxruntime.get_available_providers():
        raise EngineFailed(
            f"{path.name} is to run on {device}, but this ONNX Runtime ({onnxruntime.__version__}) offers "
            f"{onnxruntime.get_available_providers()}; run `halfeven doctor` to see what to install"
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
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
