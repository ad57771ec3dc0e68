"""The planning samples, asked of the whole once and of every candidate half: what the search's judge sees."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from onnx import ModelProto

from ...models.spec import ModelSpec, ParityLimits
from ..parity import UNIT_ROUNDOFF, judge, min_sqnr_db
from ..samples import Samples
from ..search import Score
from ..synthetic import adversarial
from ..trial import Trial
from .graph import HALVES
from .oracle import Oracle
from .profile import LARGEST
from .rewrite import HalfGraph
from .ties import ForeignTies

Arrays = Mapping[str, np.ndarray]
Answers = Callable[[Arrays], dict[str, np.ndarray]]

ROWS = 8
PATIENCE_SECONDS = 2.0  # of the whole's: a large model plans with fewer samples
# What passed on planning samples is judged on others: the limits are tighter here, and once nodes must be kept
# tighter still (shares of the error that the gate allows, and dB above what it asks for).
ENOUGH, AIM = (0.9, 0.5), (0.8, 1.0)
HEADROOM = 2.0  # below half's largest number, for every value on real samples
LARGER = 1.5  # times real samples must not overflow either: exponentials grow faster than their inputs
SAME_IN_FP32 = 1e-4


@dataclass(frozen=True, slots=True)
class Asked:
    """One execution: its inputs, the whole's answer, and the name of an adversarial input."""

    samples: tuple[int, ...]
    inputs: Arrays
    reference: Arrays
    name: str = ""


class Trials:
    """The whole has answered when this is made; ``score`` lets a half answer."""

    def __init__(
        self,
        spec: ModelSpec,
        planning: Samples,
        whole: Answers,
        dtype: str,
        model: Callable[[], ModelProto] | None = None,
    ) -> None:
        """``model`` gives the whole, to find integers that may differ because their scores tie."""
        rows = min(spec.max_batch_size, ROWS, max(planning.count, 1)) if spec.batched else 0
        self.real: list[Asked] = []
        start = time.perf_counter()
        for samples, inputs in planning.batches(rows):
            self.real.append(Asked(samples, inputs, whole(inputs)))
            if time.perf_counter() - start > PATIENCE_SECONDS:
                break
        self.odd = [
            Asked(tuple(range(_rows(spec, inputs))), inputs, whole(inputs), name)
            for name, inputs in adversarial(spec, planning)
        ]
        self.larger = [_larger(spec, asked.inputs) for asked in self.real[:1]]
        self.larger = [inputs for inputs in self.larger if _all_finite(whole(inputs))]
        self.dtype = dtype
        self.ties = ForeignTies(model(), UNIT_ROUNDOFF[dtype], self._judging) if model else None
        self.widened: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.specs = {
            aim: replace(spec, parity=_tightened(spec.parity, dtype, *aim)) for aim in (ENOUGH, AIM)
        }

    def score(
        self, graph: HalfGraph, infinite: Collection[str] = (), aim: tuple[float, float] = AIM
    ) -> Score:
        """Run a half with true half storage and let the gate judge, under limits that leave it a margin.

        A half value that comes near overflow on real samples fails as well: others will go further. Values
        that are ``infinite`` in the whole already may be.
        """
        largest: dict[str, float] = {}

        def observe(name: str, array: np.ndarray, type_: int) -> None:
            name = graph.sources.get(name, name)
            if type_ == HALVES[self.dtype] and array.size and name not in infinite:
                size = np.nan_to_num(np.abs(array), nan=0.0, posinf=np.inf)
                largest[name] = max(largest.get(name, 0.0), float(size.max()))

        oracle = Oracle(graph.model, graph.weights, observe=observe, widened=self.widened)
        real = self._answered(self.real, oracle)
        near = {name: size for name, size in largest.items() if size > LARGEST[self.dtype] / HEADROOM}
        for inputs in self.larger:
            oracle.run(inputs)
        near |= {name: size for name, size in largest.items() if size > LARGEST[self.dtype]}
        odd = self._answered(self.odd, oracle)
        with np.errstate(all="ignore"):
            report = judge(self.specs[aim], self.dtype, real, odd)
        error = report.max_error_u if np.isfinite(report.max_error_u) else float("inf")
        if report.passed and near:
            name, size = max(near.items(), key=lambda item: item[1])
            return Score(False, error, f"'{name}' reaches {size:.3g}, too near to half's largest number")
        return Score(report.passed, error, report.summary())

    def _answered(self, asked: list[Asked], oracle: Oracle) -> list[Trial]:
        return [self._trial(one, oracle.run(one.inputs)) for one in asked]

    def _trial(self, asked: Asked, answers: Arrays) -> Trial:
        ties = self.ties.excused(asked.inputs, asked.reference, answers) if self.ties else {}
        return Trial(asked.samples, asked.reference, answers, ties, asked.name)

    def _judging(self) -> list[Arrays]:
        return [asked.inputs for asked in self.real]


def _tightened(limits: ParityLimits, dtype: str, share: float, decibels: float) -> ParityLimits:
    return replace(
        limits,
        max_error_u=limits.max_error_u * share,
        min_sqnr_db=min_sqnr_db(limits, UNIT_ROUNDOFF[dtype]) + decibels,
        min_slice_sqnr_db=limits.min_slice_sqnr_db + decibels,
    )


def _larger(spec: ModelSpec, inputs: Arrays) -> Arrays:
    floats = {
        tensor.name for tensor in spec.inputs if tensor.type.is_float and "mask" not in tensor.name.lower()
    }
    return {
        name: (array * LARGER).astype(array.dtype) if name in floats else array
        for name, array in inputs.items()
    }


def _all_finite(answers: Arrays) -> bool:
    return all(np.isfinite(array.astype(np.float64)).all() for array in answers.values())


def _rows(spec: ModelSpec, inputs: Arrays) -> int:
    return len(inputs[spec.inputs[0].name]) if spec.batched else 1


def answers_alone_differ(spec: ModelSpec, planning: Samples, whole: Answers) -> str | None:
    """Why rows must not be batched: they answer otherwise in company, or the graph takes no company."""
    if planning.count < 2:
        return None
    _, together = next(planning.batches(min(3, spec.max_batch_size)))
    alone = [whole({name: array[:1] for name, array in together.items()})]
    try:
        joint = whole(together)
    except Exception as error:
        return f"the graph does not run with more than one row ({str(error)[:200]})"
    for tensor in spec.outputs:
        one, other = alone[0][tensor.name], joint[tensor.name]
        if len(other) != len(next(iter(together.values()))):
            return f"output '{tensor.name}' gives {len(other)} rows for {len(next(iter(together.values())))}"
        if one.shape[1:] != other.shape[1:]:
            return f"output '{tensor.name}' has another shape in company"
        with np.errstate(all="ignore"):
            gap = np.abs(one[0].astype(np.float64) - other[0].astype(np.float64))
            scale = float(np.nanmax(np.abs(other.astype(np.float64)), initial=0.0)) or 1.0
        if not np.nanmax(gap, initial=0.0) <= SAME_IN_FP32 * scale:
            return f"the answer of output '{tensor.name}' depends on the other rows of its batch"
    return None
