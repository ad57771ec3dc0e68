"""Outputs for which FP32 itself is no firm reference: a half was allowed more than the limit because FP32 needs it."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..gate.noise import ROOM


def widened_limits(report: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each output of a form's ``parity`` whose error limit is that of FP32's own noise (`with_room`)."""
    for output in report.get("outputs", ()):
        noise = (output.get("statistics") or {}).get("noise")
        if not noise or not isinstance(noise["error"], float):  # a word where it is not finite
            continue
        noise_u = noise["error"] / report["u"]
        if 0 < output["limit_u"] <= ROOM * noise_u * (1 + 1e-9):
            yield (
                f"output '{output['name']}': FP32 itself answers otherwise by {noise_u:.3g}u where it is evaluated "
                f"another way (the largest value is {1 / report['u']:.4g}u), so that {output['limit_u']:.4g}u were "
                "allowed: equal says less here than elsewhere; look for near ties in the model, or for values at the "
                "end of FP32's range"
            )
