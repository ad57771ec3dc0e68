"""One node as a model of its own: whether ONNX Runtime takes it, the types of its outputs, and a way to run it."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import (
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    helper,
    shape_inference,
)
from onnxruntime.capi import onnxruntime_pybind11_state as runtime  # type: ignore[attr-defined]

from ...policy.classes import Rule, Trait, class_of, has
from ...proof.threads import threads_now
from .graph import ONNX, element_type_of, schema_of

PROVIDERS = ("CPUExecutionProvider",)
_FP8 = {type_ for name, type_ in TensorProto.DataType.items() if name.startswith("FLOAT8")}
_EIGHT_BITS: dict[int, int] = {
    getattr(TensorProto, f"{sign}INT{bits}"): getattr(TensorProto, f"{sign}INT8")
    for sign in ("", "U")
    for bits in (2, 4)
}
_READ_AS_EIGHT_BITS = ("DequantizeLinear", "Cast")  # they answer the same

Key = tuple[bytes, tuple[int, ...], tuple[tuple[str, int], ...], int]


def key_of(
    node: NodeProto, types: Sequence[int], opsets: Sequence[OperatorSetIdProto], ir_version: int
) -> Key:
    """A key of the node's computation, without the names of the node and its values: equal nodes share a session."""
    bare = NodeProto()
    bare.CopyFrom(node)
    bare.name, bare.doc_string = "", ""
    bare.input[:] = [f"i{slot}" if name else "" for slot, name in enumerate(node.input)]
    bare.output[:] = [f"o{slot}" if name else "" for slot, name in enumerate(node.output)]
    del bare.metadata_props[:]
    return (
        bare.SerializeToString(),
        tuple(types),
        tuple((entry.domain, entry.version) for entry in opsets),
        ir_version,
    )


def _model(key: Key) -> ModelProto:
    node = NodeProto.FromString(key[0])
    inputs = {
        name: helper.make_tensor_value_info(name, type_, None)
        for name, type_ in zip(node.input, key[1], strict=True)
        if name
    }
    outputs = [ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "one", list(inputs.values()), outputs)
    opsets = [helper.make_opsetid(*entry) for entry in key[2]]
    return helper.make_model(graph, opset_imports=opsets, ir_version=key[3])


def session(key: Key) -> onnxruntime.InferenceSession:
    """A session with as many threads as sessions have now (`proof.threads`). Raises ONNX Runtime's own error where it
    has no kernel."""
    return _session(key, threads_now())


@functools.lru_cache(maxsize=4096)
def _session(key: Key, threads: int) -> onnxruntime.InferenceSession:
    # A pool of threads for each of a thousand nodes is too many.
    return opened(_model(key), threads if _is_heavy(NodeProto.FromString(key[0]).op_type) else 1)


def opened(model: ModelProto, threads: int) -> onnxruntime.InferenceSession:
    """A session that computes the nodes of a small model as they stand."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False  # each of a thousand arenas would keep its largest batch
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=list(PROVIDERS))


def results_of(key: Key, feed: Mapping[str, Any]) -> Sequence[Any]:
    """The results of the node. ``feed``: its inputs, by ``i`` and their place.

    ONNX Runtime takes no NumPy array of FP8 or of few bits: FP8 is given as its own kind of value, two and four bits as
    eight.
    """
    if not any(type_ in _FP8 or type_ in _EIGHT_BITS for type_ in key[1]):
        return session(key).run(None, dict(feed))
    types = key[1]
    if NodeProto.FromString(key[0]).op_type in _READ_AS_EIGHT_BITS:
        types = tuple(_EIGHT_BITS.get(type_, type_) for type_ in types)
    given = {name: _held(array, types[int(name[1:])]) for name, array in feed.items()}
    found = session((key[0], types, *key[2:])).run_with_ort_values(None, given)
    return [value.numpy() for value in found]


def _held(array: np.ndarray, type_: int) -> onnxruntime.OrtValue:
    if type_ in _FP8:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint8), type_)
    return onnxruntime.OrtValue.ortvalue_from_numpy(
        array.astype(helper.tensor_dtype_to_np_dtype(type_), copy=False)
    )


def _is_heavy(op: str) -> bool:
    return class_of(op).o1 is Rule.LOWER or has(op, Trait.RECURRENT)


@functools.lru_cache(maxsize=65536)
def refusal(key: Key) -> str | None:
    """The reason why this ONNX Runtime cannot run the node with these types; None where it can."""
    try:
        session(key)
    except Exception as error:
        return str(error).replace("\n", " ")[:300]
    return None


@functools.lru_cache(maxsize=65536)
def output_types(key: Key) -> tuple[int, ...]:
    """The element type of each output, 0 where it is no tensor; by ONNX's own rules, else by asking the runtime.

    Raises ValueError where neither knows.
    """
    node = NodeProto.FromString(key[0])
    opset = next((version for domain, version in key[2] if domain in ONNX), 1)
    schema = schema_of(node, opset)
    if schema is not None:
        try:
            return _inferred(node, key, schema)
        except Exception as error:
            raise ValueError(f"'{node.op_type}' does not take the types {list(key[1])}: {error}") from error
    if reason := refusal(key):
        raise ValueError(
            f"'{node.domain}.{node.op_type}' is an op that neither ONNX nor this ONNX Runtime knows: {reason}"
        )
    found = iter(session(key).get_outputs())
    return tuple(element_type_of(next(found).type) if name else 0 for name in node.output)


def _inferred(node: NodeProto, key: Key, schema: object) -> tuple[int, ...]:
    types = {name: _tensor(type_) for name, type_ in zip(node.input, key[1], strict=True) if name}
    opsets = [helper.make_opsetid(*entry) for entry in key[2]]
    found = shape_inference.infer_node_outputs(schema, node, types, opset_imports=opsets, ir_version=key[3])  # type: ignore[arg-type]
    return tuple(found[name].tensor_type.elem_type if name in found else 0 for name in node.output)


def _tensor(element: int) -> TypeProto:
    return helper.make_tensor_type_proto(element, None)


FUSED = "com.microsoft"


def inputs_taking(node: NodeProto, type_: str) -> frozenset[int]:
    """The inputs of a node of ONNX Runtime's domain that may have this element type (``tensor(float16)``).

    Empty for an operator that this ONNX Runtime does not have. Source: its registry of schemas, which no public
    function gives; without it every input of each operator would have to be tried by a session.
    """
    formal = _inputs().get(node.op_type, ())
    return frozenset(slot for slot, types in enumerate(formal) if type_ in types and slot < len(node.input))


@functools.cache
def _inputs() -> Mapping[str, tuple[frozenset[str], ...]]:
    """Operator → the types that each of its inputs takes."""
    found = {}
    for schema in runtime.get_all_operator_schema():
        if schema.domain == FUSED:
            types = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
            found[schema.name] = tuple(
                frozenset(types.get(formal.typeStr, [formal.typeStr])) for formal in schema.inputs
            )
    return found
