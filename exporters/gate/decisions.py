"""Measures what an output's numbers decide: distributions, first choices and accuracy over its last axis.

Kullback and Leibler (1951), in nats, of the half's distribution from the original's. For one sample the
divergence is the mean over its positions; the worst sample counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .divergence import left_out
from .rule_verdicts import DecisionVerdict, Flip

MAX_LISTED = 512
# The smallest number of FP16. A probability below it counts as it on both sides: otherwise one class
# of 1e-9 that half cannot hold would make the divergence infinite.
FLOOR = 2.0**-24


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _log_probabilities(values: np.ndarray) -> np.ndarray:
    floored = np.where(values < FLOOR, FLOOR, values)
    return np.log(floored / floored.sum(axis=-1, keepdims=True))


def divergence_nats(reference: np.ndarray, candidate: np.ndarray, kind: str) -> np.ndarray:
    """KL(reference ‖ candidate) over the last axis, for ``logits`` or ``probabilities``."""
    distribution = _log_softmax if kind == "logits" else _log_probabilities
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        original, half = distribution(reference), distribution(candidate)
        terms = np.exp(original) * (original - half)
    return np.where(np.isneginf(original), 0.0, terms).sum(axis=-1)


@dataclass(slots=True)
class Decisions:
    """Gathers what `DecisionVerdict` tells. ``kind`` is ``logits`` or ``probabilities``."""

    kind: str
    decisions: int = 0
    nats: dict[int, float] = field(default_factory=dict)
    flips: list[Flip] = field(default_factory=list)
    flipped: int = 0
    graded: int = 0
    right_original: int = 0
    right_half: int = 0

    def add(
        self,
        samples: Sequence[int],
        reference: np.ndarray,
        candidate: np.ndarray,
        targets: np.ndarray | None = None,
    ) -> None:
        """Take in FP64 arrays [rows, …, classes] and targets [rows, …] (a negative target is not graded)."""
        masked = left_out(reference)  # a mask of −3.4e38 is a class of no probability; any other is no number
        original = np.where(masked, -np.inf, reference)
        half = np.where(masked, -np.inf, candidate)
        usable = np.asarray(~(masked & ~(reference < 0)).any(axis=-1) & ~masked.all(axis=-1))
        self._add_divergence(samples, original, half, usable)
        first, choice = original.argmax(axis=-1), half.argmax(axis=-1)
        self._add_flips(samples, original, first, choice, usable)
        if targets is not None:
            self._grade(first, choice, targets, usable & (targets >= 0))

    def _add_divergence(
        self, samples: Sequence[int], original: np.ndarray, half: np.ndarray, usable: np.ndarray
    ) -> None:
        together = divergence_nats(original, half, self.kind) if usable.all() else None
        for row, sample in enumerate(samples):
            if usable[row].any():
                chosen = usable[row]
                nats = (
                    divergence_nats(original[row][chosen], half[row][chosen], self.kind)
                    if together is None
                    else together[row]
                ).mean()
                self.nats[sample] = float(np.maximum(self.nats.get(sample, 0.0), nats))  # NaN stays NaN

    def _add_flips(
        self,
        samples: Sequence[int],
        original: np.ndarray,
        first: np.ndarray,
        choice: np.ndarray,
        usable: np.ndarray,
    ) -> None:
        self.decisions += int(usable.sum())
        best = np.take_along_axis(original, first[..., None], axis=-1)[..., 0]
        chosen = np.take_along_axis(original, choice[..., None], axis=-1)[..., 0]
        # Two classes that the original itself holds equal are both right.
        changed = usable & ~(chosen >= best)
        self.flipped += int(changed.sum())
        for place in map(tuple, np.argwhere(changed)[: MAX_LISTED - len(self.flips)].tolist()):
            margin = float(best[place] - chosen[place])
            self.flips.append(
                Flip(samples[place[0]], place[1:], int(first[place]), int(choice[place]), margin)
            )

    def _grade(self, first: np.ndarray, choice: np.ndarray, targets: np.ndarray, graded: np.ndarray) -> None:
        self.graded += int(graded.sum())
        self.right_original += int((graded & (first == targets)).sum())
        self.right_half += int((graded & (choice == targets)).sum())

    def verdict(self) -> DecisionVerdict:
        """The measured numbers as a verdict without limits, which `parity.py` puts in."""
        worst = max(self.nats, key=lambda sample: np.nan_to_num(self.nats[sample], nan=np.inf), default=None)
        return DecisionVerdict(
            decisions=self.decisions,
            kl_nats=0.0 if worst is None else self.nats[worst],
            kl_limit=math.inf,
            kl_sample=worst,
            flipped=self.flipped,
            max_flips=math.inf,
            flips=tuple(self.flips),
            graded=self.graded,
            accuracy_original=self.right_original / self.graded if self.graded else None,
            accuracy_half=self.right_half / self.graded if self.graded else None,
        )
