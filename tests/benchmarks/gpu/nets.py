"""The two nets of the run, built from a seed on the machine and captured once for all phases: none is carried."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from halfeven.exporters.torch.autocast.bit_equality import half_by_rules
from halfeven.models.engines.torch_engine import TorchEngine
from torch import nn
from torch.export import ExportedProgram

from tests.benchmarks.floors import Vit
from tests.benchmarks.gpu.phase import Phase
from tests.benchmarks.workloads import SOURCE
from tests.programs import Original, described, exported

Parts = list[list[np.ndarray]]
_SMALL = {"width": 64, "heads": 4, "layers": 2, "inner": 128}
_BASE = {"width": 768, "heads": 12, "layers": 12, "inner": 3072}


@dataclass(frozen=True, slots=True)
class Net:
    """``draw(rows)`` gives new inputs. ``half`` is the half by autocast's lists for CUDA alone, before any search."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int], np.ndarray]
    original: Original
    half: ExportedProgram

    def module(self) -> nn.Module:
        """The module as it was captured, with the same weights."""
        return _seeded(self.build)

    def engine(self, device: torch.device, precision: str = "fp16") -> TorchEngine:
        program = self.original.program if precision == "fp32" else self.half
        return TorchEngine(program, precision, device, rows_apart=True, spec=self.original.spec)

    def parts(self, rows: int) -> Parts:
        """A batch of that many requests of one row."""
        return [[self.draw(1) for _ in range(rows)]]


def batches(phase: Phase) -> tuple[int, ...]:
    """The sizes of the batches, the most informative ones first."""
    return (4, 1) if phase.tiny else (32, 128, 8, 1)


def nets(phase: Phase, *names: str, layers: int | None = None) -> list[Net]:
    """BERT-base on 128 ids and ViT-B/16, or those named, each captured by the first phase that asks for it. With other
    than their own ``layers``, the phase has a scratch folder for these alone."""
    sizes = _SMALL if phase.tiny else _BASE
    sizes = sizes if layers is None else {**sizes, "layers": layers}
    made: dict[str, Any] = {}
    exec(SOURCE, made)
    draws = np.random.default_rng(0)
    ids = 16 if phase.tiny else 128
    side = 32 if phase.tiny else 224
    kinds = {
        "BERT-base": (
            lambda: made["Encoder"](**sizes),
            lambda rows: draws.integers(0, 30_000, (rows, ids), dtype=np.int64),
        ),
        "ViT-B/16": (
            lambda: Vit(**sizes),
            lambda rows: draws.standard_normal((rows, 3, side, side), dtype=np.float32),
        ),
    }
    return [_captured(phase, name, *kind) for name, kind in kinds.items() if name in (names or kinds)]


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval().requires_grad_(False)


def _captured(
    phase: Phase, name: str, build: Callable[[], nn.Module], draw: Callable[[int], np.ndarray]
) -> Net:
    inputs, most = {"x": torch.from_numpy(draw(3))}, max(batches(phase))
    stem = name.replace("/", "-")
    original = _kept(phase.scratch / f"{stem}.pt2", lambda: exported(_seeded(build), inputs, None, most))
    captured = described(original, inputs, None, most)

    def halved() -> ExportedProgram:
        half = half_by_rules(captured.program, captured.spec, captured.example, "cuda")
        phase.facts.add("half", net=name, bytes=half.bytes / half.bytes_fp32, casts=half.casts)
        return half.program

    return Net(name, build, draw, captured, _kept(phase.scratch / f"{stem}-half.pt2", halved))


def _kept(file: Path, make: Callable[[], ExportedProgram]) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what it writes by itself
        if not file.exists():
            written = file.with_name(f"new-{file.name}")
            torch.export.save(make(), written)
            written.rename(file)  # whole, or not there for the next phase
        return torch.export.load(file)
