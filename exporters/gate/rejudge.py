"""A version judged again under other limits, from the numbers it kept: no model is run.

The limits under ``[parity]`` may change; what no limit excuses (names, shapes, masks, sentinels, unequal
integers, things that one side alone found) stays as it was found.

And a half judged on perturbed samples, separately from the real ones, by the rules that hold for each sample alone.
Rules about many samples together (first choices, rankings, averages) are left out there: perturbed samples do not occur
as often as real ones do, so their shares say nothing of the model on its own data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...models.errors import BadInput
from ...models.spec.spec import ModelSpec, ParityLimits, TensorSpec
from .measured import Measured
from .noise import Noise
from .parity import judge, overrides_of, verdict_of
from .refusals import MAX_TOLERABLE_SHARE, accepting, perturbed
from .rule_verdicts import OVER_ALL, Failure
from .trial import Trial
from .verdict import AdversarialVerdict, OutputVerdict, ParityReport

_LIMIT_OF = {
    "max_error": "max_error_u",
    "sqnr": "min_sqnr_db",
    "slice_sqnr": "min_slice_sqnr_db",
    "kl": "max_kl_nats",
    "flips": "max_flips",
    "ties": "max_ties",
    "swaps": "max_swaps",
    "top10": "min_top10_overlap",
}
LIMITS = tuple(_LIMIT_OF.values())


def rejudge(saved: Mapping[str, Any], limits: ParityLimits) -> ParityReport:
    """The verdict that a fresh run would give under ``limits``.

    ``saved`` is one form's report in ``parity.json``. Raises BadInput where it keeps no statistics.
    """
    perturbed = saved.get("perturbed")
    return ParityReport(
        dtype=saved["dtype"],
        u=saved["u"],
        samples=saved["samples"],
        batch_sizes=tuple(saved["batch_sizes"]),
        outputs=tuple(_rejudged(output, limits, saved["u"]) for output in saved["outputs"]),
        adversarial=tuple(AdversarialVerdict.from_json(found) for found in saved["adversarial"]),
        dropped=tuple(saved["dropped"]),
        overrides=overrides_of(limits),
        failures=_of_no_output(saved, limits),
        perturbed=perturbed and by_sample(rejudge(perturbed, limits)),
    )


def _of_no_output(saved: Mapping[str, Any], limits: ParityLimits) -> tuple[Failure, ...]:
    """The failures of the report itself: where it has one, no output was judged. Those of the perturbed samples, which
    are saved behind them, are in their own report."""
    if saved["outputs"]:
        return ()
    others = len((saved.get("perturbed") or {"failures": ()})["failures"])
    failures = tuple(Failure(**found) for found in saved["failures"][: len(saved["failures"]) - others])
    before = saved["overrides"].get("max_flips", ParityLimits().max_flips)
    if limits.max_flips != before and any(failure.rule == "flips" for failure in failures):
        raise BadInput(
            "the stored report keeps no scores of the things that were found, so that no other max_flips can be tried "
            f"on it: set max_flips = {limits.max_flips:g} under [parity] in model.toml and convert the model again"
        )
    return failures


def _rejudged(output: Mapping[str, Any], limits: ParityLimits, u: float) -> OutputVerdict:
    if not output.get("statistics"):
        raise BadInput(
            f"the stored report keeps no statistics of output '{output['name']}' (it is of an older version): "
            "run the gate again with halfeven parity NAME@VERSION"
        )
    spec = TensorSpec(output["name"], output["datatype"], (), output["kind"])
    return verdict_of(spec, Measured.from_json(output), limits, u)


def accepting_override(output: OutputVerdict, u: float) -> dict[str, float] | None:
    """The limits to set so that this refused output passes; None where no limit would, or none should."""
    measured = Measured.from_json(output.to_json())
    rules = {failure.rule for failure in output.failures}
    if not rules or not rules <= _LIMIT_OF.keys() or not measured.error_u(u) * u <= MAX_TOLERABLE_SHARE:
        return None
    override = {_LIMIT_OF[rule]: accepting(_LIMIT_OF[rule], _came(measured, u)[rule]) for rule in rules}
    wanted = {key: value for key, value in sorted(override.items()) if value is not None}
    return wanted if len(wanted) == len(override) else None


def _came(measured: Measured, u: float) -> dict[str, float]:
    decisions, order = measured.decisions, measured.order
    return {
        "max_error": measured.error_u(u),
        "sqnr": measured.sqnr_db,
        "slice_sqnr": min((axis.worst_db for axis in measured.axes), default=math.inf),
        "kl": decisions.kl_nats if decisions else 0.0,
        "flips": decisions.flipped / max(decisions.decisions, 1)
        if decisions
        else measured.tied / max(measured.stepped, 1),
        "ties": order.tied_share if order else 0.0,
        "swaps": order.swapped_share if order else 0.0,
        "top10": 1.0 if order is None or order.top10_overlap is None else order.top10_overlap,
    }


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
