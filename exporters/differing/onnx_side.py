"""An ONNX file as a side of a comparison: every value of its main graph, and the node that makes one."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from ...models.errors import BadFolder, BadSetting, NotRun
from ..exported.file_rows import write_npz
from ..graph.backend import GraphNode
from ..inputs.samples import as_fp32
from ..onnx.reading.bounded_file import PACKED_BITS, read_model
from ..onnx.reading.graph import attribute, read_by
from ..onnx.reading.large_files import save, weights_as_inputs
from ..onnx.reading.signature import datatype_of
from ..onnx.runtime import session_of
from ..question import Arrays
from .elsewhere import NO_TENSOR, tensors_elsewhere
from .units import FP32, ROUNDOFF, unit_of_each

_NOT_IN_NUMPY = {
    number
    for name, number in TensorProto.DataType.items()
    if name == "BFLOAT16" or name.startswith("FLOAT8") or name in PACKED_BITS
}
_ROUNDOFF: Mapping[object, float] = {
    TensorProto.FLOAT16: ROUNDOFF["float16"],
    TensorProto.BFLOAT16: ROUNDOFF["bfloat16"],
}
GIVEN = "given:"  # before the name of a value that a node reads in place of its own


@dataclass(frozen=True)
class OnnxSide:
    """``path``: an ONNX file, which is run by ONNX Runtime on a CPU; by that of ``python`` where it is given."""

    path: Path
    python: Path | None = None
    takes_others = True

    @property
    def steps(self) -> Sequence[tuple[str, str, frozenset[str]]]:
        """A file has none: they are the calls of a program."""
        return ()

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

    @cached_property
    def inputs(self) -> dict[str, str]:
        held = {each.name for each in self.model.graph.initializer}
        return {value.name: value.name for value in self.model.graph.input if value.name not in held}

    @cached_property
    def outputs(self) -> dict[str, str]:
        return {value.name: value.name for value in self.model.graph.output}

    def tensors(self, inputs: Arrays, given: Arrays | None = None) -> dict[str, np.ndarray]:
        """Every value by name. Raises NotRun where ONNX Runtime does not run the file with these inputs."""
        given = given or {}
        if missing := sorted(self.inputs.keys() - inputs.keys()):
            raise NotRun(f"{self.path} has the input '{missing[0]}', and the samples have {sorted(inputs)}")
        feed = self._in_its_types(inputs) | {GIVEN + name: array for name, array in given.items()}
        try:
            found = self._ran(self.watched(given), feed)
        except BadSetting:
            raise
        except Exception as error:  # ONNX Runtime has no narrower one
            raise NotRun(
                f"ONNX Runtime does not run {self.path} with the samples: {str(error)[:400]}"
            ) from error
        return found | {name: feed[name] for name in self.inputs}

    def _ran(self, watched: ModelProto, feed: Arrays) -> dict[str, np.ndarray]:
        if self.python is not None:
            with TemporaryDirectory(prefix="halfeven-diff-") as place:
                save(watched, Path(place) / "model.onnx")
                return tensors_elsewhere(self.python, Path(place) / "model.onnx", feed)
        session = session_of(watched)
        names = [value.name for value in session.get_outputs()]
        came = zip(names, session.run(names, dict(feed)), strict=True)
        return {name: np.asarray(value) for name, value in came if not isinstance(value, NO_TENSOR)}

    def watched(self, given: Arrays) -> ModelProto:
        """The model with all readable values as outputs, and those that are given as inputs of the nodes that read
        them (bodies read their own)."""
        watched = ModelProto()
        watched.CopyFrom(self.model)
        known = {value.name for value in watched.graph.output}
        watched.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in dict.fromkeys(self._readable) if name not in known
        )
        for name, array in given.items():
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            watched.graph.input.append(helper.make_tensor_value_info(GIVEN + name, kind, array.shape))
        for node in watched.graph.node:
            node.input[:] = [GIVEN + name if name in given else name for name in node.input]
        return watched

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

    @cached_property
    def types(self) -> dict[str, onnx.TypeProto]:
        """The types of the inner values and of the outputs, where shape inference finds them."""
        graph = self.model.graph
        # ONNX Runtime may run a file without shapes all the same.
        with suppress(onnx.shape_inference.InferenceError, ValueError):
            graph = onnx.shape_inference.infer_shapes(weights_as_inputs(self.model)).graph
        return {value.name: value.type for value in (*graph.value_info, *graph.output)}

    @cached_property
    def _readable(self) -> list[str]:
        """The values that ONNX Runtime hands out as numpy arrays: neither sequences nor types that numpy has not."""
        others = {
            name
            for name, kind in self.types.items()
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
                rows = array[0, ...] if alone else array[: fixed or most]
                found[value.name] = as_fp32(rows, datatype_of(value))
        return found

    def units(self, tensors: Arrays, known: Collection[str]) -> dict[str, float]:
        graph = self.model.graph
        types = {each.name: int(each.type.tensor_type.elem_type) for each in graph.input}
        types |= {each.name: each.data_type for each in graph.initializer}
        types |= {
            name: attribute(node, "to", 0)
            for node in graph.node
            if node.op_type == "Cast"
            for name in node.output
        }
        own = {name: _ROUNDOFF[kind] for name, kind in types.items() if kind in _ROUNDOFF}
        own |= {name: ROUNDOFF.get(array.dtype.name, FP32) for name, array in tensors.items()}
        return unit_of_each(self.nodes, own, known)

    def reproduction(self, tensor: str, values: Mapping[str, np.ndarray], folder: Path) -> None:
        """Write the node that makes ``tensor`` as a model of its own, ``node.onnx``, with its inputs ``inputs.npz``.

        Raises BadFolder for an input or a weight, for a node with a body, and for one that reads what numpy does not
        have.
        """
        node = next((each for each in self.model.graph.node if tensor in each.output), None)
        if node is None:
            raise BadFolder(f"no node makes '{tensor}': it is an input or a weight")
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
            graph,
            opset_imports=self.model.opset_import,
            ir_version=self.model.ir_version,
            functions=self.model.functions,
        )
        onnx.save(made, folder / "node.onnx")
        write_npz(folder / "inputs.npz", given)


def _declared(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, numpy_helper.from_array(array).data_type, array.shape)
