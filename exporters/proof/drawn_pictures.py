"""Generated samples of inputs that are pictures although nothing says so: pixels 0 to 1 or 0 to 255, by what the
answers of the model show more of.

A network that was trained on pixels answers normal noise as it never answers a picture: all its units are on, or none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...models.spec.said_by_name import is_mask
from ...models.spec.spec import ModelSpec, TensorSpec
from ..graph.original_graph import OriginalGraph
from ..inputs.samples import Samples
from ..policy.classes import class_of
from ..question import Invented, Question
from .planted_faults import measured_power
from .power import FINE
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
    pixels, best = _pixels_of(samples, pictures), None
    for brightest in BRIGHTEST:
        drawn = _drawn(samples, pictures, pixels, brightest)
        found = Shown.by(spec, drawn, original, row_operations, subject.precision.dtype)
        if found is not None and (best is None or found.is_more_than(best[0])):
            best = found, brightest, drawn
    if best is None:
        return subject
    _, chosen, drawn = best
    names = ", ".join(f"'{tensor.name}'" for tensor in pictures)
    note = f"generated pictures ({names}) have pixels from 0 to {chosen:g}"
    return replace(subject, samples=drawn, notes=(*subject.notes, note))


def _is_picture(tensor: TensorSpec, row: Sequence[int]) -> bool:
    """An axis of colours, first or last, and two sides. ``row``: the shape of one sample."""
    if tensor.picture is not None or not tensor.type.is_float or is_mask(tensor) or len(row) != 3:
        return False
    return any(
        channels in CHANNELS and min(sides) >= SMALLEST
        for channels, sides in ((row[0], row[1:]), (row[2], row[:2]))
    )


def _pixels_of(samples: Samples, pictures: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Pixels from 0 to 1 in place of each picture."""
    random = np.random.default_rng(0)
    return {tensor.name: _pixels(samples.arrays[tensor.name].shape, random) for tensor in pictures}


def _drawn(
    samples: Samples, pictures: Sequence[TensorSpec], pixels: Mapping[str, np.ndarray], brightest: float
) -> Samples:
    found = {t.name: (brightest * pixels[t.name]).astype(t.type.numpy) for t in pictures}
    for name, array in found.items():
        array[: samples.drifted] = samples.arrays[name][: samples.drifted]
    return replace(samples, arrays={**samples.arrays, **found})


def _pixels(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Blocks of one brightness and colour with a little noise, from 0 to 1: pixels side by side are alike."""
    sides = [size if axis == 0 or size in CHANNELS else -(-size // BLOCK) for axis, size in enumerate(shape)]
    blocks = random.random(sides)
    for axis, size in enumerate(shape):
        if axis and size not in CHANNELS:
            blocks = np.take(blocks, np.arange(size) // BLOCK, axis=axis)
    return np.rint(255 * (0.8 * blocks + 0.2 * random.random(shape))) / 255


@dataclass
class Shown:
    """The answers to some of the pictures. ``variation``: how much they differ from sample to sample, as a share of the
    largest. What they show of planted faults is measured where it decides: it costs many runs of the model."""

    run: ReferenceRun
    original: OriginalGraph
    dtype: str
    variation: float

    @classmethod
    def by(
        cls, spec: ModelSpec, samples: Samples, original: OriginalGraph, row_operations: int, dtype: str
    ) -> "Shown | None":
        """None where the model does not run with these samples."""
        some = samples.take(slice(samples.drifted, samples.drifted + ASKED))  # those before are not drawn
        asked = Invented(lambda inputs: dict(original.watched(inputs, lambda name, result, rest: None)))
        batches = some.batches(min(spec.max_batch_size, some.count) if spec.batched else 0)
        bulk = list(asked.answered(Question(numbers, inputs, {}) for numbers, inputs in batches))
        if asked.refused or not bulk:
            return None
        run = ReferenceRun(spec, [], bulk, [], {}, row_operations=row_operations)
        return cls(run, original, dtype, max(map(_variation, _rows(spec, bulk)), default=0.0))

    @cached_property
    def noticed(self) -> float:
        """The share of the planted fine faults that the answers show; 0 where they cannot tell."""
        power = measured_power(self.run, self.original, self.dtype, fine_alone=True)
        return power.noticed(FINE) if power.is_shown else 0.0

    def is_more_than(self, best: "Shown") -> bool:
        """True if these pictures show clearly more faults, and their answers do not differ far less; or if their
        answers differ far more, and they do not show clearly fewer faults. Where all answers are alike, the share of
        noticed faults is by chance."""
        if TIMES * self.variation < best.variation:
            return False
        if self.variation > TIMES * best.variation:
            return self.noticed > 1 - CLEARLY or self.noticed > best.noticed - CLEARLY
        return best.noticed + CLEARLY <= 1 and self.noticed >= best.noticed + CLEARLY


def _rows(spec: ModelSpec, bulk: Sequence[Question]) -> Iterator[np.ndarray]:
    """The answers of each output, [samples, …]; not of one that has other sizes for each sample."""
    for name in bulk[0].reference:
        arrays = [one.reference[name] for one in bulk]
        if len({array.shape for array in arrays}) == 1:
            yield np.concatenate(arrays) if spec.batched else np.stack(arrays)


def _variation(answers: np.ndarray) -> float:
    numbers = np.nan_to_num(answers.astype(np.float64))
    return float(numbers.std(0).max(initial=0.0) / (np.abs(numbers).max(initial=0.0) or 1.0))
