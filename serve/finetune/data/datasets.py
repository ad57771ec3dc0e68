"""A training file, read and checked against the model's spec: its rows, the targets, and the loss of each output.

The layout is that of samples.safetensors (`exporters/inputs/samples.py`): a tensor per input and ``target:<output>``
for each output to be learnt, axis 0 the rows; or a table with such columns (`tables.py`).
Nothing is repaired: the error names the bad rows, or a job leaves them out (`row_faults`).
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ....exporters.inputs.samples import MAX_BYTES, TARGET, Samples, checked_samples, read_tensors
from ....models.errors import BadInput, BadSamples
from ....models.files.guarded_reading import guarded
from ....models.folder.loss_and_optimizer_names import (
    CLASS_LOSSES,
    IGNORED,
    LOSSES_OF_KIND,
    NLL_OF_PROBABILITIES,
)
from ....models.spec.datatypes import DATATYPES, name_of
from ....models.spec.spec import Dim, ModelSpec, TensorSpec
from ....models.spec.value_range import ValueRange
from ..judging.judging_metrics import classifies
from ..training.loop.setting_names import MOST_ROWS, MOST_SHARE, most_quarantined
from .tables import kind_of, read_table

# 1.8e19. A number whose square is infinite in FP32 makes any variance infinite: BatchNorm's running statistics for
# good, and LayerNorm's output zero. Neither the loss nor a gradient need show it.
LARGEST = float(np.sqrt(np.finfo(np.float32).max))
_NAMED = 10  # rows in a message
SHARES_NEARLY = 1e-3  # by which the shares of soft labels may miss 1
_CHUNK_ELEMENTS = 1 << 22  # looked at at a time


@dataclass(frozen=True, slots=True)
class TrainingData:
    """A file that fits. ``losses``: the default loss by output that is learnt. Row ``i`` is row ``numbers[i]`` of the
    file.

    ``quarantined``: rows of the file that were left out, with the fault of each.
    """

    samples: Samples
    losses: Mapping[str, str]
    quarantined: Mapping[int, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.samples.count

    @property
    def numbers(self) -> np.ndarray:
        """The row of the file that each row is."""
        return _numbers(self.rows, self.quarantined)

    def row_digests(self) -> list[bytes]:
        return row_digests(self.samples)


def _numbers(rows: int, left_out: Collection[int]) -> np.ndarray:
    """The numbers that the ``rows`` that are left have in the file."""
    return np.delete(np.arange(rows + len(left_out)), list(left_out))


def row_digests(samples: Samples) -> list[bytes]:
    """A digest of each row's inputs: equal inputs, equal digests, whatever the targets say."""
    arrays = [np.ascontiguousarray(array) for _, array in sorted(samples.arrays.items())]
    return [_digest([array[row] for array in arrays]) for row in range(samples.count)]


@guarded("training rows")
def read_training(
    path: Path,
    spec: ModelSpec,
    max_bytes: int = MAX_BYTES,
    quarantine: bool = False,
    work: Path | None = None,
    ignored: int | None = None,
    masked: bool = False,
) -> TrainingData:
    """Read and check a training or validation file; ``max_bytes`` also bounds what a packed one unpacks to, in the
    folder ``work`` or beside it. ``quarantine``: rows that cannot be learnt from are left out rather than refused
    (`row_faults`). ``ignored``: the class of a target that is not learnt, which becomes `IGNORED`. ``masked``: a target
    value may be NaN, which is not learnt either.

    Raises BadSamples naming the tensor, the rows (the first ten and how many), what was expected and what came;
    BadInput where the model has no output that could be learnt.
    """
    learnable = learnable_outputs(spec)
    # The targets are checked below, all rows of them; load_samples would stop at the first.
    unjudged = replace(spec, outputs=tuple(replace(tensor, kind="tensor") for tensor in spec.outputs))
    kind = kind_of(path, spec)
    tensors = {} if kind else read_tensors(path, max_bytes)
    try:
        tensors = read_table(path, kind, spec, max_bytes, work) if kind else tensors
        rows = {len(array) if array.ndim else 0 for array in tensors.values()}
        # A file whose numbers of rows differ is refused below.
        faults = row_faults(spec, tensors, ignored, masked) if quarantine and len(rows) == 1 else {}
        samples = checked_samples(without(tensors, faults) if faults else tensors, unjudged)
    except BadSamples as error:
        raise BadSamples(f"{path.name}: {error}") from error
    _check_count(samples.count)
    losses = losses_of(spec, samples)
    sizes = _sizes(spec, samples)
    numbers = _numbers(samples.count, faults)
    for tensor in spec.outputs:
        if tensor.name in losses:
            target, loss = samples.targets[tensor.name], learnable[tensor.name]
            _check_target(target, tensor, _inner(spec, tensor), loss, sizes, ignored, masked, numbers)
    for name, array in samples.arrays.items():
        _check_finite(name, array, numbers)
    if ignored is not None:
        marked = {
            name: np.where(target == ignored, IGNORED, target) if target.dtype.kind == "i" else target
            for name, target in samples.targets.items()
        }
        samples = replace(samples, targets=marked)
    return TrainingData(samples, losses, faults)


def learnable_outputs(spec: ModelSpec) -> dict[str, str]:
    """The default loss of each output that can be learnt. Raises BadInput where there is none."""
    found = {
        tensor.name: LOSSES_OF_KIND[tensor.kind][0]
        for tensor in spec.outputs
        if tensor.kind in LOSSES_OF_KIND and tensor.type.is_float
    }
    if not found:
        kinds = ", ".join(f"'{t.name}' ({t.datatype}, kind {t.kind})" for t in spec.outputs)
        raise BadInput(
            f"model '{spec.name}' has no output that can be learnt: expected a floating point one of kind "
            f"{', '.join(LOSSES_OF_KIND)}, it has {kinds}; set the output's kind in model.toml and convert again"
        )
    return found


def losses_of(spec: ModelSpec, samples: Samples) -> dict[str, str]:
    """The loss of each output that the samples have a target for. Raises BadSamples where there is none."""
    learnable = learnable_outputs(spec)
    wanted = ", ".join(f"'{TARGET}{name}'" for name in learnable)
    if not samples.targets:
        raise BadSamples(f"no target to learn from: expected at least one of {wanted} beside the inputs")
    for name in samples.targets:
        if name not in learnable:
            kind = next(tensor for tensor in spec.outputs if tensor.name == name)
            raise BadSamples(
                f"tensor '{TARGET}{name}': an output of kind {kind.kind} and datatype {kind.datatype} cannot be "
                f"learnt; expected {wanted}"
            )
    return {name: learnable[name] for name in samples.targets}


def split(count: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows to train on, rows held out), each rising, disjoint, together all; the same for the same seed.

    At least one row is on each side; ``count`` must be at least 2, ``share`` is that of the held-out rows.
    """
    held = min(max(1, round(count * share)), count - 1)
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[held:]), np.sort(order[:held])


def seen_in_training(data: TrainingData, train: np.ndarray, held_out: np.ndarray) -> list[int]:
    """The held-out rows whose inputs are among the training rows too: they make the score too good."""
    digests = data.row_digests()
    known = {digests[row] for row in train}
    return [int(row) for row in held_out if digests[row] in known]


def check_no_overlap(training: TrainingData, validation: TrainingData) -> None:
    """Raises BadSamples naming the rows of the validation file whose inputs are in the training file."""
    known = set(training.row_digests())
    if rows := [row for row, digest in enumerate(validation.row_digests()) if digest in known]:
        named = named_rows(validation.numbers[rows])
        raise BadSamples(
            f"validation_file: {named}: expected rows that are not in the training file, got the same "
            "inputs; a score on rows that were trained on says nothing: take them out of one file"
        )


# One target.


def _check_count(count: int) -> None:
    if count < 2:
        raise BadSamples(f"expected at least 2 rows, one to train on and one held out to judge, got {count}")


def _check_target(
    target: np.ndarray,
    tensor: TensorSpec,
    inner: tuple[Dim, ...],
    loss: str,
    sizes: Mapping[str, int],
    ignored: int | None,
    masked: bool,
    numbers: np.ndarray,
) -> None:
    classes = loss in (*CLASS_LOSSES, NLL_OF_PROBABILITIES)
    if classes and not inner:
        raise BadSamples(
            f"tensor '{TARGET}{tensor.name}': the output has no axis of classes, so none can be learnt"
        )
    if loss == CLASS_LOSSES[0] and target.dtype == np.float32 and target.ndim == 1 + len(inner):
        _check_shares(f"{TARGET}{tensor.name}", target, numbers)
        classes = False
    datatype, shape = ("INT64", inner[:-1]) if classes else ("FP32", inner)
    shape = tuple(_known(dim, sizes) for dim in shape)
    expected = replace(tensor, shape=(Dim(), *shape), datatype=datatype)
    if fault := expected.fault(target.shape, name_of(target.dtype)):
        what = "one class for each decision" if classes else "the output's shape"
        raise BadSamples(f"tensor '{TARGET}{tensor.name}': {fault} ({what}; first axis = rows)")
    if classes:
        _check_classes(f"{TARGET}{tensor.name}", target, _known(inner[-1], sizes), ignored, numbers)
    else:
        given = np.where(np.isnan(target), 0, target) if masked else target
        _check_finite(f"{TARGET}{tensor.name}", given, numbers)


def _check_classes(
    name: str, target: np.ndarray, classes: Dim, ignored: int | None, numbers: np.ndarray
) -> None:
    top = classes.minimum if classes.fixed else np.iinfo(np.int64).max
    wrong = (target < 0) | (target >= top)
    if ignored is not None:
        wrong &= target != ignored
    if wrong.any():
        rows = np.flatnonzero(wrong.reshape(len(target), -1).any(axis=1))
        bounds = f"0..{top - 1}" if classes.fixed else "0 or more"
        came = ", ".join(str(value) for value in np.unique(target[wrong])[:_NAMED])
        raise BadSamples(
            f"tensor '{name}', {named_rows(numbers[rows])}: expected classes {bounds}, got {came}"
        )


def _check_shares(name: str, target: np.ndarray, numbers: np.ndarray) -> None:
    """Each decision of soft labels has a share for each class; the shares add up to 1."""
    _check_finite(name, target, numbers)
    wrong = (target < 0).any(-1) | (np.abs(target.sum(-1) - 1) > SHARES_NEARLY)
    if rows := np.flatnonzero(wrong.reshape(len(target), -1).any(1)).tolist():
        raise BadSamples(
            f"tensor '{name}', {named_rows(numbers[rows])}: expected a share of 0 or more for each class, "
            "together 1 (soft labels), or INT64 classes"
        )


def with_classes(spec: ModelSpec, samples: Samples) -> Samples:
    """The samples with the most likely class in place of soft labels: they are judged so."""
    soft = {
        tensor.name
        for tensor in spec.outputs
        if tensor.kind == "logits"
        and tensor.name in samples.targets
        and samples.targets[tensor.name].dtype.kind == "f"
    }
    hard = {name: one.argmax(-1) if name in soft else one for name, one in samples.targets.items()}
    return replace(samples, targets=hard) if soft else samples


def _check_finite(name: str, array: np.ndarray, numbers: np.ndarray) -> None:
    """``numbers``: of the rows, in the file."""
    if not (name_of(array.dtype) in DATATYPES and DATATYPES[name_of(array.dtype)].is_float):
        return
    rows = [row for part in _bad_rows(array) for row in part]
    if rows:
        raise BadSamples(
            f"tensor '{name}', {named_rows(numbers[rows])}: expected finite numbers, got NaN or infinity; one such row "
            "spoils every step it is in: correct it or leave it out"
        )


def _bad_rows(array: np.ndarray) -> Iterator[list[int]]:
    step = max(1, _CHUNK_ELEMENTS * len(array) // max(1, array.size))
    for start in range(0, len(array), step):
        bad = ~np.isfinite(array[start : start + step]).reshape(len(array[start : start + step]), -1).all(
            axis=1
        )
        yield (np.flatnonzero(bad) + start).tolist()


def named_rows(rows: Sequence[int] | np.ndarray) -> str:
    named = ", ".join(str(row) for row in rows[:_NAMED])
    more = f", … ({len(rows)} rows)" if len(rows) > _NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"


# Dimensions.


def _inner(spec: ModelSpec, tensor: TensorSpec) -> tuple[Dim, ...]:
    return tensor.shape[1:] if spec.batched else tensor.shape


def _sizes(spec: ModelSpec, samples: Samples) -> dict[str, int]:
    """The size of each named dimension in this file's inputs."""
    return {
        dim.name: size
        for tensor in spec.inputs
        for dim, size in zip(_inner(spec, tensor), samples.arrays[tensor.name].shape[1:], strict=True)
        if dim.name is not None
    }


def _known(dim: Dim, sizes: Mapping[str, int]) -> Dim:
    size = sizes.get(dim.name) if dim.name is not None else None
    return dim if size is None else Dim(size, size, dim.name)


def _digest(parts: Sequence[np.ndarray]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part.tobytes())
    return found.digest()


def row_faults(
    spec: ModelSpec, tensors: Mapping[str, np.ndarray], ignored: int | None = None, masked: bool = False
) -> dict[int, str]:
    """Row → what is wrong with it. Tensors that do not fit as a whole are left to the checks of the file.

    Raises BadSamples where more are bad than may be left out (`most_quarantined`).
    """
    found: dict[int, str] = {}
    for name, bad, words in _faults(spec, tensors, ignored, masked):
        for row in np.flatnonzero(bad.reshape(len(bad), -1).any(1)).tolist() if bad.size else ():
            found.setdefault(row, f"'{name}': {words}")
    rows = max((len(array) for array in tensors.values() if array.ndim), default=0)
    if len(found) > most_quarantined(rows):
        row, words = next(iter(found.items()))
        raise BadSamples(
            f"{len(found)} of {rows} rows cannot be learnt from (row {row}: {words}): at most {most_quarantined(rows)} "
            f"of them are left out ({MOST_SHARE:.0%}, or {MOST_ROWS} where that is more); correct the file"
        )
    return dict(sorted(found.items()))


def without(tensors: Mapping[str, np.ndarray], rows: Mapping[int, str]) -> dict[str, np.ndarray]:
    """The tensors without these rows."""
    return {
        name: np.delete(array, list(rows), axis=0) if array.ndim else array for name, array in tensors.items()
    }


def _ranges(spec: ModelSpec, tensors: Mapping[str, np.ndarray]) -> list[ValueRange | None]:
    """The range of each input's values; the tensors are not checked yet."""
    arrays = [tensors[tensor.name] for tensor in spec.inputs if tensor.name in tensors]
    first = 0 if spec.batched else 1
    if [array.ndim for array in arrays] == [first + len(tensor.shape) for tensor in spec.inputs]:
        return spec.ranges(arrays, first)
    return [tensor.range for tensor in spec.inputs]


def _faults(spec: ModelSpec, tensors: Mapping[str, np.ndarray], ignored: int | None, masked: bool):  # type: ignore[no-untyped-def]
    """(tensor, its bad elements with the rows first, the fault)."""
    values = {TARGET + tensor.name for tensor in spec.outputs if not classifies(tensor)}
    for name, array in tensors.items():
        known = name_of(array.dtype) in DATATYPES
        if array.ndim and array.size and known and DATATYPES[name_of(array.dtype)].is_float:
            finite = np.isfinite(array) | (np.isnan(array) & (masked and name in values))
            yield name, ~finite, "NaN or infinity"
            large = np.abs(array, where=finite, out=np.zeros_like(array)) > LARGEST
            yield name, large, f"a number above {LARGEST:.2g}, whose square is infinite"
    for tensor, valid in zip(spec.inputs, _ranges(spec, tensors), strict=True):
        array = tensors.get(tensor.name)
        if valid is not None and array is not None and array.ndim and array.dtype.kind in "iu":
            yield tensor.name, valid.outside(array), f"a value outside of {valid}"
    for tensor in spec.outputs:
        array = tensors.get(name := TARGET + tensor.name)
        if array is None or not classifies(tensor) or array.ndim == 0 or array.dtype.kind not in "iu":
            continue
        last = tensor.shape[-1] if tensor.shape else None
        most = last.minimum if last is not None and last.fixed else np.iinfo(np.int64).max
        bad = (array < 0) | (array >= most)
        if ignored is not None:
            bad &= array != ignored
        yield name, bad, f"a class outside of 0..{most - 1}"
