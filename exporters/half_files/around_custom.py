"""An ONNX file without its custom nodes, as a file of its own: it is converted and proven in place of the whole, with
the recorded answers of these nodes among the samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper

from ...models.errors import BadSamples
from ...models.folder.package import ModelFolder
from ..exported.file_rows import write_npz
from ..guessing.bare import TOML, folder_at
from ..inputs.samples import as_fp32, read_tensors
from ..onnx.custom_nodes import Parts, called, cut, parted
from ..onnx.reading.bounded_file import read_graph, read_model
from ..onnx.reading.graph import element_type
from ..onnx.reading.large_files import save


@dataclass(frozen=True, slots=True)
class AroundCustom:
    """``whole``: the file as it was given; ``folder`` and ``samples``: of the cut file."""

    whole: ModelProto
    folder: ModelFolder
    samples: Path | None

    def facts(self) -> dict[str, Any]:
        """The value of ``around`` in the proof's manifest."""
        parts = parted(self.whole)
        nodes = [called(node) for node in parts.custom]
        return {"nodes": nodes, "recorded": parts.recorded, "read": parts.read}


def around_custom(source: Path, samples: Path | None, name: str | None, place: Path) -> AroundCustom | None:
    """Write the cut file and its samples into ``place``; None where ONNX Runtime knows all nodes, and where a
    model.toml stands beside the file. Raises BadSamples where recorded answers are missing, BadFolder as `parted` and
    `cut`."""
    if source.suffix != ".onnx" or not source.is_file() or (source.parent / TOML).exists():
        return None
    if not parted(read_graph(source)).custom:
        return None
    whole, model = read_model(source, source.parent), ModelProto()
    parts = parted(whole)
    arrays = dict(read_tensors(samples)) if samples and not samples.is_dir() else {}
    _check_recorded(source, whole, parts, arrays)
    model.CopyFrom(whole)
    cut(model, _types(whole, parts, arrays))
    place.mkdir()
    save(model, place / source.name)
    if samples and samples.is_file():
        unread = set(parts.made) - set(parts.recorded)
        samples = place / "samples.npz"
        write_npz(samples, {name: array for name, array in arrays.items() if name not in unread})
    return AroundCustom(whole, folder_at(place / source.name, samples, name), samples)


def _check_recorded(source: Path, whole: ModelProto, parts: Parts, arrays: Mapping[str, np.ndarray]) -> None:
    stated = _stated(whole)
    if missing := [name for name in parts.recorded if name not in arrays]:
        nodes = ", ".join(called(node) for node in parts.custom)
        asked = ", ".join(f"'{name}'{_sizes(stated.get(name))}" for name in missing)
        raise BadSamples(
            f"{source}: ONNX Runtime does not know {nodes}. All else of the file can be converted where --samples "
            "holds, beside the inputs, what these nodes answer in FP32 in the same rows: expected the arrays "
            f"{asked} too, or cut the nodes off (onnx.utils.extract_model)"
        )


def _stated(whole: ModelProto) -> dict[str, ValueInfoProto]:
    return {
        value.name: value
        for value in (*whole.graph.value_info, *whole.graph.output)
        if value.type.tensor_type.elem_type and value.type.tensor_type.HasField("shape")
    }


def _sizes(value: ValueInfoProto | None) -> str:
    if value is None:
        return ""
    dims = value.type.tensor_type.shape.dim
    return f" [{', '.join(str(dim.dim_value or dim.dim_param or '?') for dim in dims)}]"


def _types(whole: ModelProto, parts: Parts, arrays: Mapping[str, np.ndarray]) -> dict[str, ValueInfoProto]:
    """The types of the recorded answers: as the file states them, else as the arrays are, with the batch in front as
    the first input has it."""
    stated, constants = _stated(whole), {tensor.name for tensor in whole.graph.initializer}
    first = next(value for value in whole.graph.input if value.name not in constants)
    dims = first.type.tensor_type.shape.dim
    batch = [dims[0].dim_value or dims[0].dim_param or None] if dims else []
    if first.name in arrays and arrays[first.name].ndim > len(dims):
        batch = []  # each sample is a whole input
    found = dict[str, ValueInfoProto]()
    for name in parts.recorded:
        array = arrays[name]
        array = as_fp32(array, "FP32") if array.dtype.kind in "fV" else array
        own = helper.make_tensor_value_info(name, element_type(array), [*batch, *array.shape[1:]])
        found[name] = stated.get(name, own)
    return found
