"""The floating type that an expression of a script has under CUDA autocast, as far as its text shows it.

The type of an operation is that of the table which plans follow (`exporters/policy/classes.py`).
"""

import ast
from collections.abc import Sequence
from enum import Enum

from ....exporters.policy.classes import Rule, class_of
from .flow import Flow, Frame
from .own_code import Function, dotted, method_of, receiver_of, words_of
from .walk import Located, text_of

_DEEPEST = 12  # expressions and names that one value is followed through
_LIKE_THEIR_INPUTS = frozenset(
    {
        "sigmoid",
        "tanh",
        "silu",
        "leaky_relu",
        "elu",
        "max",
        "min",
        "square",
        "logit",
        "cuda",
        "cpu",
        "dropout",
        "pin_memory",
    }
    | {"unbind", "index_select", "narrow", "roll", "flip", "masked_select", "maximum", "minimum", "hardtanh"}
)
_LIKE_LAYERS = ("torch.nn.ReLU", "torch.nn.Dropout", "torch.nn.Identity", "torch.nn.Flatten", "torch.nn.Sigmoid",
                "torch.nn.Tanh", "torch.nn.GELU", "torch.nn.SiLU", "torch.nn.LeakyReLU")  # fmt: skip
_HALF_LAYERS = ("torch.nn.Linear", "torch.nn.Conv", "torch.nn.Bilinear")
_WIDE_LAYERS = ("torch.nn.LayerNorm", "torch.nn.Softmax", "torch.nn.LogSoftmax", "torch.nn.Embedding")
_FACTORIES = frozenset({"ones", "zeros", "full", "rand", "randn", "linspace", "eye"})
_MOVES = frozenset({"cuda", "to", "cpu", "half", "float", "train", "eval", "requires_grad_"})
_WRAPPERS = ("DataParallel", "DDP", "compile", "FullyShardedDataParallel")
HALVES = ("torch.float16", "torch.half")
WIDES = ("torch.float32", "torch.float")


class Type(Enum):
    HALF = "half"
    WIDE = "FP32"
    MODULE = "of a module"  # half where its last layer is a product, FP32 where it is a softmax
    NUMBER = "a Python number"
    UNKNOWN = "not known"


class ValueTypes:
    def __init__(self, flow: Flow, in_half: bool) -> None:
        """``in_half``: True if any of the scripts that are read together computes in FP16."""
        self.flow, self._names, self._in_half = flow, flow.names, in_half
        self._modules = {
            receiver
            for name in ("parameters", "train", "eval")
            for _, receiver, _ in self._names.methods(name)
        }
        self._known: dict[tuple[ast.expr, Frame], Type] = {}

    def casts_to_half(self, at: Located, frame: Frame) -> bool:
        """True if products at this place are half: in an autocast region, or in a method of a module."""
        for item in reversed(frame.placed(at).regions):
            region = self._names.behind(item)
            if isinstance(region, ast.Call) and (self._names.full(region.func) or "").endswith("autocast"):
                return self._names.autocast_of(frame.placed(at)) is region and self._names.of_half(region)
        in_module = any(
            (self._names.full(base) or "").endswith("Module")
            for one in at.place.classes
            for base in one.bases
        )
        scope = at.place.scope
        return in_module and self._in_half and isinstance(scope, ast.FunctionDef) and scope.name != "__init__"

    def type_of(self, node: ast.expr, at: Located, frame: Frame, depth: int = 0) -> Type:
        if depth > _DEEPEST:
            return Type.UNKNOWN
        key = (node, frame)
        if key not in self._known:
            self._known[key] = Type.UNKNOWN  # while it is looked at: a value that comes from itself
            self._known[key] = self._of(node, at, frame, depth + 1)
        return self._known[key]

    def _of(self, node: ast.expr, at: Located, frame: Frame, depth: int) -> Type:
        def of(inner: ast.expr) -> Type:
            return self.type_of(inner, at, frame, depth)

        match node:
            case ast.Constant(value=bool() | int() | float()):
                return Type.NUMBER
            case ast.UnaryOp(operand=value) | ast.Subscript(value=value):
                return of(value)
            case ast.BinOp(left=left, op=op, right=right):
                if isinstance(op, ast.MatMult):
                    return Type.HALF if self.casts_to_half(at, frame) else Type.UNKNOWN
                if isinstance(op, ast.Pow) and self.casts_to_half(at, frame):
                    return Type.WIDE
                types = [of(left), of(right)]
                if isinstance(op, ast.Add) and Type.HALF in types and _masks(right):
                    return Type.HALF if Type.WIDE not in types else Type.WIDE
                return joined(types)
            case ast.IfExp(body=body, orelse=orelse):
                both = {of(body), of(orelse)}
                return both.pop() if len(both) == 1 else Type.UNKNOWN
            case ast.Call():
                return self._of_call(node, at, frame, depth)
            case ast.Name() | ast.Attribute():
                value, there, where = self.flow.value(node, at, frame)
                same = isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "data", "grad")
                if value is None and same and isinstance(node, ast.Attribute):
                    return of(node.value)
                if value is None:
                    return Type.NUMBER if _is_number_by_default(node, frame.scope) else Type.UNKNOWN
                return self.type_of(value, there, where, depth)
        return Type.UNKNOWN

    def _of_call(self, call: ast.Call, at: Located, frame: Frame, depth: int) -> Type:
        name = self._names.full(call.func) or ""
        target = self.flow.target(call, frame)
        if target is not None and target is not frame.scope and target.name != "__init__":
            return self._of_own(target, call, at, frame, depth)
        in_half = self.casts_to_half(at, frame)
        if method_of(call) == "apply" and in_half:
            return self._of_autograd_function(dotted(receiver_of(call)) or "")
        if layer := self._layer(call.func, at, frame):
            return layer if in_half else self._outside(call.func, layer, frame)
        operation, inputs = self._names.operation(call)
        if not operation or (not name.startswith("torch.") and not method_of(call)):
            return Type.UNKNOWN
        if operation in ("half", "float"):
            return Type.HALF if operation == "half" else Type.WIDE
        if operation in ("to", "type", "tensor", "as_tensor", *_FACTORIES):
            return self._converted(call, operation, inputs, at, frame, depth)
        rule = class_of(operation.rstrip("_")).o1
        if rule in (Rule.LOWER, Rule.FP32, Rule.FP32_DTYPE):
            if in_half:
                return Type.HALF if rule is Rule.LOWER else Type.WIDE
            return self.type_of(inputs[0], at, frame, depth) if inputs else Type.UNKNOWN
        if class_of(operation).name == "other" and operation not in _LIKE_THEIR_INPUTS:
            return Type.UNKNOWN
        inputs = [one for one in inputs if not isinstance(one, ast.Starred)]
        inputs = [*inputs[:1], *(one for one in inputs[1:] if operation in _SEVERAL)]
        types = [self.type_of(one, at, frame, depth) for one in inputs]
        # A value that is squashed or averaged and comes from a module is its logits, which a product made.
        if operation in ("sigmoid", "tanh", "mean", "std", "var", "abs", "relu") and in_half:
            types = [Type.HALF if one is Type.MODULE else one for one in types]
        return joined(types)

    def _of_own(self, target: Function, call: ast.Call, at: Located, frame: Frame, depth: int) -> Type:
        inner = self.flow.entered(target, call, at, frame, self._names.statements.of(call))
        ends = {
            self.type_of(one, self.flow.end_of(target), inner, depth)
            for one in self._names.own.returns(target)
        }
        found = ends.pop() if len(ends) == 1 else Type.UNKNOWN
        return Type.MODULE if found is Type.UNKNOWN and target.name == "forward" else found

    def _of_autograd_function(self, kind: str) -> Type:
        """Half where the script's own autograd function returns a product unchanged; else not known."""
        forward = self._names.own.method(kind, "forward")
        if forward is None or any("cast_inputs" in text_of(one) for one in forward.decorator_list):
            return Type.UNKNOWN
        products = [
            isinstance(one, ast.BinOp) and isinstance(one.op, ast.MatMult)
            for one in self._names.own.returns(forward)
        ]
        return Type.HALF if products and all(products) else Type.UNKNOWN

    def _layer(self, func: ast.expr, at: Located, frame: Frame) -> Type | None:
        """The type that a call of ``func`` gives if this is a layer of torch or a module of the script; else None."""
        name = self.flow.name(func, frame) or ""
        values = [value for value, _ in self._names.values.get(name, ())]
        if isinstance(func, ast.Name) and func.id in frame.arguments:
            values = [frame.arguments[func.id][0]]
        kinds = {self._layer_made(value) for value in values}
        if len(kinds) == 1 and (kind := kinds.pop()) is not None:
            return kind
        return Type.MODULE if name in self._modules and name != "self" else None

    def _outside(self, func: ast.expr, layer: Type, frame: Frame) -> Type:
        """The type of the result outside of autocast: half where the module's weights are half."""
        values = self._names.values_of(self.flow.name(func, frame) or "")
        if any(self.is_half_cast(one) for value in values for one in ast.walk(value)):
            return Type.HALF
        return Type.MODULE if layer is Type.MODULE else Type.UNKNOWN

    def is_half_cast(self, node: ast.AST) -> bool:
        """True if the node casts a value to half: `x.half()`, `x.to(torch.float16)`."""
        if not isinstance(node, ast.Call) or method_of(node) not in ("to", "type"):
            return method_of(node) == "half"
        return any(self._names.full(one) in HALVES for one in [*node.args, *words_of(node, "dtype")])

    def _layer_made(self, value: ast.expr | None) -> Type | None:
        if not isinstance(value, ast.Call):
            return None
        full = self._names.full(value.func) or ""
        if method_of(value) in _MOVES and not full.startswith("torch."):
            return self._layer_made(receiver_of(value))
        if full.rpartition(".")[2].endswith(_WRAPPERS) and value.args:
            values = self._names.values.get(dotted(value.args[0]) or "", ())
            made = [inner for inner, _ in values if inner is not value]
            return self._layer_made(made[0] if len(made) == 1 else value.args[0])
        if full == "torch.nn.Sequential" and value.args:
            kinds = [(one, self._names.full(getattr(one, "func", one)) or "") for one in value.args]
            last = [one for one, kind in kinds if not kind.startswith(_LIKE_LAYERS)]
            return self._layer_made(last[-1]) if last else None
        if full.startswith(_HALF_LAYERS):
            return Type.HALF
        return Type.WIDE if full.startswith(_WIDE_LAYERS) else None

    def _converted(
        self,
        call: ast.Call,
        operation: str,
        inputs: Sequence[ast.expr],
        at: Located,
        frame: Frame,
        depth: int,
    ) -> Type:
        words = words_of(call, "dtype")
        for one in [*call.args, *words]:
            full = self._names.full(one) or ""
            if full in (*HALVES, *WIDES):
                return Type.HALF if full in HALVES else Type.WIDE
            if isinstance(one, ast.Attribute) and one.attr == "dtype":
                return self.type_of(one.value, at, frame, depth)
        if operation in ("tensor", "as_tensor"):
            return Type.UNKNOWN if words or not call.args else self.type_of(call.args[0], at, frame, depth)
        if operation in _FACTORIES:
            return Type.UNKNOWN if words else Type.WIDE
        to_device = all(isinstance(one, ast.Constant) or "device" in (dotted(one) or "") for one in call.args)
        return self.type_of(inputs[0], at, frame, depth) if to_device and not words else Type.UNKNOWN


_SEVERAL = frozenset(
    {"add", "sub", "mul", "div", "true_divide", "maximum", "minimum", "where", "lerp", "addcmul"}
)


def joined(types: Sequence[Type]) -> Type:
    """The type of an operation that follows its inputs."""
    tensors = [one for one in types if one is not Type.NUMBER]
    if not tensors:
        return Type.NUMBER
    if Type.WIDE in tensors:
        return Type.WIDE
    return Type.HALF if all(one is Type.HALF for one in tensors) else Type.UNKNOWN


def _masks(node: ast.expr) -> bool:
    """True if a term looks like a mask that is added to scores; such a mask has the type of the scores."""
    numbers = [
        one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, float)
    ]
    return "mask" in text_of(node) or any(number >= 1e4 for number in numbers)


def _is_number_by_default(node: ast.expr, scope: ast.AST) -> bool:
    """True if a name is a parameter of ``scope`` whose default is a number: `def loss(z, temperature=0.1)`."""
    if not isinstance(node, ast.Name) or not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    given = scope.args.args[len(scope.args.args) - len(scope.args.defaults) :]
    pairs = zip(
        [*given, *scope.args.kwonlyargs], [*scope.args.defaults, *scope.args.kw_defaults], strict=True
    )
    return any(
        one.arg == node.id and isinstance(value, ast.Constant) and isinstance(value.value, int | float)
        for one, value in pairs
    )
