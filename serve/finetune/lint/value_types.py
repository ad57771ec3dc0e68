"""The floating type that an expression of a script has under CUDA autocast, as far as its text shows it.

The type of an operation is that of the table which plans follow (`exporters/policy/classes.py`).
"""

import ast
from collections.abc import Sequence
from enum import Enum

from ....exporters.policy.classes import Rule, class_of
from .script_names import ScriptNames, dotted
from .walk import Located, Place

_DEEPEST = 12  # expressions and names that one value is followed through
_LIKE_THEIR_INPUTS = frozenset(
    {"sigmoid", "tanh", "gelu", "silu", "leaky_relu", "elu", "max", "min", "square", "logit"}
)
_HALF_LAYERS = ("torch.nn.Linear", "torch.nn.Conv", "torch.nn.Bilinear")
_HALVES = ("torch.float16", "torch.half")


class Type(Enum):
    HALF = "half"
    MODULE = "of a module"  # half where its last layer is a product, FP32 where it is a softmax
    NUMBER = "a Python number"
    UNKNOWN = "FP32, or not known"


class ValueTypes:
    def __init__(self, names: ScriptNames, in_half: bool) -> None:
        """``in_half``: whether the scripts that are read together compute in FP16 at all."""
        self._names, self._in_half = names, in_half
        self._modules = {
            receiver for name in ("parameters", "train", "eval") for _, receiver, _ in names.methods(name)
        }

    def casts_to_half(self, place: Place) -> bool:
        """Whether products at this place are half: in an autocast region, or in a module's forward."""
        for region in reversed(place.regions):
            if isinstance(region, ast.Call) and "autocast" in (dotted(region.func) or ""):
                return self._names.autocast_of(place) is region and self._names.of_half(region)
        in_module = any(
            (self._names.full(base) or "").endswith("Module") for one in place.classes for base in one.bases
        )
        return (
            in_module
            and self._in_half
            and isinstance(place.scope, ast.FunctionDef)
            and place.scope.name == "forward"
        )

    def type_of(self, node: ast.expr, at: Located, depth: int = 0) -> Type:
        if depth > _DEEPEST:
            return Type.UNKNOWN
        match node:
            case ast.Constant(value=bool() | int() | float()):
                return Type.NUMBER
            case ast.UnaryOp(operand=operand):
                return self.type_of(operand, at, depth + 1)
            case ast.BinOp(left=left, op=op, right=right):
                if isinstance(op, ast.MatMult):
                    return Type.HALF if self.casts_to_half(at.place) else Type.UNKNOWN
                if isinstance(op, ast.Pow) and self.casts_to_half(at.place):
                    return Type.UNKNOWN
                return _joined([self.type_of(left, at, depth + 1), self.type_of(right, at, depth + 1)])
            case ast.Subscript(value=value):
                return self.type_of(value, at, depth + 1)
            case ast.Call():
                return self._of_call(node, at, depth)
            case ast.Name(id=name):
                value = self._names.last_value(name, at)
                bound = next((one for found, one in self._names.values.get(name, ()) if found is value), None)
                return (
                    Type.UNKNOWN if value is None or bound is None else self.type_of(value, bound, depth + 1)
                )
        return Type.UNKNOWN

    def _of_call(self, call: ast.Call, at: Located, depth: int) -> Type:
        name = self._names.full(call.func) or ""
        if layer := self._layer(dotted(call.func) or ""):
            return layer if self.casts_to_half(at.place) or layer is Type.MODULE else Type.UNKNOWN
        of_torch = name.startswith("torch.")
        operation = name.rpartition(".")[2] if of_torch else getattr(call.func, "attr", "")
        inputs = call.args if of_torch else [getattr(call.func, "value", call), *call.args]
        if not operation or (not of_torch and not isinstance(call.func, ast.Attribute)):
            return Type.UNKNOWN
        if operation in ("half", "float"):
            return Type.HALF if operation == "half" else Type.UNKNOWN
        if operation == "to":
            return self._converted(call, inputs, at, depth)
        rule = class_of(operation).o1
        if rule in (Rule.LOWER, Rule.FP32, Rule.FP32_DTYPE):
            if not self.casts_to_half(at.place):
                return Type.UNKNOWN
            return Type.HALF if rule is Rule.LOWER else Type.UNKNOWN
        if class_of(operation).name == "other" and operation not in _LIKE_THEIR_INPUTS:
            return Type.UNKNOWN
        types = [self.type_of(one, at, depth + 1) for one in inputs if not isinstance(one, ast.Starred)]
        # Who squashes or averages what a module gives has its logits there, which a product made.
        if operation in ("sigmoid", "tanh", "mean", "std", "var", "abs", "relu") and self.casts_to_half(
            at.place
        ):
            types = [Type.HALF if one is Type.MODULE else one for one in types]
        return _joined(types)

    def _layer(self, name: str) -> Type | None:
        """What a call of this name gives, where it is a layer of torch or a module of the script's."""
        made = [value for value, _ in self._names.values.get(name, ()) if isinstance(value, ast.Call)]
        kinds = [self._names.full(value.func) or "" for value in made]
        if kinds and all(kind.startswith(_HALF_LAYERS) for kind in kinds):
            return Type.HALF
        return Type.MODULE if name in self._modules and name != "self" else None

    def _converted(self, call: ast.Call, inputs: Sequence[ast.expr], at: Located, depth: int) -> Type:
        words = [word.value for word in call.keywords if word.arg == "dtype"]
        kinds = {self._names.full(one) or "" for one in [*call.args, *words]}
        if kinds & set(_HALVES):
            return Type.HALF
        if kinds & {"torch.float32", "torch.float"}:
            return Type.UNKNOWN
        devices = [
            one for one in call.args if isinstance(one, ast.Constant) or "device" in (dotted(one) or "")
        ]
        same = len(devices) == len(call.args) and not words
        return self.type_of(inputs[0], at, depth + 1) if same else Type.UNKNOWN


def _joined(types: Sequence[Type]) -> Type:
    """The type of an operation that follows its inputs."""
    tensors = [one for one in types if one is not Type.NUMBER]
    if not tensors:
        return Type.NUMBER
    return Type.HALF if all(one is Type.HALF for one in tensors) else Type.UNKNOWN
