"""The verdict in one sentence, with what the number of judged samples allows to say, and whose samples they were."""

import math
from collections.abc import Mapping
from typing import Any

CONFIDENCE = 0.95
GENERATED = "judged on generated samples"


def headline(facts: Mapping[str, Any]) -> str:
    """The verdict. Where nothing is half nothing was proven of a half (``half`` is None)."""
    if facts["status"] != "live":
        return str(facts["status"]).capitalize()
    if facts.get("half", "") is None:
        return "FP32"
    count = judged_samples(facts)
    if not count:
        return "Equal"
    whose = "generated samples" if is_generated(facts) else "of your samples"
    return f"Equal on {count} {whose}: {may_differ(count)}"


def may_differ(count: int) -> str:
    """What ``count`` samples without a bad one allow to say of others from the same source.

    With 95 % confidence the share p of bad ones has (1 − p)ⁿ ≥ 0.05: the exact bound that "3 / n" approximates
    (Hanley and Lippman-Hand, "If nothing goes wrong, is everything all right?", JAMA 1983).
    """
    one_in = math.floor(1.0 / (1.0 - (1.0 - CONFIDENCE) ** (1.0 / count)))
    if one_in < 2:
        return "too few to say how many other inputs may differ"
    return f"fewer than 1 in {one_in} such inputs may differ"


def judged_samples(facts: Mapping[str, Any]) -> int:
    """Of the form that was judged on the fewest; 0 where none was judged."""
    reports = [form.get("parity") or {} for form in facts["forms"].values() if form.get("passed")]
    return min((report["samples"] for report in reports if report.get("samples")), default=0)


def is_generated(facts: Mapping[str, Any]) -> bool:
    """Whether a half was judged on samples that nobody gave."""
    judged = facts.get("half", "") is not None
    return judged and (facts.get("samples") or {}).get("source") == "generated"
