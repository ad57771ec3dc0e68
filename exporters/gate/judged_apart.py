"""The gate on perturbed samples: apart from the real ones, by the rules that hold for each sample alone.

What a perturbed sample decides, and how many of them rank as before, says nothing of a model on its own data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...models.spec import ModelSpec
from .noise import Noise
from .parity import judge
from .refusals import perturbed
from .rule_verdicts import OVER_ALL
from .trial import Trial
from .verdict import ParityReport


def judge_apart(
    spec: ModelSpec, dtype: str, trials: Sequence[Trial], noise: Mapping[str, Noise]
) -> ParityReport | None:
    """The report on perturbed samples; None where there are none, or where the names of answers are wrong: that is a
    failure of the real samples already."""
    report = judge(spec, dtype, trials, noise=noise)
    return None if report.failures else by_sample(report)


def by_sample(report: ParityReport) -> ParityReport:
    """Without the failures of rules about many samples together; the others say whose they are."""
    outputs = (
        replace(output, failures=tuple(perturbed(one) for one in output.failures if one.rule not in OVER_ALL))
        for output in report.outputs
    )
    return replace(report, outputs=tuple(outputs))
