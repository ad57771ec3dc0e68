"""Inputs in a smaller wire datatype are converted to the model's on the device that runs it
(`models/spec/datatypes.py`).

UINT8 pixels are four times less to copy to a device than FP32 numbers. An engine with this conversion takes inputs of
either datatype: samples have the model's, requests the wire's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from ..pictures.pixels import Picture
from ..spec.spec import ModelSpec, TensorSpec
from .engine import Engine
from .staged_engine import is_brief, joined
from .torch_engine import TorchEngine


def widened(engine: Engine, spec: ModelSpec) -> Engine:
    """The engine, taking the wire datatypes of ``spec`` (the version's own, not its ``on_the_wire()``) as well.

    The device that computes converts; the host does so for ONNX Runtime on a CPU.
    """
    changes = [None if t.wire is None else Widening.of(t, spec.batched) for t in spec.inputs]
    if not any(changes):
        return engine
    if isinstance(engine, TorchEngine) or engine.device != "cpu":
        cast(_ChangesInputs, engine).change_inputs(_on_device(changes))
        return engine
    return _OnHost(engine, changes)


class _ChangesInputs(Protocol):
    """Every engine on a device other than a CPU."""

    def change_inputs(self, change: Callable[..., Sequence[torch.Tensor]]) -> None: ...


def as_sent(spec: ModelSpec, parts: Sequence[Sequence[np.ndarray]]) -> list[Sequence[np.ndarray]] | None:
    """A batch of the model's datatypes in those of the wire, to warm up with: its values are cut to their range.

    None where requests have the model's datatypes.
    """
    if all(tensor.wire is None for tensor in spec.inputs):
        return None
    return [
        part if tensor.wire is None else [_cut(array, tensor.wire.type.numpy) for array in part]
        for part, tensor in zip(parts, spec.inputs, strict=True)
    ]


def _cut(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        array = np.clip(np.nan_to_num(array), limits.min, limits.max)
    with np.errstate(over="ignore"):  # a sentinel may be infinite there
        return array.astype(dtype)


@dataclass(frozen=True, slots=True)
class Widening:
    """One input's way from the wire to the model: ``value · scale + offset``, None where it is only widened.

    ``scale`` and ``offset`` are FP32 (FP64 for an FP64 model) and broadcast over a row; each of the two steps
    rounds, and the result is rounded once more to the model's datatype.
    """

    tensor: TensorSpec
    scale: np.ndarray | None
    offset: np.ndarray | None

    @classmethod
    def of(cls, tensor: TensorSpec, batched: bool) -> "Widening":
        assert tensor.wire is not None
        scale, offset = np.array(tensor.wire.scale), np.array(tensor.wire.offset)
        if tensor.picture is not None:
            scale, offset = Picture.of(tensor, batched).slope()
        if not tensor.type.is_float or ((scale == 1.0).all() and not offset.any()):
            return cls(tensor, None, None)
        fine = np.float64 if tensor.datatype == "FP64" else np.float32
        return cls(tensor, scale.astype(fine), offset.astype(fine))

    def numpy(self, array: np.ndarray) -> np.ndarray:
        """The model's numbers; an array that has its datatype already comes back as it is."""
        if array.dtype == self.tensor.type.numpy:
            return array
        if self.scale is None or self.offset is None:
            return array.astype(self.tensor.type.numpy)
        return (array.astype(self.scale.dtype) * self.scale + self.offset).astype(self.tensor.type.numpy)

    def torch(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that gives the same numbers as `numpy`, bit for bit, on the device of the tensor."""
        dtype = self.tensor.type.torch
        if self.scale is None or self.offset is None:
            return lambda tensor: tensor.to(dtype)
        held: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        scale, offset = torch.from_numpy(self.scale), torch.from_numpy(self.offset)

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype == dtype:
                return tensor
            if tensor.device not in held:
                held[tensor.device] = (scale.to(tensor.device), offset.to(tensor.device))
            factor, summand = held[tensor.device]
            return tensor.to(scale.dtype).mul_(factor).add_(summand).to(dtype)

        return widen


def _on_device(changes: Sequence[Widening | None]) -> Callable[..., list[torch.Tensor]]:
    steps = [None if change is None else change.torch() for change in changes]

    def change_all(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [t if step is None else step(t) for t, step in zip(inputs, steps, strict=True)]

    return change_all


class _OnHost(Engine):
    """An engine in front of another one."""

    def __init__(self, engine: Engine, changes: Sequence[Widening | None]) -> None:
        self.form, self.precision, self.device = engine.form, engine.precision, engine.device
        self.provider, self.setup, self.possible = engine.provider, engine.setup, engine.possible
        self._engine, self._changes = engine, changes

    def warm_up(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """Warm up the engine behind, and where that is brief, find out whether it still is with the conversion."""
        self._engine.warm_up(self._wide(parts))
        self.brief = self._engine.brief and is_brief(lambda: self.run(parts))

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        began_ns = time.monotonic_ns()
        wide = self._wide(parts)
        widened_ns = time.monotonic_ns() - began_ns
        answers = self._engine.run(wide)
        self.assemble_ns = widened_ns + self._engine.assemble_ns
        return answers

    def close(self) -> None:
        self._engine.close()

    def _wide(self, parts: Sequence[Sequence[np.ndarray]]) -> list[Sequence[np.ndarray]]:
        return [
            part if change is None else [change.numpy(joined(part))]
            for part, change in zip(parts, self._changes, strict=True)
        ]
