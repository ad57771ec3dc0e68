"""The tensor operations that an expression of source spells: as a function of torch, as a method, as an operator."""

import ast
from dataclasses import dataclass

_MODULES = ("torch", "F", "functional", "nn.functional", "torch.nn.functional")


@dataclass(frozen=True, slots=True)
class Reduced:
    """A sum or mean of ``of``. ``dim``: the text of its axes; ``is_one``: it is a single one."""

    name: str
    of: ast.expr
    dim: str
    is_one: bool
    keepdim: bool


def called(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """`f` and [x, y] of `torch.f(x, y)` and of `x.f(y)`; empty for anything else."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=given):
            return name, given if ast.unparse(value) in _MODULES else [value, *given]
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return "pow", [left, right]
    return "", []


def rooted(node: ast.expr) -> tuple[ast.expr, bool] | None:
    """The operand of a square root, and whether the root's reciprocal is taken."""
    match called(node):
        case ("sqrt" | "rsqrt") as name, [of]:
            return of, name == "rsqrt"
        case "pow", [of, power] if (exponent := evaluated(power)) in (0.5, -0.5):
            return of, exponent == -0.5
    return None


def squared(node: ast.expr) -> ast.expr | None:
    match called(node):
        case "square", [of]:
            return of
        case "pow", [of, power] if evaluated(power) == 2:
            return of
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return node.left if ast.unparse(node.left) == ast.unparse(node.right) else None
    return None


def exponent_of(node: ast.expr) -> ast.expr | None:
    match called(node):
        case "exp", [of]:
            return of
    return None


def reduced(node: ast.expr, *names: str) -> Reduced | None:
    """A reduction of one of these names over axes that the source says."""
    name, given = called(node)
    if name not in names or not isinstance(node, ast.Call) or not given:
        return None
    words = {word.arg: word.value for word in node.keywords}
    dim = words.get("dim", given[1] if len(given) > 1 else ast.Constant(None))
    keepdim = evaluated(words.get("keepdim", given[2] if len(given) > 2 else ast.Constant(False)))
    axes = evaluated(dim)
    if not isinstance(axes, int | tuple | list) or not isinstance(keepdim, bool):
        return None
    return Reduced(name, given[0], ast.unparse(dim), isinstance(axes, int), keepdim)


def evaluated(node: ast.expr) -> object:
    """The value of a literal; None for anything else."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
