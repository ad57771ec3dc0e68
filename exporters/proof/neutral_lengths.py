"""Measures whether rows may be filled up to a common length: whether the FP32 model answers them as it does alone.

For each size that an axis is filled up to, a few judging samples are cut to the shortest length that goes there, and to
one half way to it: what is filled up repeats the last place, so of a single place any mean stays the same. Neighbouring
sizes may share a batch, so the shortest length of all is filled up to the longest, too. The original answers these rows
so, and filled up (`models/spec/filled_lengths.py`). What differs by more than FP32's own noise is not filled up when it
is served. The half is asked these rows, against the original's answers to each alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...models.spec.filled_lengths import Lengths
from ...models.spec.spec import ModelSpec
from ..gate.noise import ROOM, Noise
from ..inputs.samples import Samples
from ..question import Answers, Arrays, Question, answers_or_refusal, largest_of, same_among_others

ROWS = 4  # for each length
BATCHES = 16  # of these, where an output has whole numbers, which hide small differences
# A difference of so much of the output's largest value is always allowed: sums of other lengths round otherwise.
FLOOR = 2.0**-21


@dataclass(frozen=True, slots=True)
class JoinedLengths:
    """``questions``: rows of other lengths, with the original's answers to them alone, and what they are filled up to.
    ``refused``: why they are not filled up; empty where they may be. ``differs``: by how much filling up changes an
    answer, of its largest value."""

    questions: list[tuple[Lengths, Question]] = field(default_factory=list)
    refused: str = ""
    differs: float = 0.0

    def sentence(self, asked: Sequence[int]) -> str:
        sizes = ", ".join(map(str, asked))
        if self.refused:
            return f"lengths are not filled up to {sizes}, as [batching] asks: {self.refused}"
        return (
            f"rows of different lengths share a batch, filled up to {sizes}: that changes no FP32 answer by more than "
            f"{self.differs:.3g} of its largest value"
        )


def joined_lengths(
    spec: ModelSpec, judging: Samples, original: Answers, noise: Mapping[str, Noise]
) -> JoinedLengths:
    """Ask the FP32 model ``original`` rows of every length alone and filled up; nothing where no lengths are asked
    for."""
    if not spec.batching.lengths:
        return JoinedLengths()
    if (lengths := Lengths.of(spec)) is None:
        return JoinedLengths(refused="no input that is a mask, or has lengths, is of a named free axis")
    questions, worst = list[tuple[Lengths, Question]](), 0.0
    for far, samples, inputs, how in _rows_of_all_lengths(spec, lengths, judging):
        both = original, filling(spec, far, original)
        alone, filled = (answers_or_refusal(answers, inputs) for answers in both)
        if not isinstance(alone, Exception):  # a half is asked what FP32 itself answers otherwise, too
            questions.append((far, Question(samples, inputs, alone, how)))
        if isinstance(alone, Exception) or isinstance(filled, Exception):
            refusal = alone if isinstance(alone, Exception) else filled
            return JoinedLengths(questions, f"the FP32 model does not run with {how}: {refusal}")
        for name, answer in alone.items():
            differs, fault = _compared(name, answer, filled[name], noise.get(name))
            if fault:
                return JoinedLengths(questions, f"with {how}, output '{name}' {fault}")
            worst = max(worst, differs)
    return JoinedLengths(questions, differs=worst)


def filling(spec: ModelSpec, lengths: Lengths, answers: Answers) -> Answers:
    """A function that answers like ``answers`` asked with inputs filled up to the next of ``lengths``."""

    def answer(inputs: Arrays) -> dict[str, np.ndarray]:
        given = [inputs[tensor.name] for tensor in spec.inputs]
        shapes = lengths.shared(tuple(array.shape[1:] for array in given))
        names = zip(spec.inputs, lengths.filled(given, shapes), strict=True)
        came = answers({tensor.name: array for tensor, array in names})
        cut = lengths.cut([came[tensor.name] for tensor in spec.outputs], given)
        return {tensor.name: array for tensor, array in zip(spec.outputs, cut, strict=True)}

    return answer


def _compared(name: str, alone: np.ndarray, filled: np.ndarray, noise: Noise | None) -> tuple[float, str]:
    """The difference as a share of the output's largest value, and what is wrong with it; "" where nothing is."""
    if alone.shape != filled.shape:
        return 0.0, (
            f"has shape {list(filled.shape)}, expected {list(alone.shape)}: give an axis of it that is as long as an "
            "input's the same name in model.toml"
        )
    largest, own = largest_of(alone), noise.numbers["error"] if noise else 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(alone.astype(np.float64) - filled.astype(np.float64))
    differs = largest_of(apart) / (largest or 1.0)
    if same_among_others(alone, filled, largest, max(ROOM * own, FLOOR)):
        return differs, ""
    return differs, (
        f"differs by {differs:.3g} of its largest value from the same rows alone, where FP32 itself differs by "
        f"{own:.3g}: the model does not leave out what its mask leaves out"
    )


def _rows_of_all_lengths(
    spec: ModelSpec, lengths: Lengths, judging: Samples
) -> Iterator[tuple[Lengths, tuple[int, ...], dict[str, np.ndarray], str]]:
    """Samples cut to two lengths of each size, or repeated where they are shorter, how far they are filled up, and what
    they are."""
    is_whole = any(tensor.type.numpy.kind != "f" for tensor in spec.outputs)
    several = list(judging.batches(min(ROWS, spec.max_batch_size), BATCHES if is_whole else 1))
    asked = list[tuple[Lengths, dict[str, int]]]()
    for step in range(max(len(sizes) for _, sizes in lengths.axes.values())):
        shortest, half_way = dict[str, int](), dict[str, int]()
        for name, (dim, sizes) in lengths.axes.items():
            place = min(step, len(sizes) - 1)
            shortest[name] = max(dim.minimum, sizes[place - 1] + 1 if place else 1)
            half_way[name] = (shortest[name] + sizes[place]) // 2
        asked += [(lengths, shortest), (lengths, half_way)] if half_way != shortest else [(lengths, shortest)]
    if any(len(sizes) > 1 for _, sizes in lengths.axes.values()):
        asked.append((lengths.to_the_longest, asked[0][1]))
    for far, cut in asked:
        how = ", ".join(
            f"'{name}' of {size} filled up to {far.size(name, size)}" for name, size in cut.items()
        )
        for samples, rows in several:
            yield far, samples, _cut(spec, lengths, rows, cut), how


def _cut(spec: ModelSpec, lengths: Lengths, rows: Arrays, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    found = dict[str, np.ndarray]()
    for tensor, names, is_mask in zip(spec.inputs, lengths.inputs, lengths.masks, strict=True):
        array = rows[tensor.name]
        for axis, name in enumerate(names, 1):
            if name:
                array = np.take(array, np.arange(sizes[name]) % array.shape[axis], axis)
        if is_mask and any(names):
            array = array.copy()
            empty = np.logical_not(array.reshape(len(array), -1).any(axis=1))
            empty[0] = True  # one row without padding of its own, as most requests are
            array[empty] = 1
        elif tensor.lengths_of in sizes:
            array = np.minimum(array, sizes[tensor.lengths_of]).astype(array.dtype)
            array[:1] = sizes[tensor.lengths_of]
        found[tensor.name] = np.asarray(array, order="C")
    return found
