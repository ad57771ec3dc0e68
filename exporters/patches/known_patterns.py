"""The changes of source by which known patterns can run in half: guards, masks, squares, sums, softmax by hand.

They are proposals: `tried_patches.py` keeps the ones that are proven. So a pattern is recognised by names and literals
alone, and nothing is inferred of the types behind them.
"""

import ast
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from ...models.python_text.python_script import Script
from ...models.python_text.rewriting import Rewriting, Statements
from .local_values import LocalValues
from .spelled_operations import called, exponent_of, reduced, rooted, squared

SMALLEST_NORMAL, LARGEST = 2.0**-14, 65504.0  # of FP16
# The smallest power of ten that FP16 holds as a normal number, and the largest that it holds.
GUARD, MASK = "1e-4", "1e4"
_GUARDS = ("clamp", "clamp_", "clamp_min", "clip", "maximum", "max", "add", "add_")
_FILLS = ("masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill_", "tensor")
_HAVE_EPS = (
    "normalize",
    "cosine_similarity",
)  # torch's own vanishes in half; it is the fourth operand of both


@dataclass(frozen=True, slots=True)
class Change:
    """One proposed change of a file: ``text`` in place of an expression, and the statements that go. ``line``: of the
    expression that was recognised."""

    kind: str
    line: int
    replaced: ast.expr
    text: str
    gone: tuple[ast.stmt, ...] = ()

    def overlaps(self, other: "Change") -> bool:
        pairs = ((one, two) for one in (self.replaced, *self.gone) for two in (other.replaced, *other.gone))
        return any(_place(one)[0] < _place(two)[1] and _place(two)[0] < _place(one)[1] for one, two in pairs)


def changed(script: Script, changes: Collection[Change]) -> str:
    """The file's text with all these changes."""
    rewriting = Rewriting(Statements(script))
    for change in changes:
        rewriting.replace(change.replaced, change.text)
    gone = {_place(one) for change in changes for one in change.gone}
    for statement in ast.walk(script.tree):
        if isinstance(statement, ast.stmt) and _place(statement) in gone:
            rewriting.without(statement)
    return rewriting.whole()


def changes_of(script: Script, kept: Collection[int]) -> list[Change]:
    """The proposals for the lines ``kept``, in the order of the text; none twice."""
    values, found = LocalValues(script), dict[object, Change]()
    for node in (one for one in ast.walk(script.tree) if isinstance(one, ast.expr)):
        for kind, propose in _KINDS.items():
            values.begin(node)
            for replaced, text, moved in propose(values, node):
                gone = values.gone(moved) if moved is not None else ()
                if gone is not None and not values.lines.isdisjoint(kept):
                    change = Change(kind, node.lineno, replaced, text, gone)
                    found.setdefault((_place(replaced), text), change)
    return sorted(found.values(), key=lambda change: change.line)


def _place(node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


# The expression that is replaced, the text in place of it, and the part of the source that the text moves there.
_Proposals = Iterator[tuple[ast.expr, str, ast.expr | None]]


def _guard(values: LocalValues, node: ast.expr) -> _Proposals:
    """`x / (n + 1e-8)`, `torch.clamp(n, min=1e-12)`, `eps=1e-9`, also where a name stands for the number; the eps that
    torch's own functions have where none is given."""
    given: list[ast.expr] = []
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            given = [left, right]
        case ast.Call(func=func, args=positional, keywords=keywords):
            name, operands = called(node)
            given = [word.value for word in keywords if word.arg in ("eps", "min")]
            if name in _HAVE_EPS and len(operands) < 4 and not given:
                eps = ast.keyword("eps", ast.Name(GUARD))
                yield node, ast.unparse(ast.Call(func, positional, [*keywords, eps])), None
            given += operands[1:] if name in _GUARDS else []
    for literal in map(values.literal, given):
        if literal is not None and 0 < literal[1] < SMALLEST_NORMAL:
            yield literal[0], GUARD, None


def _mask(values: LocalValues, node: ast.expr) -> _Proposals:
    """`scores.masked_fill(mask, -1e9)`, `torch.where(mask, x, -1e9)`, `(1 - mask) * -1e9`, `torch.finfo(t).min`."""
    given: list[ast.expr] = []
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            given = [left, right]
        case ast.Call(keywords=keywords) if called(node)[0] in _FILLS:
            given = [*called(node)[1], *(word.value for word in keywords)]
    for one in map(values.behind, given):
        if isinstance(one, ast.Attribute) and one.attr == "min" and called(one.value)[0] == "finfo":
            yield one, f"-{MASK}", None
        literal = values.literal(one)
        if literal is not None and literal[1] > LARGEST:
            yield literal[0], MASK, None


def _square(values: LocalValues, node: ast.expr) -> _Proposals:
    """The root of a sum or mean of squares through `vector_norm`, whose squares are not rounded to half. An epsilon
    under the root becomes a floor of the root."""
    root, eps = rooted(node), None
    radicand = values.behind(root[0]) if root is not None else node
    if isinstance(radicand, ast.BinOp) and isinstance(radicand.op, ast.Add):
        eps, radicand = values.literal(radicand.right), values.behind(radicand.left)
        root = root if eps is not None else None
    mean = reduced(radicand, "mean", "sum")
    of = squared(values.behind(mean.of)) if mean is not None else None
    if root is None or mean is None or of is None or (mean.name == "mean" and not mean.is_one):
        return
    text = f"torch.linalg.vector_norm({ast.unparse(of)}, dim={mean.dim}, keepdim={mean.keepdim})"
    text += f" / {_operand(of)}.shape[{mean.dim}] ** 0.5" if mean.name == "mean" else ""
    if eps is not None:
        text = f"torch.clamp({text}, min={max(eps[1] ** 0.5, float(GUARD)):g})"
    elif mean.name == "mean":
        text = f"({text})"
    yield node, f"(1 / {text})" if root[1] else text, of


def _sum(values: LocalValues, node: ast.expr) -> _Proposals:
    """`x / x.sum(d, keepdim=True)` through the mean, which does not overflow. A softmax is none of these."""
    match node:
        case ast.BinOp(left=left, op=ast.Div(), right=right) if exponent_of(values.behind(left)) is None:
            total = reduced(right, "sum")
            if (
                total is None
                or not total.is_one
                or not total.keepdim
                or ast.unparse(total.of) != ast.unparse(left)
            ):
                return
            of = _operand(left)
            yield node, f"({of} / {of}.mean({total.dim}, keepdim=True) / {of}.shape[{total.dim}])", None


def _softmax(values: LocalValues, node: ast.expr) -> _Proposals:
    """`e = torch.exp(x); e / e.sum(d, keepdim=True)` and `torch.log(torch.exp(x).sum(d))`."""
    above: ast.expr | None = None
    match node:
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            above, summed = exponent_of(values.behind(left)), right
        case ast.Call() if called(node)[0] == "log" and called(node)[1]:
            summed = called(node)[1][0]
        case _:
            return
    total = reduced(values.behind(summed), "sum")
    scores = exponent_of(values.behind(total.of)) if total is not None else None
    if total is None or scores is None:
        return
    text = ast.unparse(scores)
    if isinstance(node, ast.Call):
        yield node, f"torch.logsumexp({text}, dim={total.dim}, keepdim={total.keepdim})", scores
    elif above is not None and ast.unparse(above) == text and total.is_one and total.keepdim:
        yield node, f"torch.softmax({text}, dim={total.dim})", scores


def _operand(node: ast.expr) -> str:
    """The text as the operand of an operator or the receiver of a method."""
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({text})"


_KINDS: dict[str, Callable[[LocalValues, ast.expr], _Proposals]] = {
    "guard": _guard,
    "mask": _mask,
    "square": _square,
    "sum": _sum,
    "softmax": _softmax,
}
