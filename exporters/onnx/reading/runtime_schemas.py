"""The element types that the inputs of ONNX Runtime's own operators (domain ``com.microsoft``) take.

ONNX Runtime's optimiser writes such operators into a file in the place of several of ONNX's.
"""

import functools
from collections.abc import Mapping

from onnx import NodeProto
from onnxruntime.capi import onnxruntime_pybind11_state as runtime  # type: ignore[attr-defined]

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
