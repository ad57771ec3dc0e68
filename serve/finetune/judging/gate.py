"""The gate of a job's version: it must be better than the active version on new rows, and no worse on the old samples.

Measured on each form as it will be served, the FP32 original included, not on the weights that came out of training: on
held-out rows of the training file (what was learnt), and on judging samples (what was forgotten). Both versions answer
the same rows, and paired tests compare them (`paired.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....exporters.inputs.samples import Samples
from ....exporters.proof.prove import Answers
from ....exporters.proof.subject import FurtherVerdict
from ....models.files.json_fields import as_json
from ....models.spec.spec import ModelSpec, TensorSpec
from .judging_metrics import (
    AUROC,
    ERRORS,
    MOST_CLASSES,
    SHARES,
    classes_of,
    classifies,
    computable,
    graded,
    log_odds,
    metrics_of,
    row_values,
)
from .judging_sets import HELD_OUT, Sets
from .paired import CONFIDENCE, Comparison, compare_resampled, compare_right, cured_alone, with_cured
from .redrawn import of_draws, per_class, size_of_a_draw, value_of, work_of_a_draw

# By output, axis 0 the samples: values, classes, or scores of all classes.
Predictions = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class GateTerms:
    """The limits for a job's version. ``margin``: how much worse it may be (a share, or relative growth of an error).

    For the record and the promotion (`jobs/concluding.py`): ``against``, the number of the active version that was
    measured, and ``not_judged``, why these sets judge nothing.
    """

    margin: float
    against: int
    metrics: Sequence[str] = ()
    not_judged: str | None = None


def predictions(
    spec: ModelSpec, answers: Answers, samples: Samples, metrics: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """The predictions of a version for every output with targets, asked in batches of at most ``max_batch_size``."""
    rows = max(1, min(spec.max_batch_size, samples.count)) if spec.batched else 0
    found: dict[str, list[np.ndarray]] = {name: [] for name in samples.targets}
    for indices, inputs in samples.batches(rows):
        outputs = answers(inputs)
        fresh = samples.count - indices[0]  # the last batch is filled up from the beginning
        for tensor in spec.outputs:
            if tensor.name in found:
                came = outputs[tensor.name] if spec.batched else outputs[tensor.name][None]
                found[tensor.name].append(_predicted(tensor, came[:fresh], metrics))
    return {name: np.concatenate(parts) for name, parts in found.items() if parts}


def by_set(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Predictions of several sets that were kept in one file, as ``set:output``."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        place, _, output = name.partition(":")
        found.setdefault(place, {})[output] = array
    return found


def judge(
    spec: ModelSpec, sets: Sets, forms: Mapping[str, Mapping[str, Predictions]],
    active: Mapping[str, Predictions], terms: GateTerms,
) -> FurtherVerdict:  # fmt: skip
    """``forms``: form → set → predictions; ``active``: those of the active version, by set.

    On no set may a form be worse than ``terms.margin`` allows; on the held-out rows an output must be better, or
    nothing was learnt: then the verdict passes, and says so in ``not_learnt``.
    """
    numbers: dict[str, Any] = {"active": {}, "forms": {form: {} for form in forms}}
    faults: dict[tuple[str, str], dict[str, str]] = {}
    learnt: dict[str, list[tuple[str, Comparison]]] = {form: [] for form in forms}
    for name, samples in sets.items():
        for tensor in spec.outputs:
            pairs = _Pairs.of(tensor, samples, terms)
            if pairs is None:
                continue
            old = pairs.kept(active[name][tensor.name])
            numbers["active"].setdefault(name, {})[tensor.name] = pairs.facts(old)
            for form, found in forms.items():
                new = pairs.kept(found[name][tensor.name])
                compared = pairs.compare(old, new, len(sets[HELD_OUT].targets))
                numbers["forms"][form].setdefault(name, {})[tensor.name] = {
                    **pairs.facts(new),
                    "comparison": compared.to_json(),
                }
                worse = compared.loss > 0 or not math.isfinite(compared.loss)
                if not compared.holds and (worse or name != HELD_OUT):
                    fault = _fault(form, name, pairs, old, new, compared)
                    faults.setdefault((name, tensor.name), {})[form] = fault
                if name == HELD_OUT:
                    learnt[form].append((tensor.name, compared))
    numbers |= {
        "tolerance": terms.margin,
        "confidence": CONFIDENCE,
        "against": terms.against,
        "not_judged": terms.not_judged,
        "not_learnt": next((_not_learnt(*place) for place in learnt.items() if not _better(place[1])), None),
        "passed": not faults,
    }
    return FurtherVerdict(not faults, _sentence_of(faults), numbers)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The graded rows of one output on one set, and how two versions are compared on them."""

    tensor: TensorSpec
    rows: np.ndarray  # bool [samples]
    targets: np.ndarray  # of the graded rows
    metrics: tuple[str, ...]
    margin: float

    @classmethod
    def of(cls, tensor: TensorSpec, samples: Samples, terms: GateTerms) -> "_Pairs | None":
        targets = samples.targets.get(tensor.name)
        if targets is None or not (rows := graded(tensor, targets)).any():
            return None
        metrics = computable(metrics_of(tensor, terms.metrics), targets[rows])
        return cls(tensor, rows, targets[rows], metrics, terms.margin)

    def kept(self, predicted: np.ndarray) -> np.ndarray:
        return predicted[self.rows]

    def classes(self, predicted: np.ndarray) -> int:
        last = self.tensor.shape[-1] if self.tensor.shape else None
        if last is not None and last.fixed:
            return last.minimum
        return int(max(predicted.shape[-1] if predicted.ndim > self.targets.ndim else predicted.max() + 1,
                       self.targets.max() + 1))  # fmt: skip

    def facts(self, predicted: np.ndarray) -> dict[str, Any]:
        """The judging metric, then every chosen one; of few classes each by itself."""
        found = {metric: self.value(metric, predicted, self.targets) for metric in self.metrics}
        facts = {"metric": self.metrics[0], "value": found[self.metrics[0]], "rows": len(self.targets)}
        facts["metrics"] = found
        if classifies(self.tensor) and (classes := self.classes(predicted)) <= MOST_CLASSES:
            facts["per_class"] = {
                metric: per_class(metric, self.scores(metric, predicted), self.targets, classes)
                for metric in self.metrics
            }
        return as_json(facts)

    def compare(self, old: np.ndarray, new: np.ndarray, tests: int) -> Comparison:
        """Rows for which the old version has no finite value are gained, where the new one has one for every row; the
        others are compared."""
        lacking, lacks = (self._without_value(one) for one in (old, new))
        if not lacking.any() or lacks.any():
            return self._compared(old, new, tests)
        cured, rest = int(lacking.sum()), self._only(~lacking)
        if not len(rest.targets):
            return cured_alone(cured, self.margin, tests)
        return with_cured(rest._compared(old[~lacking], new[~lacking], tests), cured, tests)

    def _without_value(self, predicted: np.ndarray) -> np.ndarray:
        """``bool [rows]``: the rows whose error is not finite, or whose scores have no rank."""
        if (values := row_values(self.metrics[0], predicted, self.targets)) is not None:
            return ~np.isfinite(values)
        if self.metrics[0] != AUROC:
            return np.zeros(len(predicted), bool)
        return np.any(np.isnan(self.scores(AUROC, predicted).reshape(len(predicted), -1)), 1)

    def _only(self, rows: np.ndarray) -> "_Pairs":
        targets = self.targets[rows]
        return replace(self, targets=targets, metrics=computable(self.metrics, targets))

    @np.errstate(invalid="ignore")  # a loss between infinities is NaN, and refuses the new version
    def _compared(self, old: np.ndarray, new: np.ndarray, tests: int) -> Comparison:
        metric, share = self.metrics[0], self.metrics[0] in SHARES
        before, after = (row_values(metric, one, self.targets) for one in (old, new))
        if before is not None and after is not None:
            if share and np.isin([before, after], (0.0, 1.0)).all():
                return compare_right(before == 1, after == 1, self.margin, tests)

            def of_means(weights: np.ndarray) -> np.ndarray:
                return _loss(metric, *(one @ weights / len(one) for one in (before, after)))

            return compare_resampled(of_means, len(before), self.margin, share, tests, len(before))

        classes = max(self.classes(one) for one in (old, new))
        pair = [of_draws(metric, self.scores(metric, one), self.targets, classes) for one in (old, new)]

        def computed(weights: np.ndarray) -> np.ndarray:
            return _loss(metric, *(of(weights) for of in pair))

        work, size = work_of_a_draw(metric, self.targets), size_of_a_draw(self.targets, classes)
        return compare_resampled(computed, len(self.targets), self.margin, share, tests, work, size)

    def value(self, metric: str, predicted: np.ndarray, targets: np.ndarray) -> float:
        classes = self.classes(predicted) if metric in SHARES else 0
        return value_of(metric, self.scores(metric, predicted), targets, classes)

    def scores(self, metric: str, predicted: np.ndarray) -> np.ndarray:
        """The numbers that ``metric`` is computed from. AUROC compares the scores of different rows, and logits of
        different rows are not comparable: it gets their `log_odds`. The other metrics get the answers as they are."""
        return log_odds(predicted) if metric == AUROC and self.tensor.kind == "logits" else predicted


def _loss(metric: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The amount by which ``new`` is worse than ``old``: a difference of shares, or the relative growth of an error."""
    return (new - old) / np.maximum(old, 1e-12) if metric in ERRORS else old - new


def _predicted(tensor: TensorSpec, came: np.ndarray, metrics: Sequence[str]) -> np.ndarray:
    """Predictions of a batch: values, or classes where scores are not needed."""
    if not classifies(tensor) or AUROC in metrics:
        return came.astype(np.float32)
    return classes_of(came)


def _fault(
    form: str, name: str, pairs: _Pairs, old: np.ndarray, new: np.ndarray, compared: Comparison
) -> str:
    where = "held-out rows of the training file" if name == HELD_OUT else "judging samples"
    metric = pairs.metrics[0]
    before, after = (pairs.value(metric, one, pairs.targets) for one in (old, new))
    lost = f" ({compared.lost_rows} rows lost, {compared.gained_rows} gained)" if compared.lost_rows else ""
    return (
        f"the {form} form has {metric} {after:.4g} on {compared.rows} {where} for output '{pairs.tensor.name}', the "
        f"active version has {before:.4g}{lost}: at {CONFIDENCE:.0%} confidence the loss may be "
        f"{compared.at_most:.2g}, and {compared.allowed:.2g} is allowed on so many rows for a tolerance of "
        f"{pairs.margin:g}"
    )


def _sentence_of(faults: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """The faults of each set and output: the sentence of one form, the names of the others that have it."""
    if not faults:
        return "no worse than the active version"
    said = []
    for by_form in faults.values():
        (_, sentence), *others = by_form.items()
        said.append(
            sentence + (f" (so it is with: {', '.join(form for form, _ in others)})" if others else "")
        )
    advice = (
        "it was not made active; train longer, on more data, or with samples of the old task among the new"
    )
    return "; ".join([*said, advice])


def _better(found: Sequence[tuple[str, Comparison]]) -> bool:
    return any(compared.better for _, compared in found)


def _not_learnt(form: str, found: Sequence[tuple[str, Comparison]]) -> str:
    if not found:
        return "no held-out row has a target, so nothing shows what was learnt"
    output, compared = found[0]
    rows = (
        f", of which {compared.gained_rows} were gained and {compared.lost_rows} lost"
        if compared.gained_rows is not None
        else ""
    )
    return (
        f"on the {compared.rows} held-out rows{rows}, the {form} form is not better than the active version for output "
        f"'{output}' at {CONFIDENCE:.0%} confidence; train longer or at a higher learning rate, or hold more rows out "
        "(validation_split, validation_file) if the gain is too small for so few"
    )
