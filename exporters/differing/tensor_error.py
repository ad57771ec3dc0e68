"""The measures of how far a tensor of B is from the tensor of A."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...models.spec.spec import UNIT_ROUNDOFF, ParityLimits
from ..gate.divergence import FAINT_U, LOST_DB, MIN_SLICE_PEAK, SENTINEL, Divergence
from ..gate.parity import SENTINEL_LANDS
from ..proof.informative import MOST_OF_MASKS, different
from .units import ROUNDOFF

LEAST_DB = ParityLimits().min_slice_sqnr_db
FP16 = UNIT_ROUNDOFF["fp16"]
NORMAL = 2.0**-14  # the least number that FP16 holds with all its bits
FEW = 3  # so many large numbers may be different masks


@dataclass(frozen=True, slots=True)
class LostPart:
    """Slice ``index`` along ``axis``, which B has lost. ``error`` and ``explained``: the roots of the squares' sums,
    of A's."""

    axis: int
    index: int
    error: float
    explained: float


def kind_of(array: np.ndarray) -> str:
    return "f" if array.dtype.name in ROUNDOFF else array.dtype.kind


def is_rounded(array: np.ndarray) -> bool:
    """True for floating and complex numbers; all others are exact."""
    return kind_of(array) in "fc"


def parts_of(array: np.ndarray) -> np.ndarray:
    """[1, …] in FP64, or [2, …] of complex numbers: their real and their imaginary parts."""
    parts = (np.real(array), np.imag(array)) if array.dtype.kind == "c" else (array,)
    return np.stack([part.astype(np.float64) for part in parts])


def is_alike(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and kind_of(a) == kind_of(b)


def masked(plain: np.ndarray) -> np.ndarray:
    """True for each of its `parts_of` that is so large that it can only mean a mask. Where such numbers vary they are
    none."""
    plain = parts_of(plain)
    size = np.abs(plain)
    sentinel = size >= SENTINEL
    large = plain[sentinel & np.isfinite(size)]
    # A batch has few numbers, so all masks of a small tensor are fewer than half of its numbers.
    if len(different(large)) > max(FEW, min(MOST_OF_MASKS, large.size // 2)):
        return sentinel & ~np.isfinite(size)
    return sentinel


def error_of(a: np.ndarray, b: np.ndarray, plain: np.ndarray) -> float:
    """The largest difference, of the largest magnitude of ``a``; infinite where one is not finite and the other is, and
    where shapes or kinds differ. Of integers and booleans the share that differs. What is a sentinel in ``plain``, A's
    run on its own values, must land where the gate lets it land, and NaN must be NaN."""
    if not is_alike(a, b):
        return np.inf
    if not is_rounded(a):
        return float(np.mean(a != b)) if a.size else 0.0
    sentinel = masked(plain if plain.shape == a.shape else a)
    a, b = map(parts_of, (a, b))
    if not np.all((np.sign(a[sentinel]) == np.sign(b[sentinel])) & (np.abs(b[sentinel]) >= SENTINEL_LANDS)):
        return np.inf
    a, b = a[~sentinel], b[~sentinel]
    numbers = np.isfinite(a)
    if not np.array_equal(a[~numbers], b[~numbers], equal_nan=True) or not np.isfinite(b[numbers]).all():
        return np.inf
    worst = np.abs(a[numbers] - b[numbers]).max(initial=0.0)
    scale = np.abs(a[numbers]).max(initial=0.0)
    return float(worst / scale) if scale else (np.inf if worst else 0.0)


def lost_part(
    a: np.ndarray, b: np.ndarray, nearby: np.ndarray, plain: np.ndarray, step: float, room: float
) -> LostPart | None:
    """The worst slice of floating or complex numbers that B has lost, as the gate measures slices: beside larger values
    of the tensor its error is small.

    ``nearby``: A with moved inputs. Rounding explains ``room`` times the change of the slice of the same axis that
    changes most: at a threshold another slice may change than the one that B changes.
    """
    if not is_rounded(a) or not (is_alike(a, nearby) and is_alike(a, b)):
        return None
    sentinel = masked(plain if plain.shape == a.shape else a)
    a, b, nearby = map(parts_of, (a, b, nearby))
    numbers = ~sentinel & np.isfinite(a)
    scale = float(np.abs(a[numbers]).max(initial=0.0))
    if not scale:
        return None
    theirs, itself = (_divergence(a, other, numbers, scale) for other in (b, nearby))
    found = list[LostPart]()
    for axis, (db, own) in enumerate(zip(theirs.ratios(), itself.ratios(), strict=True)):
        peak = theirs.axes[axis].peak
        judged = (peak > MIN_SLICE_PEAK) & (peak * scale >= (NORMAL if step == FP16 else 0))
        noise = own[judged].min(initial=np.inf) - 20 * np.log10(room)
        least = np.minimum(np.where(peak <= FAINT_U * step, LOST_DB, LEAST_DB), noise)
        short = np.where(judged, least - db, -np.inf)
        if short.max(initial=-np.inf) > 0:
            worst = int(short.argmax())
            found.append(LostPart(axis, worst, _share(db[worst]), _share(least[worst])))
    return max(found, key=lambda part: part.error / part.explained, default=None)


def _divergence(a: np.ndarray, b: np.ndarray, numbers: np.ndarray, scale: float) -> Divergence:
    """The slices along every axis, the samples' too, each with all its `parts_of`; of the largest magnitude, so that no
    number counts as a mask."""
    found = Divergence()
    found.add(range(len(a)), np.where(numbers, a / scale, np.nan), np.where(numbers, b / scale, 0.0))
    return found


def _share(db: float) -> float:
    return float(10 ** (-db / 20))


def is_far(a: np.ndarray, b: np.ndarray, draws: Iterable[np.ndarray]) -> bool:
    """True where an integer differs by more than 1 and is no near tie: A has it too when its inputs are moved."""
    if kind_of(a) not in "iu" or not is_alike(a, b):
        return False
    far = np.where(a > b, a - b, b - a) > 1
    for draw in draws if far.any() else ():
        far &= (draw == a) if draw.shape == a.shape else False
    return bool(far.any())
