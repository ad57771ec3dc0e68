"""An ONNX file as a side of a comparison: every value of its main graph, and the node that makes one."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from ...models.errors import BadFolder, NotRun
from ..exported.file_rows import write_npz
from ..graph.backend import GraphNode
from ..onnx.precision.watched_run import WatchedRun
from ..onnx.reading.bounded_file import PACKED_BITS, read_model
from ..onnx.reading.graph import attribute, read_by
from ..onnx.reading.large_files import weights_as_inputs
from ..question import Arrays
from .first_difference import FP32

_NOT_IN_NUMPY = {
    number
    for name, number in TensorProto.DataType.items()
    if name == "BFLOAT16" or name.startswith("FLOAT8") or name in PACKED_BITS
}
_ROUNDOFF: Mapping[object, float] = {TensorProto.FLOAT16: 2.0**-11, TensorProto.BFLOAT16: 2.0**-8}


@dataclass(frozen=True)
class OnnxSide:
    """``path``: an ONNX file, which is run by ONNX Runtime on a CPU."""

    path: Path

    @cached_property
    def model(self) -> ModelProto:
        return read_model(self.path, self.path.parent)

    @cached_property
    def nodes(self) -> list[GraphNode]:
        """One for each value that a node of the main graph makes."""
        return [
            GraphNode(
                output,
                f"{node.op_type} '{node.name}'" if node.name else node.op_type,
                tuple(sorted(read_by(node))),
            )
            for node in self.model.graph.node
            for output in node.output
            if output
        ]

    def tensors(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Every value by name. Raises NotRun where ONNX Runtime does not run the file with these inputs."""
        graph = self.model.graph
        wanted = {value.name for value in graph.input} - {each.name for each in self.model.graph.initializer}
        if missing := sorted(wanted - inputs.keys()):
            raise NotRun(f"{self.path} has the input '{missing[0]}', and the samples have {sorted(inputs)}")
        try:
            return WatchedRun(self.model, self._readable())(self._in_its_types(inputs))
        except Exception as error:  # ONNX Runtime has no narrower one
            raise NotRun(
                f"ONNX Runtime does not run {self.path} with the samples: {str(error)[:400]}"
            ) from error

    def _in_its_types(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """The inputs in the floating types that the file takes: those of a half may be half."""
        taken = {
            value.name: helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            for value in self.model.graph.input
            if value.name in inputs
        }
        return {
            name: inputs[name].astype(dtype) if inputs[name].dtype.kind == dtype.kind == "f" else inputs[name]
            for name, dtype in taken.items()
        }

    def _readable(self) -> list[str]:
        """The values that ONNX Runtime hands out as numpy arrays: neither sequences nor types that numpy has not."""
        graph = self.model.graph
        with suppress(
            onnx.shape_inference.InferenceError, ValueError
        ):  # ONNX Runtime may run it all the same
            graph = onnx.shape_inference.infer_shapes(weights_as_inputs(self.model)).graph
        types = {value.name: value.type for value in (*graph.value_info, *graph.output)}
        others = {
            name
            for name, kind in types.items()
            if kind.WhichOneof("value") not in (None, "tensor_type")
            or kind.tensor_type.elem_type in _NOT_IN_NUMPY
        }
        return [node.name for node in self.nodes if node.name not in others]

    def rows(self, arrays: Arrays, most: int) -> dict[str, np.ndarray]:
        """The first rows of the samples: as many as the file takes, at most ``most``; the first sample where a file
        that is not batched has one axis less than they have."""
        found = dict[str, np.ndarray]()
        for value in self.model.graph.input:
            if (array := arrays.get(value.name)) is not None:
                tensor = value.type.tensor_type
                alone = tensor.HasField("shape") and len(tensor.shape.dim) == array.ndim - 1
                fixed = tensor.shape.dim[0].dim_value if tensor.shape.dim else 0
                found[value.name] = array[0] if alone else array[: fixed or most]
        return found

    def roundoff(self) -> dict[str, float]:
        """The coarsest type on the way to each value: one that was half stays as coarse when it is cast back."""
        types = {each.name: each.type.tensor_type.elem_type for each in self.model.graph.input}
        types |= {each.name: each.data_type for each in self.model.graph.initializer}
        found = {name: _ROUNDOFF[kind] for name, kind in types.items() if kind in _ROUNDOFF}
        for node in self.model.graph.node:
            to = _ROUNDOFF.get(attribute(node, "to", 0), FP32) if node.op_type == "Cast" else FP32
            coarsest = max((to, *(found.get(name, FP32) for name in read_by(node))))
            found |= {name: coarsest for name in node.output if name}
        return found

    def reproduction(self, tensor: str, values: Mapping[str, np.ndarray], folder: Path) -> None:
        """Write the node that makes ``tensor`` as a model of its own, ``node.onnx``, with its inputs ``inputs.npz``.

        Raises BadFolder for a node with a body, and for one that reads what numpy does not have.
        """
        (node,) = (each for each in self.model.graph.node if tensor in each.output)
        if any(
            each.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for each in node.attribute
        ):
            raise BadFolder(f"the node {node.op_type} '{node.name}' has a body, which is not written alone")
        held = {each.name: each for each in self.model.graph.initializer}
        read = [name for name in node.input if name and name not in held]
        if absent := [name for name in read if name not in values]:
            raise BadFolder(
                f"the node {node.op_type} '{node.name}' reads '{absent[0]}', of a type that numpy does not have: it is "
                "not written alone"
            )
        given = {name: values[name] for name in read}
        graph = helper.make_graph(
            [node],
            "node",
            [_declared(name, array) for name, array in given.items()],
            [_declared(name, values[name]) for name in node.output if name in values],
            [held[name] for name in dict.fromkeys(node.input) if name in held],
        )
        made = helper.make_model(
            graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version
        )
        onnx.save(made, folder / "node.onnx")
        write_npz(folder / "inputs.npz", given)


def _declared(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, numpy_helper.from_array(array).data_type, array.shape)
