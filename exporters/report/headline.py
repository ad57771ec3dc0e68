"""The verdict in one sentence, with what the number of judged samples allows to say, and whose samples they were."""

import math
from collections.abc import Mapping
from typing import Any

CONFIDENCE = 0.95
PASSED = ("live", "equal")  # a version, another engine
NOT_SHOWN = "Not shown: these samples cannot tell, so FP32 serves"
GENERATED = "judged on generated samples"
FEW = "judged on few samples: 64 (every second one judges) need no perturbed ones; give more with --samples FILE"


def headline(facts: Mapping[str, Any]) -> str:
    """The verdict. Where nothing is half nothing was proven of a half (``half`` is None)."""
    power = facts.get("power") or {}
    if facts["status"] not in PASSED:
        return str(facts["status"]).capitalize()
    if facts.get("half", "") is None:
        return "FP32" if power.get("shown", True) else NOT_SHOWN
    count = judged_samples(facts)
    if not count:
        return f"Equal{not_run(facts)}"
    whose = "generated samples" if is_generated(facts) else "of your samples"
    more = f" and {perturbed} perturbed ones" if (perturbed := perturbed_samples(facts)) else ""
    return f"Equal on {count} {whose}{more}: {may_differ(count)}{_power(power)}{not_run(facts)}"


def not_run(facts: Mapping[str, Any]) -> str:
    """The part of the headline about custom nodes (`half_files/around_custom.py`); empty where there are none."""
    around = facts.get("around")
    if not around:
        return ""
    given = f", given what they answered ({', '.join(around['recorded'])})" if around["recorded"] else ""
    return f"; proven is all but {', '.join(around['nodes'])}{given}: ONNX Runtime does not know these nodes"


def _power(power: Mapping[str, Any]) -> str:
    """The part of the headline about planted errors (`proof/power.py`); empty where none were planted."""
    if not power:
        return ""
    share, damped = power.get("share", power["noticed"]["8u"]), power.get("damped")
    if damped and share > power["noticed"]["8u"] == 0:
        return f"; all {damped} planted errors are damped below the limit, so they show none"
    others = {"near the limit": power.get("near"), "damped below it": damped}
    more = "; ".join(f"{where}: {count}" for where, count in others.items() if count)
    fp32 = ", ".join(f"'{output}'" for output in power.get("not_shown", ()))
    return (
        f"; of planted errors they show {share:.0%} and hide {power['hidden']:.0%}{more and f' ({more})'}"
        f"{fp32 and f'; {fp32} stays in FP32, for they cannot tell'}"
    )


def may_differ(count: int) -> str:
    """The statement that ``count`` samples without a bad one allow about others from the same source."""
    if one_in(count) < 2:
        return "too few to say how many other inputs may differ"
    return f"fewer than 1 in {one_in(count)} such inputs may differ"


def one_in(count: int) -> int:
    """The n of "fewer than 1 in n", by ``count`` samples without a bad one; 1 says nothing.

    With 95 % confidence the share p of bad ones has (1 − p)ⁿ ≥ 0.05: the exact bound that "3 / n" approximates
    (Hanley and Lippman-Hand, "If nothing goes wrong, is everything all right?", JAMA 1983).
    """
    return math.floor(1.0 / (1.0 - (1.0 - CONFIDENCE) ** (1.0 / count)))


def judged_samples(facts: Mapping[str, Any]) -> int:
    """The number of judged samples of the form that was judged on the fewest; 0 where none was judged."""
    reports = [form.get("parity") or {} for form in facts["forms"].values() if form.get("passed")]
    return min((report["samples"] for report in reports if report.get("samples")), default=0)


def perturbed_samples(facts: Mapping[str, Any]) -> int:
    """The number of perturbed samples that were judged apart, of the form that was judged on the fewest."""
    reports = [form.get("parity") or {} for form in facts["forms"].values() if form.get("passed")]
    return min(((report.get("perturbed") or {}).get("samples", 0) for report in reports), default=0)


def is_generated(facts: Mapping[str, Any]) -> bool:
    """True if a half was judged on samples that nobody gave."""
    judged = facts.get("half", "") is not None
    return judged and (facts.get("samples") or {}).get("source") == "generated"
