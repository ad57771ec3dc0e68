"""Real inputs that choose a plan and judge a half: read, checked against the spec, divided; and the few on which every
candidate plan is tried.

The layout of ``samples.safetensors`` (or npz), which fine-tuning data has too: one tensor per input name,
first axis = samples, and optionally ``target:<output>``. For a model that is not batched a samples axis is added in
front. Nothing is unpickled.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors

from ...models.errors import BadSamples
from ...models.files.guarded_reading import guarded, reading
from ...models.files.opened_file import opened_named
from ...models.files.tensor_file import save_tensors
from ...models.files.zip_members import members_of
from ...models.spec.datatypes import DATATYPES, name_of
from ...models.spec.spec import Dim, ModelSpec, TensorSpec
from ...models.spec.value_range import ValueRange, fault_of
from ...models.store.store import Version
from ..policy.operations import UNKNOWN, Operations
from .picture_folder import read_pictures

TARGET = "target:"
Layout = Callable[[Mapping[str, np.ndarray], ModelSpec], Mapping[str, np.ndarray]]
_MOST_EMPTY = 1000  # rows that take no bytes in a file, so that its size does not bound them
MAX_BYTES = 4 << 30  # of the file, and of what a compressed one unpacks to
_NAMES = {"F16": "FP16", "F32": "FP32", "F64": "FP64"} | {
    f"{short}{bits}": f"{long}{bits}"
    for short, long in (("I", "INT"), ("U", "UINT"))
    for bits in (8, 16, 32, 64)
}


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs by name and targets by output, axis 0 the samples. ``source`` is ``given`` or ``generated``. ``notes`` say
    what was changed when they were read. ``all_judge``: no plan was chosen on them. ``drifted``: how many of
    them, at most, are inputs on which a half drifted (`drifted_inputs.py`), the first ones in a conversion of a folder.
    """

    arrays: Mapping[str, np.ndarray]
    targets: Mapping[str, np.ndarray] = field(default_factory=dict)
    source: str = "given"
    notes: tuple[str, ...] = ()
    all_judge: bool = False
    drifted: int = 0

    @property
    def judging(self) -> "Samples":
        """The samples that judge a half that was made before."""
        return self if self.all_judge else self.split()[1]

    @property
    def count(self) -> int:
        return min((len(array) for array in self.arrays.values()), default=0)

    def take(self, indices: np.ndarray | slice) -> "Samples":
        """The chosen samples, in that order."""
        arrays = {name: array[indices] for name, array in self.arrays.items()}
        targets = {name: array[indices] for name, array in self.targets.items()}
        return Samples(arrays, targets, self.source, all_judge=self.all_judge)

    def distinct(self) -> "Samples":
        """The samples without those that repeat an earlier one, its targets included: a copy shows nothing new, and
        would choose the plan that it judges."""
        seen = dict[bytes, int]()
        for row, digest in enumerate(digests([*self.arrays.values(), *self.targets.values()])):
            seen.setdefault(digest, row)
        return self if len(seen) == self.count else self.take(np.array(list(seen.values())))

    def split(self) -> tuple["Samples", "Samples"]:
        """One part to choose the plan with, and the disjoint rest to judge it: every second sample each.

        A single sample judges, and the planning part is empty.
        """
        return self.take(slice(1, None, 2)), self.take(slice(0, None, 2))

    def batches(
        self, rows: int, most: int | None = None
    ) -> Iterator[tuple[tuple[int, ...], dict[str, np.ndarray]]]:
        """All samples as (indices, inputs) in batches of exactly ``rows``; at most ``most`` batches.

        The last batch is filled up from the beginning, so that every size is really tried. ``rows`` 0, a
        model that is not batched, gives one sample at a time without the samples axis.
        """
        for start in islice(range(0, self.count, max(rows, 1)), most):
            indices = tuple(index % self.count for index in range(start, start + max(rows, 1)))
            chosen = list(indices) if rows else start
            # `ascontiguousarray` would give a scalar an axis.
            yield indices, {name: np.asarray(array[chosen], order="C") for name, array in self.arrays.items()}

    def save(self, path: Path, private: bool = True) -> None:
        """Write them as safetensors, the layout that `load_samples` reads. ``private``: only the file's owner may read
        it, for samples may be what callers sent."""
        targets = {TARGET + name: array for name, array in self.targets.items()}
        tensors = {name: np.ascontiguousarray(array) for name, array in {**self.arrays, **targets}.items()}
        save_tensors(path, tensors, private)


def digests(arrays: Collection[np.ndarray]) -> Iterator[bytes]:
    """A digest of each row of all arrays together."""
    for row in range(min(map(len, arrays), default=0)):
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(array[row].tobytes())
        yield digest.digest()


@guarded("samples")
def load_samples(
    path: Path, spec: ModelSpec, max_bytes: int = MAX_BYTES, layout: Layout = lambda tensors, _: tensors
) -> Samples:
    """Read samples from safetensors or npz (recognised by their first bytes), or from a folder of pictures. ``layout``
    puts the tensors into the layout of this file.

    Raises BadSamples naming the tensor, the row where there is one, what was expected and what came.
    """
    try:
        is_folder = path.is_dir()
        tensors = read_pictures(path, spec, max_bytes) if is_folder else _read(path, max_bytes)
        return checked_samples(layout(tensors, spec), spec)
    except BadSamples as error:
        raise BadSamples(f"{path.name or path}: {error}") from error


@guarded("a safetensors or npz file")
def read_tensors(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, np.ndarray]:
    """The tensors of a safetensors or npz file, held against no spec. Raises BadSamples."""
    try:
        return _read(path, max_bytes)
    except BadSamples as error:
        raise BadSamples(f"{path.name or path}: {error}") from error


def mapped_samples(path: Path) -> Samples:
    """Samples that `Samples.save` wrote into ``path``, whose arrays stay in the file until they are looked at."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head: dict[str, dict[str, Any]] = json.loads(file.read(length))
    found = {
        name: _mapped(path, 8 + length + one["data_offsets"][0], one)
        for name, one in head.items()
        if name != "__metadata__"
    }
    targets = {name.removeprefix(TARGET): one for name, one in found.items() if name.startswith(TARGET)}
    return Samples({name: one for name, one in found.items() if not name.startswith(TARGET)}, targets)


def _mapped(path: Path, start: int, entry: Mapping[str, Any]) -> np.ndarray:
    dtype, shape = DATATYPES[_NAMES.get(written := str(entry["dtype"]), written)].numpy, tuple(entry["shape"])
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.asarray(np.memmap(path, dtype, "c", start, shape))  # a write changes a copy of the page


def stored_samples(version: Version) -> Samples:
    """The samples of a version in the store, by which it was judged. Raises DamagedFile, BadSamples."""
    path = version.path("samples.safetensors")
    try:
        with reading(path, "samples"):
            found = checked_samples(_read_safetensors(version.bytes("samples.safetensors")), version.spec())
    except BadSamples as error:
        raise BadSamples(f"{path}: {error}") from error
    said = version.manifest.get("samples") or {}
    return replace(found, source=said.get("source", found.source), drifted=said.get("drifted", 0))


# Reading.


def _read(path: Path, max_bytes: int) -> dict[str, np.ndarray]:
    try:
        with opened_named(path) as opened:  # once, so that the file whose size was checked is read
            file = opened.handle
            start = file.read(6)
            packed = start.startswith(b"PK")
            if start == b"\x93NUMPY":
                raise BadSamples(
                    "an npy file, whose array has no name: expected a safetensors or npz file, as "
                    "numpy.savez(FILE, NAME=array) writes it"
                )
            _bound(file.seek(0, os.SEEK_END), max_bytes)
            file.seek(0)
            return _read_npz(file, max_bytes) if packed else _read_safetensors(file.read())
    except OSError as error:
        raise BadSamples(f"cannot be read ({error.strerror}); expected a safetensors or npz file") from error


def _bound(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise BadSamples(f"too large: expected at most {max_bytes} bytes, got {size}; give fewer samples")


def _read_npz(file: BinaryIO, max_bytes: int) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(file) as archive:
            _bound(sum(member.file_size for member in members_of(archive)), max_bytes)
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except BadSamples:
        raise
    except Exception as error:  # zipfile, its decompressors and numpy raise many kinds on such bytes
        raise BadSamples(f"not a plain npz file ({error}); object arrays are not read") from error
    if other := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
        raise BadSamples(
            f"not a plain npz file: its member '{other[0]}' is no npy file; expected what numpy.savez or "
            "safetensors' save_file writes, not torch.save"
        )
    # An array of another byte order has the right datatype, and torch takes none of it.
    return {name: array.astype(array.dtype.newbyteorder("<"), copy=False) for name, array in found.items()}


def _read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    try:
        return {name: _to_numpy(name, view) for name, view in safetensors.deserialize(data)}
    except safetensors.SafetensorError as error:
        raise BadSamples(
            f"neither a safetensors nor an npz file ({error}): it begins with {data[:8]!r}"
        ) from error


def _to_numpy(name: str, view: Mapping[str, Any]) -> np.ndarray:
    written: str = view["dtype"]
    datatype = DATATYPES.get(_NAMES.get(written, written))
    if datatype is None:
        known = ", ".join(DATATYPES)
        raise BadSamples(f"tensor '{name}': expected one of the datatypes {known}, got {written}")
    return np.frombuffer(view["data"], datatype.numpy).reshape(view["shape"])


# Holding against the spec.


def checked_samples(tensors: Mapping[str, np.ndarray], spec: ModelSpec) -> Samples:
    """Tensors that were read, checked against the spec. Raises BadSamples as `load_samples` does."""
    _check_names(tensors, spec)
    arrays = {tensor.name: as_fp32(tensors[tensor.name], tensor.datatype) for tensor in spec.inputs}
    others = [name for name, array in arrays.items() if array.dtype != tensors[name].dtype]
    for tensor in spec.inputs:
        check_in_fp32(tensor.name, arrays[tensor.name], tensor.datatype)
        stacked = replace(tensor, shape=(Dim(), *_inner(spec, tensor)))
        if fault := stacked.fault(arrays[tensor.name].shape, name_of(arrays[tensor.name].dtype)):
            raise BadSamples(f"tensor '{tensor.name}': {fault} (first axis = samples)")
    outputs = {TARGET + tensor.name: tensor for tensor in spec.outputs}
    _check_rows({**arrays, **{name: tensors[name] for name in outputs if name in tensors}})
    _check_named_dimensions(arrays, spec)
    for (name, array), valid in zip(arrays.items(), _ranges(arrays, spec), strict=True):
        if fault := fault_of(array, valid):
            raise BadSamples(f"tensor '{name}': {fault}")
    targets = {outputs[name].name: tensors[name] for name in outputs if name in tensors}
    for tensor in spec.outputs:
        if tensor.name in targets and tensor.kind in ("logits", "probabilities"):
            _check_classes(targets[tensor.name], tensor, _inner(spec, tensor))
    notes = tuple(
        f"the samples of '{name}' were {name_of(tensors[name].dtype)} and are converted to FP32"
        for name in others
    )
    return Samples(arrays, targets, "given", notes)


def as_fp32(array: np.ndarray, wanted: str) -> np.ndarray:
    """FP64, FP16 and BF16 as FP32 where that is ``wanted`` and no number becomes infinite; any other array as it is."""
    if wanted != "FP32" or array.dtype not in (np.float64, np.float16, DATATYPES["BF16"].numpy):
        return array
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
    return single if np.array_equal(np.isfinite(single), np.isfinite(array)) else array


def check_in_fp32(name: str, array: np.ndarray, wanted: str) -> None:
    """Raises BadSamples for FP64 that is to be FP32, and has a number beyond it."""
    if wanted == "FP32" and array.dtype == np.float64:
        beyond = np.isfinite(array) & (np.abs(array) > np.finfo(np.float32).max)
        row = int(np.flatnonzero(beyond.reshape(len(array), -1).any(1))[0]) if array.ndim else 0
        raise BadSamples(
            f"tensor '{name}': the sample {row} has {array[beyond][0]:g}, and the largest number of FP32 is 3.4e+38: "
            "correct it, or leave that sample out"
        )


def _ranges(arrays: Mapping[str, np.ndarray], spec: ModelSpec) -> list[ValueRange | None]:
    return spec.ranges(list(arrays.values()), first=0 if spec.batched else 1)


def _inner(spec: ModelSpec, tensor: TensorSpec) -> tuple[Dim, ...]:
    """The dimensions of one sample."""
    return tensor.shape[1:] if spec.batched else tensor.shape


def _check_names(tensors: Mapping[str, np.ndarray], spec: ModelSpec) -> None:
    wanted = [tensor.name for tensor in spec.inputs]
    optional = [TARGET + tensor.name for tensor in spec.outputs]
    missing = [name for name in wanted if name not in tensors]
    unknown = [name for name in tensors if name not in (*wanted, *optional)]
    if missing or unknown:
        raise BadSamples(
            f"expected the tensors {wanted} and optionally {optional}, got {sorted(tensors)}: "
            f"missing {missing}, unknown {unknown}"
        )


def _check_rows(tensors: Mapping[str, np.ndarray]) -> None:
    (first, array), *others = tensors.items()
    if not len(array):
        raise BadSamples(f"tensor '{first}': expected at least one row, got none (first axis = samples)")
    if not any(one.size for one in tensors.values()) and len(array) > _MOST_EMPTY:
        raise BadSamples(
            f"tensor '{first}': {len(array)} rows without an element; expected at most {_MOST_EMPTY} such rows"
        )
    for name, other in others:
        if other.ndim == 0 or len(other) != len(array):
            rows = "no samples axis" if other.ndim == 0 else f"{len(other)} rows"
            raise BadSamples(f"tensor '{name}': expected {len(array)} rows as in '{first}', got {rows}")


def _check_named_dimensions(arrays: Mapping[str, np.ndarray], spec: ModelSpec) -> None:
    sizes: dict[str, tuple[int, str]] = {}
    for tensor in spec.inputs:
        for dim, size in zip(_inner(spec, tensor), arrays[tensor.name].shape[1:], strict=True):
            if dim.name is None:
                continue
            known, where = sizes.setdefault(dim.name, (size, tensor.name))
            if known != size:
                raise BadSamples(
                    f"tensor '{tensor.name}': expected '{dim.name}' to be {known} as in '{where}', got {size}"
                )


def _check_classes(targets: np.ndarray, tensor: TensorSpec, inner: tuple[Dim, ...]) -> None:
    if targets.dtype.kind not in "iu":
        raise BadSamples(
            f"tensor '{TARGET}{tensor.name}': expected integer classes, got {name_of(targets.dtype)}"
        )
    places = replace(tensor, shape=(Dim(), *inner[:-1]), datatype="INT64")
    if fault := places.fault(targets.shape, "INT64"):
        raise BadSamples(f"tensor '{TARGET}{tensor.name}': {fault} (one class for each decision)")
    if inner and inner[-1].fixed and (wrong := targets >= inner[-1].minimum).any():
        row = int(np.argwhere(wrong)[0][0])
        raise BadSamples(
            f"tensor '{TARGET}{tensor.name}', row {row}: expected classes 0..{inner[-1].minimum - 1} "
            f"(negative ones are not graded), got {targets[wrong][0]}"
        )


PLANNING_SAMPLES = 16
FEWEST = 2
SLOW_SAMPLES = 8  # instead of `PLANNING_SAMPLES`, where those would need more than `PLANNING_OPERATIONS`
PLANNING_OPERATIONS = 1 << 34
PLANNING_BYTES = 1 << 28  # of the inputs and answers of all of them
PLANNING_ROWS = 8  # of one execution


def few(planning: Samples, operations: Operations = UNKNOWN, of_a_row: int = 0) -> Samples:
    """The first planning samples: every candidate plan is tried on them. ``operations``: of one execution of the
    model; ``of_a_row``: the bytes of one sample and its answer."""
    row = operations.of(planning.take(slice(0, 1)).arrays)
    slow = row * min(planning.count, PLANNING_SAMPLES) > PLANNING_OPERATIONS
    most = SLOW_SAMPLES if slow else PLANNING_SAMPLES
    return planning.take(slice(0, min(most, max(FEWEST, PLANNING_BYTES // max(of_a_row, 1)))))


def executions(spec: ModelSpec, samples: Samples) -> Iterator[tuple[tuple[int, ...], dict[str, np.ndarray]]]:
    """Samples in small batches, with their numbers."""
    return samples.batches(
        min(PLANNING_ROWS, spec.max_batch_size, max(samples.count, 1)) if spec.batched else 0
    )


def more_executions(spec: ModelSpec, planning: Samples, some: Samples) -> Iterator[dict[str, np.ndarray]]:
    """All planning samples in batches, then ``some`` of them alone: a branch may depend on the whole batch."""
    for _, inputs in executions(spec, planning):
        yield inputs
    for _, inputs in some.batches(1) if spec.batched else ():
        yield inputs
