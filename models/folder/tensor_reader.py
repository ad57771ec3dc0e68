"""The ``[[inputs]]`` and ``[[outputs]]`` of a ``model.toml``, read into tensor specs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import BadFolder
from ..files.opened_file import opened_inside
from ..pictures.pixels import Picture
from ..spec.batch_axis import batch_first
from ..spec.datatypes import DATATYPES, Wire
from ..spec.spec import Dim, TensorSpec
from ..spec.value_range import ValueRange
from .model_keys import MAX_RANK, MAX_TENSORS, PICTURE, TENSOR
from .toml_reader import TomlReader

MAX_LABELS_BYTES = 16 * 2**20
_WIRE = ("wire_datatype", "wire_scale", "wire_offset")


class TensorReader(TomlReader):
    """The reader of the tensors of one file; ``where`` is a tensor's place in it. All methods raise BadFolder."""

    def tensors(self, data: Mapping[str, Any], key: str, batched: bool) -> tuple[TensorSpec, ...]:
        entries = self.typed(data, key, list)
        if not 1 <= len(entries) <= MAX_TENSORS:
            raise self.error(f"[[{key}]]: expected 1 to {MAX_TENSORS} tensors, got {len(entries)}")
        tensors = tuple(self.tensor(entry, f"{key}[{i}]", batched) for i, entry in enumerate(entries))
        names = [tensor.name for tensor in tensors]
        if twice := [name for name in names if names.count(name) > 1]:
            raise self.error(f"[[{key}]]: the name '{twice[0]}' stands there twice")
        self.check_lengths(tensors, key)
        return tensors

    def check_lengths(self, tensors: Sequence[TensorSpec], key: str) -> None:
        """Lengths are integers without a range of their own, of a named axis of another input."""
        for place, tensor in enumerate(tensors):
            if not tensor.lengths_of:
                continue
            where = f"{key}[{place}].lengths_of = '{tensor.lengths_of}'"
            if (
                key == "outputs"
                or tensor.type.is_float
                or tensor.datatype == "BOOL"
                or tensor.range is not None
            ):
                raise self.error(f"{where}: expected it on an input of integers that has no range")
            names = [dim.name for other in tensors if other is not tensor for dim in other.shape if dim.name]
            if tensor.lengths_of not in names:
                raise self.error(
                    f"{where}: expected the name of an axis of another input, which its shape gives in the place of "
                    f"-1; there are {names}"
                )

    def tensor(self, entry: Any, where: str, batched: bool) -> TensorSpec:
        if not isinstance(entry, dict):
            raise self.error(f"{where}: expected a table, got {entry!r}")
        self.known(entry, TENSOR, where)
        datatype = self.typed(entry, "datatype", str, where)
        self.held(datatype, TENSOR["datatype"], f"{where}.datatype")
        kind = self.typed({"kind": "tensor", **entry}, "kind", str, where)
        self.held(kind, TENSOR["kind"], f"{where}.kind")
        name = self.typed(entry, "name", str, where)
        if not name:
            raise self.error(f"{where}.name is empty: a tensor needs a name")
        axis = self.batch_axis(entry, where, batched)
        tensor = TensorSpec(
            name=name,
            datatype=datatype,
            shape=self.shape(self.typed(entry, "shape", list, where), where, batched, axis),
            kind=kind,
            labels=self.labels(entry, where),
            picture=self.picture(entry, where),
            wire=self.wire(entry, where),
            range=self.range(entry, where),
            lengths_of=self.typed({"lengths_of": "", **entry}, "lengths_of", str, where),
            batch_axis=axis,
        )
        try:
            if tensor.wire is not None:
                tensor.wire.check(datatype)
            if tensor.picture is not None or kind == "image":
                Picture.of(tensor, batched)
            if kind == "score":
                _check_score(tensor, batched)
        except BadFolder as error:
            raise self.error(f"{where}.{error}") from None
        return tensor

    def batch_axis(self, entry: Mapping[str, Any], where: str, batched: bool) -> int:
        axis, shape = self.typed({"batch_axis": 0, **entry}, "batch_axis", int, where), entry.get("shape")
        if axis and not batched:
            raise self.error(
                f"{where}.batch_axis = {axis}: max_batch_size = 0 says that the model is not batched; leave one out"
            )
        if axis and ("picture" in entry or entry.get("kind") == "image"):
            raise self.error(f"{where}.batch_axis = {axis}: pictures have the batch as their first axis")
        if isinstance(shape, list) and not 0 <= axis < max(len(shape), 1):
            raise self.error(
                f"{where}.batch_axis = {axis}: expected an axis of shape = {shape}, counted from 0 "
                f"(0 to {max(len(shape) - 1, 0)})"
            )
        return axis

    def shape(self, items: list[Any], where: str, batched: bool, axis: int) -> tuple[Dim, ...]:
        """The dimensions with the batch, which is on ``axis``, in front."""
        if len(items) > MAX_RANK:
            raise self.error(f"{where}.shape: expected at most {MAX_RANK} dimensions, got {len(items)}")
        try:
            shape = tuple(Dim.parse(item) for item in items)
        except BadFolder as error:
            raise self.error(f"{where}.shape: {error}") from None
        if batched and (not shape or shape[axis].fixed):
            which = f"axis {axis}" if axis else "the first axis"
            raise self.error(
                f"{where}.shape = {items}: {which} is the batch and must be free (-1); "
                "set batch_axis where the batch is another axis, or max_batch_size = 0 for a model that is not batched"
            )
        return batch_first(shape, axis)

    def labels(self, entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
        if "labels_file" not in entry:
            return tuple(self.strings(entry.get("labels", []), f"{where}.labels"))
        if "labels" in entry:
            raise self.error(f"{where} has both labels and labels_file: expected one of them")
        path = self.existing(self.typed(entry, "labels_file", str, where), f"{where}.labels_file", None)
        assert path is not None
        try:
            with opened_inside(self.file.parent, path, MAX_LABELS_BYTES) as opened:
                return tuple(opened.read().decode().splitlines())
        except OSError as error:  # labels are shown to callers: no other file's text becomes theirs
            raise self.error(f"{where}.labels_file: {path} cannot be taken: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise self.error(f"{where}.labels_file: {path} is not UTF-8 text ({error})") from error

    def picture(self, entry: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
        if "picture" not in entry:
            return None
        return self.table(entry, "picture", PICTURE, where)

    def range(self, entry: Mapping[str, Any], where: str) -> ValueRange | None:
        if "range" not in entry:
            return None
        datatype, shape = entry["datatype"], entry["shape"]
        if where.startswith("outputs") or DATATYPES[datatype].is_float or datatype == "BOOL":
            raise self.error(f"{where}.range: only an input of integers has a range, expected none here")
        try:
            found = ValueRange.parse(entry["range"])
        except ValueError as error:
            raise self.error(f"{where}.range: {error}") from None
        if len(found.low) > 1 and (not shape or shape[-1] != len(found.low)):
            raise self.error(
                f"{where}.range has {len(found.low)} pairs: expected one for each place of the last axis of "
                f"shape = {shape}, or a single pair"
            )
        return found

    def wire(self, entry: Mapping[str, Any], where: str) -> Wire | None:
        said = [key for key in _WIRE if key in entry]
        if not said:
            return None
        if where.startswith("outputs"):
            raise self.error(f"{where}.{said[0]}: answers have the model's datatype; expected it on an input")
        if "wire_datatype" not in entry:
            raise self.error(f"{where}.{said[0]} is given without wire_datatype; add one, such as 'UINT8'")
        datatype = self.typed(entry, "wire_datatype", str, where)
        self.held(datatype, TENSOR["wire_datatype"], f"{where}.wire_datatype")
        scale, offset = (
            self.typed({key: value, **entry}, key, float, where)
            for key, value in (("wire_scale", 1.0), ("wire_offset", 0.0))
        )
        if not math.isfinite(scale) or scale == 0.0 or not math.isfinite(offset):
            raise self.error(f"{where}: wire_scale = {scale}, wire_offset = {offset}: expected finite numbers, "
                             "the scale not 0")  # fmt: skip
        if "picture" in entry and (datatype != "UINT8" or len(said) > 1):
            raise self.error(
                f"{where}: requests for a picture carry its pixels: expected wire_datatype = 'UINT8' alone "
                "(scale, mean and std of the picture entry are applied on the device)"
            )
        return Wire(datatype, scale, offset)


def _check_score(tensor: TensorSpec, batched: bool) -> None:
    inner = tensor.shape[1:] if batched else tensor.shape
    if not tensor.type.is_float or any((dim.minimum, dim.maximum) != (1, 1) for dim in inner):
        raise BadFolder(
            f"kind = 'score' is one floating number a row: expected a shape such as [-1] or [-1, 1], got "
            f"{tensor.datatype} {tensor.describe_shape()}; several classes are 'probabilities', a vector 'embedding'"
        )
