"""Judges a half on perturbed samples, separately from the real samples, by the rules that hold for each sample alone.

Rules about many samples together (first choices, rankings, averages) are left out: perturbed samples do not occur as
often as real ones do, so their shares say nothing of the model on its own data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...models.spec.spec import ModelSpec
from .noise import Noise
from .parity import judge
from .refusals import perturbed
from .rule_verdicts import OVER_ALL
from .trial import Trial
from .verdict import ParityReport


def judge_apart(
    spec: ModelSpec, dtype: str, trials: Sequence[Trial], noise: Mapping[str, Noise]
) -> ParityReport | None:
    """The parity report on perturbed samples. None where there are no trials, or where the half gives outputs of other
    names: the report on the real samples says that already."""
    report = judge(spec, dtype, trials, noise=noise)
    said = any(failure.rule in ("samples", "names") for failure in report.failures)
    # These words are not given in `by_sample`, which a stored report goes through again: its failures have them
    # already.
    return None if said else by_sample(replace(report, failures=tuple(map(perturbed, report.failures))))


def by_sample(report: ParityReport) -> ParityReport:
    """The report without the failures of rules about many samples together; the other messages name a perturbed
    sample."""
    outputs = (
        replace(output, failures=tuple(perturbed(one) for one in output.failures if one.rule not in OVER_ALL))
        for output in report.outputs
    )
    return replace(report, outputs=tuple(outputs))
