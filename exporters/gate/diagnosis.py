"""Range or precision: why a half errs, found by what the same rounding costs where nothing can overflow; and where it
errs most.

The floor is a report over the same questions, answered by the plan's program with the half's mantissa and
FP32's exponent (`autocast.emulation.mantissa_rounding`): no conversion of these nodes can err less. Where only the half
fails, numbers left its range; where the floor fails too, rounding itself is too much.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...models.files.json_fields import finite
from ..inputs.samples import Samples
from .refusals import section_of_precision, section_of_range
from .rejudge import accepting_override
from .rule_verdicts import Failure
from .verdict import Diagnosis, OutputVerdict, ParityReport


def diagnosed(
    report: ParityReport, floor: ParityReport | None, first: Mapping[str, str] | None = None
) -> ParityReport:
    """The report with a `Diagnosis` of every output; ``first`` is the first diverging node, where one is known.

    ``floor`` None (a form that cannot be emulated) leaves the verdict of a refused output ``unknown``.
    """
    floors = {output.name: output for output in floor.outputs} if floor else {}
    where = f"{first['node']} ({first['op']})" if first else ""
    diagnoses = tuple(
        _diagnosis(report, output, floor, floors.get(output.name), where) for output in report.outputs
    )
    return replace(report, diagnoses=diagnoses)


def _diagnosis(
    report: ParityReport,
    output: OutputVerdict,
    floor_report: ParityReport | None,
    floor: OutputVerdict | None,
    where: str,
) -> Diagnosis:
    failed = _failures(report, output.name)
    floor_u = floor.max_error_u if floor else math.nan
    odd = len(failed) > len(output.failures)  # no limit excuses what fails under an adversarial input
    override = {} if odd else accepting_override(output, report.u) or {}
    if not failed:
        verdict, message = "equal", f"output '{output.name}' is even"
    elif floor is None or floor_report is None:
        verdict, message = "unknown", f"output '{output.name}' has no floor to compare with"
    elif _failures(floor_report, output.name):
        verdict, message = "precision", section_of_precision(output, floor_u, report.dtype, override)
    else:
        verdict, message = "range", section_of_range(output, floor_u, report.dtype, where)
    distance = _distance(output.max_error_u, floor_u)
    return Diagnosis(output.name, verdict, output.max_error_u, floor_u, distance, message, override)


def _failures(report: ParityReport, output: str) -> list[Failure]:
    """The failures of one output, under real samples and adversarial inputs."""
    real = [failure for found in report.outputs if found.name == output for failure in found.failures]
    odd = [failure for found in report.adversarial if found.output == output for failure in found.failures]
    return real + odd


def _distance(error_u: float, floor_u: float) -> float:
    """The half's error as a multiple of the floor's: 1 where both are exact."""
    if error_u == floor_u == 0.0:
        return 1.0
    return error_u / floor_u if floor_u != 0.0 else math.inf


def worst_sample(
    report: ParityReport, judging: Samples, rows: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """The judged sample that came nearest to failing, or failed most: that of the worst output, with a summary of its
    inputs; empty where no error was seen.

    ``rows`` maps a judged sample to its row in the file that the samples came from.
    """
    seen = [output for output in report.outputs if output.worst_sample is not None and not output.exact]
    if not seen:
        return {}
    worst = max(seen, key=lambda output: output.max_error_u / max(output.limit_u, 1e-300))
    assert worst.worst_sample is not None
    sample = worst.worst_sample
    found: dict[str, Any] = {
        "output": worst.name,
        "sample": sample,
        "error_u": finite(worst.max_error_u),
        "inputs": [_summary(name, array[sample]) for name, array in judging.arrays.items()],
    }
    return found | ({"row": rows[sample]} if rows is not None else {})


def _summary(name: str, array: np.ndarray) -> dict[str, Any]:
    numbers = array.astype(np.float64)
    known = numbers[np.isfinite(numbers)]
    facts: dict[str, Any] = {"name": name, "shape": list(array.shape), "zeros": int((numbers == 0).sum())}
    if known.size:
        facts |= {"least": float(known.min()), "largest": float(known.max()), "mean": float(known.mean())}
    return facts | {"not_finite": int(numbers.size - known.size)}
