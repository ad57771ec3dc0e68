"""The findings of the parity gate, as data: nothing here compares, runs or logs.

A report is stored with its version as ``parity.json``, drawn by `report/page.py`, and printed in one line by
``summary()``. In JSON a number that is not finite is null; ``exact`` says that there was no error at all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...models.files.json_fields import JsonFields, as_json, finite
from .rule_verdicts import AxisSlices, DecisionVerdict, Failure, OrderVerdict

_OF_AN_OUTPUT = (
    "name", "kind", "datatype", "passed", "exact", "max_error_u", "limit_u", "sqnr_db", "min_sqnr_db",
    "min_slice_sqnr_db", "scale", "worst_sample", "worst_slice", "different", "tied", "per_sample_error_u", "axes",
    "decisions", "order", "failures", "statistics",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputVerdict(JsonFields):
    """One output over all real judged samples.

    ``scale`` is S, the largest magnitude of the reference; errors are in units of u·S. An output of
    integers or booleans has no scale: ``different`` counts its unequal elements, ``tied`` those whose
    scores tie. ``per_sample_error_u``: at most 512 numbers, each the worst of its stretch of samples.
    ``statistics``: what `rejudge.py` needs, as JSON.
    """

    name: str
    kind: str
    datatype: str
    limit_u: float
    min_sqnr_db: float
    min_slice_sqnr_db: float
    max_error_u: float = math.inf
    sqnr_db: float = -math.inf
    scale: float = 0.0
    worst_sample: int | None = None
    different: int = 0
    per_sample_error_u: tuple[float, ...] = ()
    axes: tuple[AxisSlices, ...] = ()
    decisions: DecisionVerdict | None = None
    order: OrderVerdict | None = None
    failures: tuple[Failure, ...] = ()
    tied: int = 0
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def exact(self) -> bool:
        return self.max_error_u == 0.0

    @property
    def worst_slice(self) -> AxisSlices | None:
        """The axis that holds the worst slice, or None where no slice was judged."""
        return min((axis for axis in self.axes if axis.judged), key=lambda axis: axis.worst_db, default=None)

    def to_json(self) -> dict[str, Any]:
        worst = self.worst_slice
        found: dict[str, Any] = {key: getattr(self, key) for key in _OF_AN_OUTPUT}
        found["worst_slice"] = worst and {
            "axis": worst.axis,
            "index": worst.worst_index,
            "db": worst.worst_db,
        }
        return as_json(found)


@dataclass(frozen=True, slots=True)
class AdversarialVerdict(JsonFields):
    """One output under one adversarial input: its failures decide, its numbers are only shown.

    The error is in units of u times the largest magnitude of this very answer.
    """

    input: str
    output: str
    max_error_u: float
    sqnr_db: float
    different: int = 0
    failures: tuple[Failure, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return JsonFields.to_json(self) | {"passed": not self.failures, "exact": self.max_error_u == 0.0}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "AdversarialVerdict":
        """The verdict read back; a number that is null in ``data`` was infinite, and is infinite again."""
        error, noise = data["max_error_u"], data["sqnr_db"]
        return cls(
            input=data["input"],
            output=data["output"],
            max_error_u=math.inf if error is None else error,
            sqnr_db=(math.inf if data["exact"] else -math.inf) if noise is None else noise,
            different=data["different"],
            failures=tuple(Failure(**failure) for failure in data["failures"]),
        )


@dataclass(frozen=True, slots=True)
class Diagnosis(JsonFields):
    """The cause of one output's error, found beside a half of unlimited range (11 bits of mantissa, FP32 exponent).

    ``verdict``: ``equal`` (the half passes), ``range`` (only the half fails: overflow or underflow, cured by
    FP32 nodes), ``precision`` (the floor fails too: rounding alone is too much), ``unknown`` (nothing to
    compare). ``floor_u`` is the error that no conversion of these nodes can beat, ``distance`` the half's
    error over it. ``override``: the limits that would accept the half; empty where none should.
    """

    output: str
    verdict: str
    error_u: float
    floor_u: float
    distance: float
    message: str
    override: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The gate's answer for one form. ``dropped`` names adversarial inputs without a finite reference.

    ``diagnoses``, one for each output, are there once `diagnosis.py` has compared the half with its floor.
    ``perturbed``: what was found on inputs that were made of few samples (`proof.prove.augmented`), judged apart by the
    rules that hold for each of them alone.
    """

    dtype: str
    u: float
    samples: int
    batch_sizes: tuple[int, ...]
    outputs: tuple[OutputVerdict, ...]
    adversarial: tuple[AdversarialVerdict, ...] = ()
    dropped: tuple[str, ...] = ()
    overrides: Mapping[str, float | str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()
    perturbed: "ParityReport | None" = None

    @property
    def all_failures(self) -> tuple[Failure, ...]:
        """Every failure: the report's own, then those of real samples, perturbed ones, adversarial ones."""
        real, odd = (
            (one for v in verdicts for one in v.failures) for verdicts in (self.outputs, self.adversarial)
        )
        perturbed = self.perturbed.all_failures if self.perturbed else ()
        return (*self.failures, *real, *perturbed, *odd)

    @property
    def passed(self) -> bool:
        return not self.all_failures

    @property
    def max_error_u(self) -> float:
        return max((output.max_error_u for output in self.outputs), default=math.inf)

    @property
    def sqnr_db(self) -> float:
        return min((output.sqnr_db for output in self.outputs), default=-math.inf)

    @property
    def rule_of_three(self) -> float | None:
        """The true share of bad samples is below 3/n at 95 % confidence, where n samples are clean."""
        return min(3.0 / self.samples, 1.0) if self.samples else None

    def summary(self) -> str:
        """One line for a terminal or a log."""
        if not self.passed:
            first, *others = self.all_failures
            more = f" (and {len(others)} more)" if others else ""
            diagnoses = [found for found in self.diagnoses if found.verdict in ("range", "precision")]
            why = f". Verdict {diagnoses[0].verdict}: {diagnoses[0].message}" if diagnoses else ""
            return f"refused: {first.message}{more}{why}"
        worst = max(self.outputs, key=lambda output: output.max_error_u)
        error = "no error" if worst.exact else f"{worst.max_error_u:.2f}u of {worst.limit_u:g}u"
        if tied := sum(output.tied for output in self.outputs):
            error += f" but for {tied} near tie{'s' * (tied > 1)}"
        noise = f", {self.sqnr_db:.1f} dB" if math.isfinite(self.sqnr_db) else ""
        sizes = ", ".join(map(str, self.batch_sizes))
        more = f" and {self.perturbed.samples} perturbed ones" if self.perturbed else ""
        return (
            f"passed: {error}{noise} in {self.dtype} over {self.samples} samples{more} at batch sizes {sizes}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "summary": self.summary(),
            "dtype": self.dtype,
            "u": self.u,
            "exact": self.max_error_u == 0.0,
            "max_error_u": finite(self.max_error_u),
            "sqnr_db": finite(self.sqnr_db),
            "samples": self.samples,
            "rule_of_three": self.rule_of_three,
            "batch_sizes": list(self.batch_sizes),
            "overrides": dict(self.overrides),
            "outputs": as_json(self.outputs),
            "adversarial": as_json(self.adversarial),
            "dropped": list(self.dropped),
            "failures": as_json(self.all_failures),
            "diagnoses": as_json(self.diagnoses),
            "perturbed": self.perturbed and self.perturbed.to_json(),
        }
