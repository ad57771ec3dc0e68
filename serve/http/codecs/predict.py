"""``:predict`` in JSON, for people with curl: ``{"instances": [...]}`` in, ``{"predictions": [...]}`` out.

Pictures are ``{"b64": "…"}`` both ways. Source of the words: TensorFlow Serving's REST API, row format.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from ....models.errors import BadRequest
from ....models.pictures.picture import png_of
from ....models.pictures.pixels import Picture
from ....models.spec.batch_axis import array_batch_back, array_batch_first
from ....models.spec.datatypes import name_of
from ....models.spec.spec import ModelSpec, TensorSpec
from ...batching.interface import NO_TERMS, Terms
from ..limits.memory_budget import Lease
from .json_numbers import array_of, parse, show, writable
from .pictures import array_of_files, is_file, packed

_NUMPY = orjson.OPT_SERIALIZE_NUMPY


class PredictRequest(NamedTuple):
    """``arrays`` in the spec's order; ``rows`` is the number of instances; ``kind`` is the media type of the answer."""

    arrays: list[np.ndarray]
    rows: int
    terms: Terms = NO_TERMS
    kind: str = "application/json"


def read_predict(spec: ModelSpec, body: bytes, lease: Lease) -> PredictRequest:
    """Read instances: a nested list each, or an object by input name (a must where there are several).

    A model that is not batched takes one instance, the whole input. Pictures count in the lease. Raises
    BadRequest naming the instance, Overloaded.
    """
    instances = _instances(spec, parse(body))
    by_name = len(spec.inputs) > 1 or (isinstance(instances[0], dict) and not _is_picture(spec, instances))
    if by_name:
        _check_instances(spec, instances)
    arrays = {}
    for tensor in spec.inputs:
        where = f"input '{tensor.name}' of model '{spec.name}': instances"
        data = [instance[tensor.name] for instance in instances] if by_name else instances
        arrays[tensor.name] = _array(spec, tensor, data, where, lease)
    return taken(spec, arrays)


def taken(spec: ModelSpec, arrays: Mapping[str, np.ndarray]) -> PredictRequest:
    """Named arrays, of any kind of body, checked against the spec. Raises BadRequest."""
    rows = spec.check_inputs(arrays)
    return PredictRequest([arrays[tensor.name] for tensor in spec.inputs], rows)


def taken_as_called(spec: ModelSpec, arrays: Mapping[str, np.ndarray]) -> PredictRequest:
    """Whole tensors in the model's own layout, such as numpy files have. Raises BadRequest."""
    moved = dict(arrays)
    for tensor in spec.inputs:
        if tensor.batch_axis and (array := arrays.get(tensor.name)) is not None:
            if fault := tensor.as_called().fault(array.shape, name_of(array.dtype)):
                raise BadRequest(
                    f"input '{tensor.name}' of model '{spec.name}': {fault} (axis {tensor.batch_axis} is the batch)"
                )
            moved[tensor.name] = array_batch_first(array, tensor.batch_axis)
    return taken(spec, moved)


def given_as_called(spec: ModelSpec, outputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs by name in the model's own layout."""
    return {t.name: array_batch_back(a, t.batch_axis) for t, a in zip(spec.outputs, outputs, strict=True)}


def _is_picture(spec: ModelSpec, instances: Sequence[Any]) -> bool:
    """True if the instances of a single input are files; ``b64`` may also be that input's name."""
    return spec.inputs[0].picture is not None and is_file(instances[0])


def _instances(spec: ModelSpec, message: Any) -> list[Any]:
    instances = message.get("instances") if isinstance(message, dict) else None
    if not isinstance(instances, list) or not instances:
        keys = isinstance(message, dict) and instances is None
        got = list(message)[:5] if keys else show(message if instances is None else instances)
        raise BadRequest(f'expected {{"instances": [...]}} with at least one instance, got {got}')
    most = spec.max_batch_size or 1
    if len(instances) > most:
        raise BadRequest(
            f"model '{spec.name}' takes at most {most} instances in one request, got {len(instances)}; "
            "send several requests (the server batches them again)"
        )
    return instances


def _check_instances(spec: ModelSpec, instances: Sequence[Any]) -> None:
    wanted = {tensor.name for tensor in spec.inputs}
    for index, instance in enumerate(instances):
        if not isinstance(instance, dict):
            raise BadRequest(
                f"instances[{index}]: expected an object with the inputs {sorted(wanted)} of model "
                f"'{spec.name}', got {show(instance)}"
            )
        if instance.keys() != wanted:
            raise BadRequest(
                f"instances[{index}]: expected the inputs {sorted(wanted)} of model '{spec.name}', "
                f"got {sorted(instance)}"
            )


def _array(spec: ModelSpec, tensor: TensorSpec, data: list[Any], where: str, lease: Lease) -> np.ndarray:
    if tensor.picture is not None and is_file(data[0]):
        return array_of_files(spec, tensor, data, where, lease)
    if not spec.batched and len(tensor.shape) == 0:
        return array_of(data, tensor.type, where).reshape(())
    if not spec.batched:
        return array_of(data[0], tensor.type, f"{where}[0]")
    return array_of(data, tensor.type, where)


def write_predict(spec: ModelSpec, outputs: Sequence[np.ndarray]) -> bytes:
    """One output: a list of its rows; several: a list of objects by name. Non-finite numbers are null.

    Where the first output of logits or probabilities has labels, ``labels`` holds each row's best one. Rows of
    an output of kind ``image`` are PNG files.
    """
    plain = [writable(array) for array in outputs]
    rows = plain if spec.batched else [array[None] for array in plain]
    shown = [_shown(spec, tensor, array) for tensor, array in zip(spec.outputs, rows, strict=True)]
    message: dict[str, Any] = {"predictions": shown[0] if len(shown) == 1 else _by_name(spec, shown)}
    if labels := _labels(spec, rows):
        message["labels"] = labels
    return orjson.dumps(message, option=_NUMPY)


def _shown(spec: ModelSpec, tensor: TensorSpec, rows: np.ndarray) -> Sequence[Any] | np.ndarray:
    if tensor.kind != "image":
        return rows
    picture = Picture.of(tensor, spec.batched)
    return [packed(png_of(row, picture)) for row in rows]


def _by_name(spec: ModelSpec, rows: Sequence[Sequence[Any] | np.ndarray]) -> list[dict[str, Any]]:
    names = [tensor.name for tensor in spec.outputs]
    return [dict(zip(names, row, strict=True)) for row in zip(*rows, strict=True)]


def _labels(spec: ModelSpec, rows: Sequence[np.ndarray]) -> list[Any] | None:
    """Each row's label of the largest score; None (JSON null) for a row with a score that is no number."""
    scored = (
        (t, a) for t, a in zip(spec.outputs, rows, strict=True) if t.kind in ("logits", "probabilities")
    )
    tensor, scores = next(scored, (None, rows[0]))
    if tensor is None or scores.ndim < 2 or scores.shape[-1] != len(tensor.labels):
        return None
    best = np.array(tensor.labels, dtype=object)[np.argmax(scores, axis=-1)]
    best[np.isnan(scores).any(axis=-1)] = None
    return best.tolist()
