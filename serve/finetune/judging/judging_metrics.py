"""The metrics of a version on a set of samples: accuracy, F1, AUROC, squared and absolute error.

The first metric that fits an output judges it; all that fit are shown. F1 and AUROC are means over the classes that the
targets have (macro, `redrawn.py`); AUROC needs the scores of all classes, every other one only the class that was
chosen.
"""

from collections.abc import Sequence

import numpy as np

from ....models.folder.model_keys import CLASS_METRICS, VALUE_METRICS
from ....models.spec.spec import TensorSpec

SHARES, ERRORS = CLASS_METRICS, VALUE_METRICS  # higher is better; lower is better
ACCURACY, F1, AUROC = SHARES
MSE, MAE = ERRORS
MOST_CLASSES = 100  # that are shown one by one


def classifies(tensor: TensorSpec) -> bool:
    """True if the targets of this output are classes; a target with a negative class is not graded."""
    return tensor.kind in ("logits", "probabilities")


def metrics_of(tensor: TensorSpec, chosen: Sequence[str]) -> tuple[str, ...]:
    """The chosen metrics that fit an output, the judging one first; accuracy or mse where none was chosen."""
    fitting = SHARES if classifies(tensor) else ERRORS
    return tuple(metric for metric in chosen if metric in fitting) or fitting[:1]


def computable(metrics: tuple[str, ...], targets: np.ndarray) -> tuple[str, ...]:
    """The metrics that graded targets define, accuracy where none is left: AUROC needs two classes."""
    if AUROC not in metrics or len(np.unique(targets[targets >= 0])) > 1:
        return metrics
    return tuple(metric for metric in metrics if metric != AUROC) or (ACCURACY,)


def graded(tensor: TensorSpec, targets: np.ndarray) -> np.ndarray:
    """``bool [rows]``: the rows with a target. A negative class is none, and neither is a value that is NaN."""
    rows = targets.reshape(len(targets), -1)
    return np.any(rows >= 0, 1) if classifies(tensor) else np.any(np.isfinite(rows), 1)


def row_values(metric: str, predicted: np.ndarray, targets: np.ndarray) -> np.ndarray | None:
    """``float64 [rows]``: the metric of each graded row, where the metric is their mean; None for F1 and AUROC."""
    if metric in ERRORS:
        gaps = (predicted.astype(np.float64) - targets.astype(np.float64)).reshape(len(targets), -1)
        given = ~np.isnan(targets.reshape(gaps.shape))
        return (gaps**2 if metric == MSE else np.abs(gaps)).sum(1, where=given) / given.sum(1)
    if metric != ACCURACY:
        return None
    rows = targets.reshape(len(targets), -1)
    hits = _classes(predicted, targets).reshape(rows.shape) == rows
    return (hits & (rows >= 0)).sum(1) / (rows >= 0).sum(1)


def classes_of(scores: np.ndarray) -> np.ndarray:
    """The class with the highest score; −1, which equals no target, where the scores have NaN."""
    return np.where(np.isnan(scores).any(-1), -1, scores.argmax(-1))


def log_odds(logits: np.ndarray) -> np.ndarray:
    """``float64``, of the shape of ``logits``, the classes last: log(p / (1 - p)) of each class, p its softmax.

    They have the order of p, and stay apart where p rounds to 1.
    """
    wide = logits.astype(np.float64)
    first = np.argmax(wide, -1)[..., None]
    others = wide.copy()
    np.put_along_axis(others, first, -np.inf, -1)
    with np.errstate(invalid="ignore"):  # of a row that is infinite throughout: NaN, as its softmax
        powers = np.exp(others - wide.max(-1, keepdims=True))
        rest = np.log1p(np.maximum(powers.sum(-1, keepdims=True) - powers, 0)) + wide.max(-1, keepdims=True)
        np.put_along_axis(rest, first, np.logaddexp.reduce(others, -1, keepdims=True), -1)
        return wide - rest


def decisions(
    metric: str, predicted: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The numbers that a metric of classes is computed from: the chosen classes (for AUROC the scores) and the targets
    of all graded decisions, and the row of each. A chosen class is −1 where no class was chosen."""
    there = targets >= 0
    found = predicted if metric == AUROC else _classes(predicted, targets)
    return found[there], targets[there].astype(np.int64), np.nonzero(there)[0]


def _classes(predicted: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return classes_of(predicted) if predicted.ndim > targets.ndim else predicted
