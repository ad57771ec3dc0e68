"""The measurements of one output, before any limit is applied: the output can be judged again without a run.

`parity.py` measures and judges; a version keeps the numbers in ``parity.json`` (``statistics`` of each
output), from which `rejudge.py` gives the verdict under other limits without running a model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .rule_verdicts import AxisSlices, DecisionVerdict, Failure, OrderVerdict

MAX_SAMPLES = 2048  # kept one by one; beyond that the worst of each stretch


@dataclass(frozen=True, slots=True)
class Measured:
    """One output over all real judged samples; errors are absolute, ``scale`` is S.

    ``faults`` are of rules 0, 1 and 2: no limit excuses them, and rules 3 to 5 are not asked any more.
    ``samples`` counts different samples, ``tied`` the integers that tie, of ``stepped`` elements that
    come from a step (0: they do not). ``decisions`` and ``order`` hold no
    limits yet. ``noise``: FP32's own (`noise.Noise.numbers`), where it was measured.
    """

    samples: int
    faults: tuple[Failure, ...] = ()
    worst: float = math.inf
    worst_sample: int | None = None
    scale: float = 0.0
    sqnr_db: float = -math.inf
    errors: tuple[float, ...] = ()
    axes: tuple[AxisSlices, ...] = ()
    decisions: DecisionVerdict | None = None
    order: OrderVerdict | None = None
    different: int = 0
    tied: int = 0
    stepped: int = 0
    noise: Mapping[str, float] | None = None

    def error_u(self, u: float) -> float:
        return in_units(self.worst, u, self.scale)

    def to_json(self) -> dict[str, Any]:
        """Exact: what is not finite is written as a word, and the axes, decisions and order stand beside this."""
        return {
            "samples": self.samples,
            "worst": _written(self.worst),
            "scale": _written(self.scale),
            "sqnr_db": _written(self.sqnr_db),
            "errors": [_written(error) for error in self.errors],
            "slices_db": [_written(axis.worst_db) for axis in self.axes],
            "kl_nats": self.decisions and _written(self.decisions.kl_nats),
            "tied": self.tied,
            "stepped": self.stepped,
            "noise": self.noise and {key: _written(value) for key, value in self.noise.items()},
            "faults": [{"rule": fault.rule, "message": fault.message} for fault in self.faults],
        }

    @classmethod
    def from_json(cls, output: Mapping[str, Any]) -> "Measured":
        """Read back from an output of ``parity.json``, ``statistics`` and what stands beside them."""
        saved = output["statistics"]
        worst_db = [_read(value) for value in saved["slices_db"]]
        return cls(
            samples=saved["samples"],
            faults=tuple(Failure(**fault) for fault in saved["faults"]),
            worst=_read(saved["worst"]),
            worst_sample=output["worst_sample"],
            scale=_read(saved["scale"]),
            sqnr_db=_read(saved["sqnr_db"]),
            errors=tuple(_read(error) for error in saved["errors"]),
            axes=tuple(
                AxisSlices.from_json(axis, db) for axis, db in zip(output["axes"], worst_db, strict=True)
            ),
            decisions=output["decisions"]
            and DecisionVerdict.from_json(output["decisions"], _read(saved["kl_nats"])),
            order=OrderVerdict.from_json(output["order"]),
            different=output["different"],
            tied=saved["tied"],
            stepped=saved["stepped"],
            noise=(found := saved["noise"]) and {key: _read(value) for key, value in found.items()},
        )


def in_units(error: float, u: float, scale: float) -> float:
    """An absolute error in units of u·S; any error at all is infinite where S is zero."""
    if error == 0.0:
        return 0.0
    return error / (u * scale) if scale > 0.0 else math.inf


def thinned(values: np.ndarray, most: int) -> tuple[float, ...]:
    """The values in the given order, at most ``most`` of them, each the largest of its stretch."""
    stretches = np.array_split(values, min(len(values), most)) if len(values) else []
    return tuple(float(stretch.max()) for stretch in stretches)


def _written(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _read(value: float | str) -> float:
    return float(value)
