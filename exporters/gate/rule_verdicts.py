"""The results of single rules of the parity gate for one output, as data: faults, slices, decisions, order."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...models.files.json_fields import JsonFields

# The rules about many samples together, `ORDER_RULES` among them: a few samples are too few to break them.
ORDER_RULES = frozenset({"ties", "swaps", "top10"})
OVER_ALL = frozenset({"sqnr", "slice_sqnr", "kl", "flips", "accuracy"}) | ORDER_RULES


@dataclass(frozen=True, slots=True)
class Failure(JsonFields):
    """One rule that did not hold. ``rule`` is stable for machines, ``message`` is for people."""

    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class AxisSlices(JsonFields):
    """Signal to noise of the slices along one axis, the worst of each of at most 256 stretches in ``db``.

    ``axis`` counts the batch as 0. Slices too small to be looked at are NaN in ``db``, exact ones +inf. ``reported``
    ones are in ``db`` and not judged: FP32 itself does not tell them apart, or they are smaller than the error that
    every element may have, and are not lost.
    """

    axis: int
    length: int
    judged: int
    worst_index: int | None
    worst_db: float
    db: tuple[float, ...]
    reported: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any], worst_db: float) -> "AxisSlices":
        """``worst_db`` as it was: JSON has one null for an exact slice and for one without signal."""
        db = tuple(math.nan if value is None else value for value in data["db"])
        return cls(**{**data, "worst_db": worst_db, "db": db})


@dataclass(frozen=True, slots=True)
class Flip(JsonFields):
    """One decision where the half's first choice is not the original's.

    ``position`` is the place inside the sample (empty where a sample is one decision); ``margin`` is how
    far the original put its own choice above the half's, in the output's own units.
    """

    sample: int
    position: tuple[int, ...]
    original: int
    half: int
    margin: float


@dataclass(frozen=True, slots=True)
class DecisionVerdict(JsonFields):
    """Rule 4. KL in nats, of the worst sample; accuracies are shares of ``graded`` decisions, None without
    targets; ``flipped`` counts them all, ``flips`` lists the first 512.
    """

    decisions: int
    kl_nats: float
    kl_limit: float
    kl_sample: int | None
    flipped: int
    max_flips: float
    flips: tuple[Flip, ...]
    graded: int = 0
    accuracy_original: float | None = None
    accuracy_half: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any], kl_nats: float) -> "DecisionVerdict":
        flips = tuple(Flip(**{**flip, "position": tuple(flip["position"])}) for flip in data["flips"])
        return cls(**{**data, "kl_nats": kl_nats, "flips": flips})


@dataclass(frozen=True, slots=True)
class OrderVerdict(JsonFields):
    """Rule 5, over ``lists`` rankings of ``rows`` samples together.

    ``pairs``: distinct in FP32, beyond its own noise; ``tied`` of them are equal in the half. ``apart``: pairs further
    apart than the allowed error; ``swapped`` of them have changed places. ``swap_u``: the largest distance of any two
    that changed places, in u of the spread. ``top10_overlap``: of the ranking that kept the fewest of its ten best,
    None where there are no more than ten rows.
    """

    rows: int = 0
    lists: int = 0
    pairs: int = 0
    tied: int = 0
    apart: int = 0
    swapped: int = 0
    swap_u: float = 0.0
    top10_overlap: float | None = None
    max_ties: float = math.inf
    max_swaps: float = math.inf
    min_top10_overlap: float = 0.0

    @property
    def tied_share(self) -> float:
        return self.tied / max(self.pairs, 1)

    @property
    def swapped_share(self) -> float:
        return self.swapped / max(self.apart, 1)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> "OrderVerdict | None":
        """None for an output of a kind without order."""
        return None if data is None else cls(**data)
