"""Finds the inputs of a node that may be half: by ONNX's schema, then by this machine's ONNX Runtime on that node."""

from collections.abc import Mapping

import onnx
from onnx import NodeProto

from ...policy.classes import NO_HALF_KERNEL, Trait, has
from ..reading.graph import HALVES, ForeignProgram, attribute, schema_of
from ..reading.one_node import FUSED, Key, inputs_taking, key_of, output_types, refusal
from .op_lists import FP32_SLOTS

_NAMES = {"fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}


class Kernels:
    """The kernels for one program and one half type; the runtime's answers are cached for the entire process."""

    def __init__(self, program: ForeignProgram, dtype: str) -> None:
        self.program, self.dtype, self.half = program, dtype, HALVES[dtype]
        self._slots: dict[str, frozenset[int]] = {}

    def slots(self, node: NodeProto) -> frozenset[int]:
        """The FP32 inputs that are half where the node computes in half."""
        if node.name not in self._slots:
            self._slots[node.name] = frozenset(self._free_slots(node))
        return self._slots[node.name]

    def _free_slots(self, node: NodeProto) -> list[int]:
        floats = [slot for slot, name in enumerate(node.input) if self.program.is_float(name)]
        if node.domain == FUSED:
            takes_half = inputs_taking(node, _NAMES[self.dtype])
            return [slot for slot in floats if slot in takes_half]
        schema = schema_of(node, self.program.opset)
        if schema is None:
            return []
        fixed = FP32_SLOTS.get(node.op_type, set())
        return [slot for slot in floats if slot not in fixed and self._schema_takes(schema, slot)]

    def _schema_takes(self, schema: onnx.defs.OpSchema, slot: int) -> bool:
        formal = schema.inputs[min(slot, len(schema.inputs) - 1)].type_str
        allowed: Mapping[str, object] = {
            entry.type_param_str: entry.allowed_type_strs for entry in schema.type_constraints
        }
        return _NAMES[self.dtype] in (allowed.get(formal) or (formal,))  # type: ignore[operator]

    def key(self, node: NodeProto) -> Key:
        """The node in the version that computes in half."""
        half = self.slots(node)
        types = [
            self.half if slot in half else self.program.types.get(name, 0)
            for slot, name in enumerate(node.input)
        ]
        return key_of(node, types, self.program.model.opset_import, self.program.model.ir_version)

    def refusal(self, node: NodeProto) -> str | None:
        """The reason why a node cannot compute in half; None where it can."""
        floats = [slot for slot, name in enumerate(node.input) if self.program.is_float(name)]
        if floats and has(node.op_type, Trait.RECURRENT):
            return NO_HALF_KERNEL
        if not self.slots(node):
            return f"{node.op_type} takes no {self.dtype} at opset {self.program.opset}" if floats else None
        if node.op_type.startswith("Scatter") and attribute(node, "reduction", b"none") != b"none":
            return f"no {self.dtype} kernel: ONNX Runtime refuses a {node.op_type} that reduces, but only when it runs"
        key = self.key(node)
        try:
            output_types(key)
        except ValueError as error:
            return f"ONNX: {error}"
        if reason := refusal(key):
            return f"no {self.dtype} kernel in this ONNX Runtime ({reason[:120]})"
        return None

    def outputs(self, node: NodeProto) -> list[bool]:
        """True for each output that is half when the node computes in half."""
        return [type_ == self.half for type_ in output_types(self.key(node))]
