"""The judged sample that came nearest to failing, or failed most: where it is, and what was in it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..inputs.samples import Samples
from .rule_verdicts import finite
from .verdict import ParityReport


def worst_sample(
    report: ParityReport, judging: Samples, rows: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """The worst output's worst sample with a summary of its inputs; empty where no error was seen.

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
