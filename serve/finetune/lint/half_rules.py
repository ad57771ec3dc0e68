"""Numbers that FP16 does not hold: guards that round to zero, masks beyond the largest half."""

import ast
from collections.abc import Iterator

from ....models.python_text.rewriting import Rewriting
from .finding import Finding
from .flow import Frame
from .own_code import Function, dotted, given_to, method_of, receiver_of, words_of
from .script_names import ScriptNames
from .value_types import Type, ValueTypes
from .walk import Located, text_of

LARGEST = 65504.0  # of FP16
VANISHES = 2.0**-25  # at most this rounds to zero: half of the least number, 6e-8
_ROOTS = frozenset({"log", "log2", "log10", "sqrt", "rsqrt", "reciprocal"})
_LIMITS = {"tiny": 1.2e-38, "smallest_normal": 1.2e-38, "min": -3.4e38}  # of FP32
_TENSORS = frozenset(
    {"tensor", "as_tensor", "full", "full_like", "new_tensor", "new_full", "scalar_tensor", "float"}
)
_KEEPS = frozenset(
    {
        "cuda",
        "to",
        "cpu",
        "half",
        "contiguous",
        "detach",
        "clone",
        "unsqueeze",
        "type",
        "type_as",
        "view",
        "expand",
    }
)


class _Reading:
    """The expressions of one reading of a function."""

    def __init__(self, names: ScriptNames, types: ValueTypes, frame: Frame) -> None:
        self.names, self.types, self.frame = names, types, frame

    def is_half(self, node: ast.expr, at: Located) -> bool:
        found = self.types.type_of(node, at, self.frame)
        return found is Type.HALF or (found is Type.MODULE and self.types.casts_to_half(at, self.frame))

    def number(self, node: ast.expr | None, at: Located, depth: int = 0) -> float | None:
        """A number, a name that stands for one in the whole file, a tensor of it."""
        match node:
            case _ if depth > 8:
                return None
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.number(operand, at, depth + 1)
                return None if inner is None else -inner
            case ast.Constant(value=bool()):
                return None
            case ast.Constant(value=int() | float() as value):
                return float(value) if abs(value) < 1e308 else None
            case ast.Attribute(attr=attr, value=ast.Call(func=func, args=[kind, *_])) if (
                dotted(func) or ""
            ).endswith("finfo") and not (self.names.full(kind) or "").endswith(("16", "half")):
                return (
                    _LIMITS.get(attr) if not isinstance(kind, ast.Attribute) or kind.attr != "dtype" else None
                )
            case ast.BinOp(left=left, op=ast.Pow() | ast.Mult() | ast.Sub() as op, right=right):
                one, two = self.number(left, at, depth + 1), self.number(right, at, depth + 1)
                if one is None or two is None or (isinstance(op, ast.Pow) and (abs(two) > 300 or one <= 0)):
                    return None
                found = one**two if isinstance(op, ast.Pow) else one * two
                found = one - two if isinstance(op, ast.Sub) else found
                return found if abs(found) < 1e300 else None
            case ast.Call():
                return self._of_call(node, at, depth)
            case ast.Name() | ast.Attribute():
                return self._named(node, at, depth)
        return None

    def _of_call(self, call: ast.Call, at: Located, depth: int) -> float | None:
        name = (self.names.full(call.func) or "").rpartition(".")[2] or method_of(call)
        if name in _KEEPS and method_of(call):
            return self.number(receiver_of(call), at, depth + 1)
        numbers = (self.number(one, at, depth + 1) for one in given_to(call) if name in _TENSORS)
        return next((number for number in numbers if number is not None), None)

    def _named(self, node: ast.Name | ast.Attribute, at: Located, depth: int) -> float | None:
        if isinstance(node, ast.Name) and node.id in self.frame.arguments:
            value, frame, there = self.frame.arguments[node.id]
            return _Reading(self.names, self.types, frame).number(value, there, depth + 1)
        values = self.names.values.get(dotted(node) or "", ())
        if len(values) == 1:
            return self.number(values[0][0], values[0][1], depth + 1)
        return self._default(node.id, at, depth) if isinstance(node, ast.Name) and not values else None

    def _default(self, name: str, at: Located, depth: int) -> float | None:
        """The default of a parameter."""
        scope = at.place.scope
        if not isinstance(scope, Function):
            return None
        named = [one.arg for one in scope.args.args]
        defaults = dict(zip(named[::-1], scope.args.defaults[::-1], strict=False))
        defaults |= {
            one.arg: value
            for one, value in zip(scope.args.kwonlyargs, scope.args.kw_defaults, strict=True)
            if value
        }
        return self.number(defaults.get(name), at, depth + 1)

    def converted(self, node: ast.expr, at: Located) -> bool:
        """True if the script made the value itself half: `torch.tensor(1e-8).half()`."""
        return (
            not isinstance(node, ast.Constant | ast.UnaryOp)
            and self.types.type_of(node, at, self.frame) is Type.HALF
        )


def small_guard(names: ScriptNames, types: ValueTypes) -> Iterator[Finding]:
    """`x / (y + 1e-8)` and `log(y + 1e-8)` of a half y. Where y is FP32 (a softmax, a sum) the guard holds."""
    for here, one in _nodes(names, types):
        for guarded in _guarded(names, one):
            guard, at, frame = _behind_names(types, guarded, one, here.frame)
            reading = _Reading(names, types, frame)
            rounded = guard is not None and types.is_half_cast(guard)
            if rounded and isinstance(guard, ast.Call) and isinstance(guard.func, ast.Attribute):
                parts = _guard(reading, guard.func.value, at)
                if parts is not None:
                    inner = text_of(guard.func.value)
                    advice = names.rewriting().replace(guard, f"({inner}).float()")
                    yield _guard_finding(names, guard, parts[1], inner, advice)
                continue
            parts = _guard(reading, guard, at)
            if parts is None:
                continue
            operand, number, small = parts
            made_half = reading.converted(small, at)
            if not reading.is_half(operand, at) and not made_half:
                continue
            plain = isinstance(operand, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
            wide = text_of(operand) if plain else f"({text_of(operand)})"
            advice = names.rewriting().replace(operand, f"{wide}.float()")
            if made_half:
                advice.replace(small, repr(number))
            yield _guard_finding(names, operand, number, text_of(operand), advice)


def _guard_finding(
    names: ScriptNames, node: ast.expr, number: float, what: str, advice: Rewriting
) -> Finding:
    return names.finding(
        node, "small-guard",
        f"{what} is half here, where {number:g} rounds to zero (the least half is 6e-8): the guard guards nothing. "
        "Compute it in FP32",
        advice,
    )  # fmt: skip


def large_mask(names: ScriptNames, types: ValueTypes) -> Iterator[Finding]:
    named: set[ast.expr] = set()
    for here, one in _nodes(names, types):
        for scores, filled in _filled(here, one):
            node, at, frame = _large(here, filled, one)
            if node is None or node in named:
                continue
            named.add(node)
            number = _Reading(names, types, frame).number(node, at)
            adds = (
                isinstance(one.node, ast.BinOp | ast.AugAssign)
                or getattr(getattr(one.node, "func", None), "attr", "") == "add_"
            )
            name = dotted(scores) if scores is not None else None
            least = (
                "-1e4"
                if adds or name is None or frame is not here.frame
                else f"torch.finfo({name}.dtype).min"
            )
            effect = (
                "is -inf there, and a row of nothing else becomes NaN"
                if adds or scores is None
                else "raises RuntimeError or is -inf"
            )
            yield names.finding(
                one.node if isinstance(one.node, ast.expr | ast.stmt) else node, "large-mask",
                f"half ends at -65504: {number:g} in a half {effect}",
                names.rewriting().replace(node, least),
            )  # fmt: skip


RULES = (small_guard, large_mask)


def _nodes(names: ScriptNames, types: ValueTypes) -> Iterator[tuple[_Reading, Located]]:
    inside: dict[ast.AST, list[Located]] = {}
    for one in names.all:
        if isinstance(one.node, ast.BinOp | ast.Call | ast.Assign | ast.AugAssign):
            inside.setdefault(one.place.scope, []).append(one)
    for frame in types.flow.frames:
        here = _Reading(names, types, frame)
        for one in inside.get(frame.scope, []):
            yield here, one


def _guarded(names: ScriptNames, one: Located) -> Iterator[ast.expr]:
    """The divisors, and the arguments of roots and logarithms."""
    match one.node:
        case ast.BinOp(op=ast.Div(), right=divisor) | ast.AugAssign(op=ast.Div(), value=divisor):
            yield divisor
        case ast.BinOp(op=ast.Pow(), left=base, right=power) if text_of(power) in ("-0.5", "0.5", "-1"):
            yield base
        case ast.Call() as call:
            operation, inputs = names.operation(call)
            if not method_of(call) and not (names.full(call.func) or "").startswith("torch."):
                return
            if operation.rstrip("_") in _ROOTS and len(inputs) == 1:
                yield inputs[0]
            elif operation.rstrip("_") in ("div", "true_divide") and call.args:
                yield inputs[-1]


def _behind_names(
    types: ValueTypes, node: ast.expr, at: Located, frame: Frame
) -> tuple[ast.expr | None, Located, Frame]:
    """The sum behind names, and behind calls that keep its values."""
    guard: ast.expr | None = node
    for _ in range(8):
        if isinstance(guard, ast.Name | ast.Attribute):
            guard, at, frame = types.flow.value(guard, at, frame)
        elif guard is not None and method_of(guard) in _KEEPS and not types.is_half_cast(guard):
            guard = receiver_of(guard)
        else:
            break
    return guard, at, frame


def _guard(here: _Reading, node: ast.expr | None, at: Located) -> tuple[ast.expr, float, ast.expr] | None:
    """The guarded expression, the number, and its expression: of `y + 1e-8`, `y.clamp(min=1e-8)` and the like."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        pairs = [(node.left, node.right), (node.right, node.left)]
    elif isinstance(node, ast.Call):
        name, given = here.names.operation(node)
        if name.rstrip("_") in ("clamp", "clip", "clamp_min", "maximum", "max", "add") and given:
            pairs = [(given[0], bound) for bound in [*words_of(node, "min"), *given[1:2]]]
    for operand, other in pairs:
        number = here.number(other, at)
        if number is not None and 0 < number <= VANISHES:
            return operand, number, other
    return None


def _filled(here: _Reading, one: Located) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    """A half and what it is filled with or added to; no half where the filling is made half itself."""
    node = one.node
    match node:
        case ast.Call():
            yield from _filled_by_call(here, node, one)
        case ast.Assign(targets=[ast.Subscript(value=scores)], value=value) if here.is_half(scores, one):
            yield scores, value
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            for scores, term in ((left, right), (right, left)):
                if here.is_half(scores, one) and here.types.type_of(term, one, here.frame) is not Type.WIDE:
                    yield scores, term
        case ast.AugAssign(
            target=ast.Name() | ast.Subscript() as scores, op=ast.Add() | ast.Sub(), value=term
        ):
            if here.is_half(scores, one) and here.types.type_of(term, one, here.frame) is not Type.WIDE:
                yield scores, term


def _filled_by_call(
    here: _Reading, call: ast.Call, one: Located
) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    name, inputs = here.names.operation(call)
    name, own = name.rstrip("_"), inputs[: len(inputs) - len(call.args)]  # the receiver of a method
    given = [*inputs, *words_of(call, "value", "fill_value", "other")]
    if name in ("masked_fill", "full_like", "new_full", "fill", "index_fill", "add") and len(given) > 1:
        if here.is_half(given[0], one):
            yield given[0], given[-1]
    elif name == "where" and len(given) == 3:
        left, right = given[0 if own else 1], given[2]
        for scores, value in ((left, right), (right, left)):
            if here.is_half(scores, one):
                yield scores, value
    elif name == "full" and len(given) > 1 and here.types.type_of(call, one, here.frame) is Type.HALF:
        yield None, given[1]
    elif (own and here.types.is_half_cast(call)) or (
        name == "to"
        and here.types.type_of(call, one, here.frame) is Type.HALF
        and any(isinstance(arg, ast.Attribute) and arg.attr == "dtype" for arg in call.args)
    ):
        yield None, own[0]


def _large(here: _Reading, node: ast.expr | None, at: Located) -> tuple[ast.expr | None, Located, Frame]:
    """The number beyond half in a filling: itself, a factor of a product, a filling of zeros."""
    frame = here.frame
    waiting: list[tuple[ast.expr | None, Located, Frame, int]] = [(node, at, frame, 0)]
    while waiting:
        one, there, frame, depth = waiting.pop(0)
        if one is None or depth > 8:
            continue
        reading = _Reading(here.names, here.types, frame)
        number = reading.number(one, there)
        if number is not None:
            if -1e300 < number < -LARGEST or (
                number > LARGEST and frame is here.frame and one is not node and depth
            ):
                literal, where, whose = _literal(reading, one, there)
                return literal, where, whose
        elif isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult):
            waiting += [(one.left, there, frame, depth + 1), (one.right, there, frame, depth + 1)]
        elif isinstance(one, ast.Call) and getattr(one.func, "attr", "").rstrip("_") in (
            "masked_fill",
            "mul",
            "triu",
            "tril",
            "where",
        ):
            waiting += [
                (part, there, frame, depth + 1) for part in [getattr(one.func, "value", None), *one.args]
            ]
        elif method_of(one) in _KEEPS:
            waiting.append((receiver_of(one), there, frame, depth + 1))
        elif isinstance(one, ast.Name) and here.types.type_of(one, there, frame) is not Type.WIDE:
            value, place, inner = here.types.flow.value(one, there, frame)
            waiting.append((value, place, inner, depth + 1))
    return None, at, here.frame


def _literal(here: _Reading, node: ast.expr, at: Located) -> tuple[ast.expr, Located, Frame]:
    """The number itself within a tensor of it; the name of a plain number."""
    if isinstance(node, ast.Name) and node.id not in here.frame.arguments:
        value, there, frame = here.types.flow.value(node, at, here.frame)
        if isinstance(value, ast.Call):
            return _literal(_Reading(here.names, here.types, frame), value, there)
    if isinstance(node, ast.Call):
        receiver = receiver_of(node) if method_of(node) in _KEEPS else None
        parts = given_to(node) if receiver is None else [receiver]
        found = next((one for one in parts if here.number(one, at) is not None), None)
        return _literal(here, found, at) if found is not None else (node, at, here.frame)
    return node, at, here.frame
