"""The score of a job's version against the active one: better or equal on new rows, not much worse on the old samples.

Measured on each form as it will be served, not on the weights that came out of training: on held-out rows of the
training file (what was learnt), and on the parent's own judging samples (what was forgotten).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...exporters.inputs.samples import Samples
from ...exporters.prove import Answers
from ...exporters.subject import FurtherVerdict
from ...models.spec import ModelSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Score:
    """One output's metric on one set: ``accuracy`` (share of right classes) or ``mse`` (mean squared error)."""

    metric: str
    value: float
    rows: int

    def to_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "rows": self.rows}

    def loss_against(self, other: "Score") -> float:
        """How much worse this is: a difference of accuracies, a relative growth of the squared error."""
        if self.metric == "accuracy":
            return other.value - self.value
        return (self.value - other.value) / max(other.value, 1e-12)


Scores = Mapping[str, Score]


def scores(spec: ModelSpec, answers: Answers, samples: Samples) -> dict[str, Score]:
    """Every output that has graded targets. The answers come in batches of at most ``max_batch_size``."""
    rows = max(1, min(spec.max_batch_size, samples.count)) if spec.batched else 0
    right: dict[str, list[float]] = {name: [] for name in samples.targets}
    seen: set[int] = set()
    for indices, inputs in samples.batches(rows):
        outputs = answers(inputs)
        fresh = [place for place, index in enumerate(indices) if index not in seen]
        seen.update(indices)
        for tensor in spec.outputs:
            if tensor.name in right:
                came = outputs[tensor.name] if spec.batched else outputs[tensor.name][None]
                wanted = samples.targets[tensor.name][list(indices)]
                right[tensor.name] += _each_row(tensor, came[fresh], wanted[fresh]).tolist()
    metric = {tensor.name: "accuracy" if classifies(tensor) else "mse" for tensor in spec.outputs}
    return {
        name: Score(metric[name], float(np.mean(each)), len(each)) for name, each in right.items() if each
    }


def judge(
    forms: Mapping[str, Mapping[str, Scores]], active: Mapping[str, Scores], tolerance: float,
    against: int | None = None, not_judged: str | None = None,
) -> FurtherVerdict:  # fmt: skip
    """``forms``: form → set (``held_out``, ``judging``) → scores; ``active``: the active version's, by set.

    On held-out rows nothing may be worse than the active version; on the parent's judging samples the loss may
    not exceed ``tolerance``. For the record, and for the promotion (`concluding.py`): ``against``, the number of
    the version that was measured as active, and ``not_judged``, why these sets judge nothing.
    """
    faults = []
    for form, sets in forms.items():
        for name, allowed in (("held_out", 0.0), ("judging", tolerance)):
            for output, old in active.get(name, {}).items():
                new = sets[name][output]
                if not new.loss_against(old) <= allowed + 1e-9:
                    faults.append(_fault(form, name, output, new, old, allowed))
    numbers = {
        "active": {name: _json(found) for name, found in active.items()},
        "forms": {form: {name: _json(found) for name, found in sets.items()} for form, sets in forms.items()},
        "tolerance": tolerance,
        "against": against,
        "not_judged": not_judged,
        "passed": not faults,
    }
    return FurtherVerdict(
        not faults, "; ".join(faults) or "as good as the active version, or better", numbers
    )


def scores_from_json(found: Mapping[str, Any]) -> dict[str, Score]:
    return {name: Score(one["metric"], one["value"], one["rows"]) for name, one in found.items()}


def _json(found: Scores) -> dict[str, Any]:
    return {name: score.to_json() for name, score in found.items()}


def _fault(form: str, name: str, output: str, new: Score, old: Score, allowed: float) -> str:
    where = "held-out rows of the training file" if name == "held_out" else "the parent's own judging samples"
    much = f" (at most {allowed:g} worse is allowed)" if allowed else ""
    return (
        f"the {form} form has {new.metric} {new.value:.4g} on {new.rows} {where} for output '{output}', the active "
        f"version has {old.value:.4g}{much}: it was not made active; train longer, on more data, or with samples of "
        "the old task among the new"
    )


def classifies(tensor: TensorSpec) -> bool:
    """Whether its targets are classes; a negative one is not graded."""
    return tensor.kind in ("logits", "probabilities")


def _each_row(tensor: TensorSpec, came: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Per graded row the share of right classes, or the mean squared error."""
    if classifies(tensor):
        wanted = wanted.reshape(len(wanted), -1)
        hits, graded = came.argmax(-1).reshape(wanted.shape) == wanted, wanted >= 0
        rows = graded.any(-1)
        return (hits & graded)[rows].sum(-1) / graded[rows].sum(-1)
    gaps = (came.astype(np.float64) - wanted.astype(np.float64)) ** 2
    return gaps.reshape(len(gaps), -1).mean(-1)
