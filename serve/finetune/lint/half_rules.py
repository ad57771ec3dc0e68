"""Numbers that FP16 does not hold, and weights that are not FP32 while they are trained."""

import ast
from collections.abc import Iterator

from .script_names import ScriptNames, dotted
from .training_script import Finding
from .value_types import Type, ValueTypes
from .walk import Located, text_of

LARGEST = 65504.0  # of FP16
VANISHES = 2.0**-25  # at most this rounds to zero: half of the least number, 6e-8
_ROOTS = frozenset({"log", "log2", "log10", "sqrt", "rsqrt", "reciprocal"})
_HALVES = frozenset({"torch.float16", "torch.half"})


def small_guard(names: ScriptNames, types: ValueTypes) -> Iterator[Finding]:
    """`x / (y + 1e-8)` and `log(y + 1e-8)` of a half y. Where y is FP32 (a softmax, a sum) the guard holds."""
    for guarded, at in _guarded(names):
        guard = guarded
        if isinstance(guarded, ast.Name):
            value = names.last_value(guarded.id, at)
            at = next((one for made, one in names.values.get(guarded.id, ()) if made is value), at)
            guard = value
        parts = _sum_with_small(guard) or _floor_at_small(guard)
        if parts is None:
            continue
        operand, number = parts
        if types.type_of(operand, at) is Type.HALF:
            wide = (
                text_of(operand)
                if isinstance(operand, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
                else f"({text_of(operand)})"
            )
            yield names.finding(
                operand, "small-guard",
                f"{text_of(operand)} is half here, where {number:g} rounds to zero (the least half is 6e-8): the guard "
                "guards nothing. Compute it in FP32",
                names.script.line_with(operand, f"{wide}.float()"),
            )  # fmt: skip


def large_mask(names: ScriptNames, types: ValueTypes) -> Iterator[Finding]:
    for call, at in names.calls:
        method = getattr(call.func, "attr", "")
        of_torch = (names.full(call.func) or "").startswith("torch.")
        if method not in ("masked_fill", "masked_fill_") or len(call.args) < 2:
            continue
        scores = call.args[0] if of_torch else getattr(call.func, "value", call)
        value, number = call.args[-1], _number(names, call.args[-1])
        if number is None or not -1e300 < number < -LARGEST:  # infinity is a half too
            continue
        explicit = types.type_of(scores, at)
        if explicit is Type.HALF or (explicit is Type.MODULE and types.casts_to_half(at.place)):
            least = f"torch.finfo({dotted(scores)}.dtype).min" if dotted(scores) else "-1e4"
            yield names.finding(
                call, "large-mask",
                f"half ends at -65504: filling a half with {number:g} raises RuntimeError",
                names.script.line_with(value, least),
            )  # fmt: skip


def half_weights(names: ScriptNames, types: ValueTypes) -> Iterator[Finding]:
    """A module that is made half before its optimizer, and a GradScaler that steps this optimizer."""
    for model, call, at in _made_half(names):
        for optimizer, owner in names.optimizers.items():
            made = names.values[optimizer][0][1]
            if owner != model or made.place.scope is not at.place.scope or made.order < at.order:
                continue
            if not made.place.follows(at.place) or not set(at.place.conditions) <= set(made.place.conditions):
                continue
            stepped = [
                receiver for step, receiver, _ in names.methods("step")
                if receiver in names.scalers and step.args and dotted(step.args[0]) == optimizer
            ]  # fmt: skip
            if stepped:
                assert isinstance(call.func, ast.Attribute)
                wide = f"{text_of(call.func.value)}.float()"
                yield names.finding(
                    call, "half-weights",
                    f"the weights of {model} are half, so {stepped[0]} refuses them (\"Attempting to unscale FP16 "
                    "gradients\"): keep them in FP32, autocast rounds what it computes with",
                    names.script.line_with(call, wide),
                )  # fmt: skip
                break


RULES = (small_guard, large_mask, half_weights)


def _guarded(names: ScriptNames) -> Iterator[tuple[ast.expr, Located]]:
    """Divisors, and what a root or a logarithm is taken of."""
    for one in names.all:
        node = one.node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right, one
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ROOTS:
            of_torch = (names.full(node.func) or "").startswith("torch.")
            if of_torch and node.args:
                yield node.args[0], one
            elif not of_torch and not node.args:
                yield node.func.value, one


def _sum_with_small(node: ast.expr | None) -> tuple[ast.expr, float] | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return None
    for operand, other in ((node.left, node.right), (node.right, node.left)):
        if isinstance(other, ast.Constant) and isinstance(other.value, float) and 0 < other.value <= VANISHES:
            return operand, other.value
    return None


def _floor_at_small(node: ast.expr | None) -> tuple[ast.expr, float] | None:
    """`x.clamp(min=1e-8)`, `x.clamp_min(1e-8)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    bounds = {"clamp": [word.value for word in node.keywords if word.arg == "min"] or node.args[:1],
              "clamp_min": node.args[:1]}.get(node.func.attr, [])  # fmt: skip
    for bound in bounds:
        if isinstance(bound, ast.Constant) and isinstance(bound.value, float) and 0 < bound.value <= VANISHES:
            return node.func.value, bound.value
    return None


def _number(names: ScriptNames, node: ast.expr) -> float | None:
    """A number, or a name that stands for one in the whole file."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(names, node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Name):
        values = [value for value, _ in names.values.get(node.id, ())]
        known = len(values) == 1 and values[0] is not None and not isinstance(values[0], ast.Name)
        return _number(names, values[0]) if known and values[0] is not None else None
    value = node.value if isinstance(node, ast.Constant) else None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _made_half(names: ScriptNames) -> Iterator[tuple[str, ast.Call, Located]]:
    """`M.half()`, `M = Net().half()`, `M.to(torch.float16)`: the module's name, the call."""
    for name, values in names.values.items():
        for value, at in values:
            receiver = _made_half_of(names, value)
            if isinstance(value, ast.Call) and receiver is not None and dotted(receiver) in (None, name):
                yield name, value, at
    for one in names.all:
        call = one.node.value if isinstance(one.node, ast.Expr) else None
        receiver = _made_half_of(names, call)
        name = None if receiver is None else dotted(receiver)
        if isinstance(call, ast.Call) and name is not None:
            yield name, call, one


def _made_half_of(names: ScriptNames, node: ast.expr | None) -> ast.expr | None:
    """X of `X.half()` and `X.to(torch.float16)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    words = [*node.args, *(word.value for word in node.keywords if word.arg == "dtype")]
    converts = node.func.attr == "to" and any(names.full(word) in _HALVES for word in words)
    return node.func.value if converts or (node.func.attr == "half" and not node.args) else None
