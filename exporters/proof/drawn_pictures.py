"""Generated samples of inputs that are pictures although nothing says so: pixels 0 to 1 or 0 to 255, by what the
answers of the model show more of.

A network that was trained on pixels answers normal noise as it never answers a picture: all its units are on, or none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...models.spec.said_by_name import is_mask
from ...models.spec.spec import ModelSpec, TensorSpec
from ..gate.power import FINE
from ..graph.original_graph import OriginalGraph
from ..inputs.samples import Samples
from ..policy.classes import class_of
from ..question import Invented, Question
from .planted_faults import measured_power
from .prove import ReferenceRun
from .subject import Subject

BRIGHTEST = (1.0, 255.0)
CHANNELS = (1, 3)
SMALLEST = 16  # pixels of a side
BLOCK = 4  # pixels of a side that have nearly the same brightness
ASKED = 4  # samples
CLEARLY, TIMES = 0.2, 4.0  # more of the planted faults noticed, or answers so many times as different


def with_pixels(subject: Subject, original: OriginalGraph | None, row_operations: int) -> Subject:
    """The subject with pixels in its generated pictures, and a note that says which; itself where it has none."""
    spec, samples = subject.spec, subject.samples
    if samples.source != "generated" or original is None:
        return subject
    convolves = any("convolution" in class_of(node.op).name for node in original.nodes())
    pictures = (
        [t for t in spec.inputs if _is_picture(t, samples.arrays[t.name].shape[1:])] if convolves else []
    )
    if not pictures:
        return subject
    chosen, best = 0.0, (-CLEARLY, 0.0)
    for brightest in BRIGHTEST:
        drawn = _drawn(samples, pictures, brightest)
        found = _shown(spec, drawn, original, row_operations, subject.precision.dtype)
        if found and _shows_more(found, best):
            chosen, best = brightest, found
    if not chosen:
        return subject
    names = ", ".join(f"'{tensor.name}'" for tensor in pictures)
    note = f"generated pictures ({names}) have pixels from 0 to {chosen:g}"
    return replace(subject, samples=_drawn(samples, pictures, chosen), notes=(*subject.notes, note))


def _shows_more(found: tuple[float, float], best: tuple[float, float]) -> bool:
    """True if these pictures show more, by what `_shown` gives. Where all answers are alike, the share of noticed
    faults is by chance."""
    (noticed, variation), (most, widest) = found, best
    if noticed >= most + CLEARLY:
        return TIMES * variation >= widest
    return noticed > most - CLEARLY and variation > TIMES * widest


def _is_picture(tensor: TensorSpec, row: Sequence[int]) -> bool:
    """An axis of colours, first or last, and two sides. ``row``: the shape of one sample."""
    if tensor.picture is not None or not tensor.type.is_float or is_mask(tensor) or len(row) != 3:
        return False
    return any(
        channels in CHANNELS and min(sides) >= SMALLEST
        for channels, sides in ((row[0], row[1:]), (row[2], row[:2]))
    )


def _drawn(samples: Samples, pictures: Sequence[TensorSpec], brightest: float) -> Samples:
    random = np.random.default_rng(0)
    found = {
        tensor.name: (brightest * _pixels(samples.arrays[tensor.name].shape, random)).astype(
            tensor.type.numpy
        )
        for tensor in pictures
    }
    return replace(samples, arrays={**samples.arrays, **found})


def _pixels(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Blocks of one brightness and colour with a little noise, from 0 to 1: pixels side by side are alike."""
    sides = [size if axis == 0 or size in CHANNELS else -(-size // BLOCK) for axis, size in enumerate(shape)]
    blocks = random.random(sides)
    for axis, size in enumerate(shape):
        if axis and size not in CHANNELS:
            blocks = np.take(blocks, np.arange(size) // BLOCK, axis=axis)
    return np.rint(255 * (0.8 * blocks + 0.2 * random.random(shape))) / 255


def _shown(
    spec: ModelSpec, samples: Samples, original: OriginalGraph, row_operations: int, dtype: str
) -> tuple[float, float] | None:
    """The share of the planted faults that these samples show, 0 where they cannot tell, and how much the answers
    differ from sample to sample, as a share of the largest; None where the model does not run with them."""
    some = samples.take(slice(0, ASKED))
    asked = Invented(lambda inputs: dict(original.watched(inputs, lambda name, result, rest: None)))
    batches = some.batches(min(spec.max_batch_size, some.count) if spec.batched else 0)
    bulk = list(asked.answered(Question(numbers, inputs, {}) for numbers, inputs in batches))
    if asked.refused or not bulk:
        return None
    run = ReferenceRun(spec, [], bulk, [], {}, row_operations=row_operations)
    power = measured_power(run, original, dtype)
    return power.noticed(FINE) if power.is_shown else 0.0, max(
        map(_variation, _rows(spec, bulk)), default=0.0
    )


def _rows(spec: ModelSpec, bulk: Sequence[Question]) -> Iterator[np.ndarray]:
    """The answers of each output, [samples, …]; not of one that has other sizes for each sample."""
    for name in bulk[0].reference:
        arrays = [one.reference[name] for one in bulk]
        if len({array.shape for array in arrays}) == 1:
            yield np.concatenate(arrays) if spec.batched else np.stack(arrays)


def _variation(answers: np.ndarray) -> float:
    numbers = np.nan_to_num(answers.astype(np.float64))
    return float(numbers.std(0).max(initial=0.0) / (np.abs(numbers).max(initial=0.0) or 1.0))
