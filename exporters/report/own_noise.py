"""Outputs whose limit was widened because the FP32 model itself gives other numbers when it is computed another way."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..gate.noise import ROOM


def widened_limits(report: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each output whose error limit comes from FP32's own noise (`gate.noise.with_room`) and not from
    the model's limits. ``report``: the parity report of one form, as JSON."""
    for output in report.get("outputs", ()):
        noise = (output.get("statistics") or {}).get("noise")
        if not noise or not isinstance(noise["error"], float):  # a word where it is not finite
            continue
        noise_u = noise["error"] / report["u"]
        if 0 < output["limit_u"] <= ROOM * noise_u * (1 + 1e-9):
            yield (
                f"output '{output['name']}': the FP32 model itself differs by {noise_u:.3g}u when it is computed in "
                f"FP64 or with other sums (its largest value is {1 / report['u']:.4g}u), so the limit is "
                f"{output['limit_u']:.4g}u: the verdict 'equal' means less for this output; look for near ties or for "
                "values at the end of FP32's range"
            )
