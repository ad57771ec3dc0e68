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

SMALLEST_NORMAL, LARGEST = 2.0**-14, 65504.0  # of FP16
GUARD, MASK = (
    "1e-4",
    "1e4",
)  # the smallest power of ten that FP16 holds as a normal number, the largest that it holds
_GUARDS = frozenset({"clamp", "clamp_", "clamp_min", "clip", "maximum", "max", "add", "add_"})
_WORDS = frozenset({"eps", "epsilon", "min"})
_FILLS = frozenset(
    {"masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill_", "tensor"}
)
_HAS_GUARD = {
    "normalize": 4,
    "cosine_similarity": 4,
}  # torch's own eps vanishes; with so many operands one is given


@dataclass(frozen=True, slots=True)
class Change:
    """One proposed change of a file: the text in place of each expression, and the statements that go. ``line``: of the
    expression that was recognised."""

    kind: str
    line: int
    replaced: tuple[tuple[ast.expr, str], ...]
    gone: tuple[ast.stmt, ...] = ()

    def overlaps(self, other: "Change") -> bool:
        return any(_overlap(one, two) for one in self._nodes for two in other._nodes)

    @property
    def _nodes(self) -> list[ast.expr | ast.stmt]:
        return [*(node for node, _ in self.replaced), *self.gone]


def changed(statements: Statements, changes: Collection[Change]) -> str:
    """The file's text with all these changes."""
    rewriting = Rewriting(statements)
    for change in changes:
        for statement in change.gone:
            rewriting.without(statement)
        for node, text in change.replaced:
            rewriting.replace(node, text)
    return rewriting.whole()


def changes_of(script: Script, kept: Collection[int]) -> list[Change]:
    """The proposals for the lines ``kept``, in the order of the text; none twice."""
    values = LocalValues(script)
    found: dict[object, Change] = {}
    for node in ast.walk(script.tree):
        for kind, propose in _KINDS.items() if isinstance(node, ast.expr) else ():
            values.begin(node)
            for replaced, text in propose(values, node):
                if values.lines.isdisjoint(kept) or not (gone := values.gone(replaced)).fits:
                    continue
                change = Change(kind, node.lineno, ((replaced, text),), gone.statements)
                found.setdefault((replaced.lineno, replaced.col_offset, text), change)
    return sorted(found.values(), key=lambda change: change.line)


def _overlap(one: ast.expr | ast.stmt, two: ast.expr | ast.stmt) -> bool:
    (first, last), (start, end) = (
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in (one, two)
    )
    return first < end and start < last


_Proposals = Iterator[tuple[ast.expr, str]]  # an expression, the text in place of it


def _guard(values: LocalValues, node: ast.expr) -> _Proposals:
    """`x / (n + 1e-8)`, `torch.clamp(n, min=1e-12)`, `eps=1e-9`, also where a name stands for the number; the eps that
    torch's own functions have where none is given."""
    given = [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else []
    if isinstance(node, ast.Call):
        given = [word.value for word in node.keywords if word.arg in _WORDS]
        name, operands = values.call(node)
        given += operands[1:] if name in _GUARDS else []
        if not given and name in _HAS_GUARD and len(operands) < _HAS_GUARD[name]:
            keywords = [*node.keywords, ast.keyword("eps", ast.parse(GUARD, mode="eval").body)]
            yield node, ast.unparse(ast.Call(node.func, node.args, keywords)).replace("0.0001", GUARD)
    for one in given:
        literal = values.literal(one)
        if literal is not None and 0 < literal.value < SMALLEST_NORMAL:
            yield literal, GUARD


def _mask(values: LocalValues, node: ast.expr) -> _Proposals:
    """`scores.masked_fill(mask, -1e9)`, `torch.where(mask, x, -1e9)`, `(1 - mask) * -1e9`, `torch.finfo(t).min`."""
    given: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        given = [node.left, node.right]
    elif isinstance(node, ast.Call) and values.call(node)[0] in _FILLS:
        given = [*node.args, *(word.value for word in node.keywords)]
    for one in given:
        one = values.behind(one)
        if isinstance(one, ast.Attribute) and one.attr == "min" and values.call(one.value)[0] == "finfo":
            yield one, f"-{MASK}"
        inner = one.operand if isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.USub) else one
        literal = values.literal(inner)
        if literal is not None and abs(literal.value) > LARGEST:
            yield literal, MASK


def _square(values: LocalValues, node: ast.expr) -> _Proposals:
    """The root of a sum or mean of squares, through a norm that takes no square that half holds."""
    rooted = values.root(node)
    if rooted is None:
        return
    radicand, power = values.behind(rooted[0]), rooted[1]
    eps = None
    if isinstance(radicand, ast.BinOp) and isinstance(radicand.op, ast.Add):
        eps, radicand = values.literal(radicand.right), values.behind(radicand.left)
        if eps is None:
            return
    reduced = values.reduced(radicand, "mean", "sum")
    squared = values.squared(values.behind(reduced.of)) if reduced is not None else None
    if reduced is None or squared is None or not values.holds(squared, node):
        return
    of = _operand(squared)
    text = f"torch.linalg.vector_norm({ast.unparse(squared)}, dim={reduced.dim}, keepdim={reduced.keepdim})"
    if reduced.name == "mean":
        if reduced.axis is None:
            return
        text = f"{text} / {of}.shape[{reduced.dim}] ** 0.5"
    if eps is not None:
        text = f"torch.clamp({text}, min={max(eps.value**0.5, float(GUARD)):g})"
    yield (
        node,
        f"(1 / {text})" if power < 0 and eps is not None else f"(1 / ({text}))" if power < 0 else f"({text})",
    )


def _sum(values: LocalValues, node: ast.expr) -> _Proposals:
    """`x.sum(d) / n` with the division first, and `x / x.sum(d)` through the mean."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div | ast.Mult):
        return
    reduced = values.reduced(values.behind(node.left), "sum")
    if reduced is not None and values.is_number(node.right) and values.holds(reduced.of, node):
        sign = "/" if isinstance(node.op, ast.Div) else "*"
        scaled = f"({_operand(reduced.of)} {sign} {_operand(node.right)})"
        yield node, f"{scaled}.sum({reduced.dim}, keepdim={reduced.keepdim})"
    reduced = values.reduced(values.behind(node.right), "sum")
    if reduced is None or reduced.axis is None or not reduced.keepdim or isinstance(node.op, ast.Mult):
        return
    is_exponent = values.exponent(node.left) is not None  # a softmax
    same = ast.unparse(reduced.of) == ast.unparse(node.left) and not is_exponent
    if same and values.holds(reduced.of, node):
        of = _operand(reduced.of)
        yield node, f"({of} / {of}.mean({reduced.dim}, keepdim=True) / {of}.shape[{reduced.dim}])"


def _softmax(values: LocalValues, node: ast.expr) -> _Proposals:
    """`e = torch.exp(x); e / e.sum(d, keepdim=True)` and `torch.log(torch.exp(x).sum(d))`."""
    logarithm = values.call(node)
    if logarithm[0] == "log" and len(logarithm[1]) == 1:
        reduced = values.reduced(values.behind(logarithm[1][0]), "sum")
        scores = values.exponent(reduced.of) if reduced is not None else None
        if reduced is not None and scores is not None and values.holds(scores, node):
            yield (
                node,
                f"torch.logsumexp({ast.unparse(scores)}, dim={reduced.dim}, keepdim={reduced.keepdim})",
            )
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return
    reduced, scores = values.reduced(values.behind(node.right), "sum"), values.exponent(node.left)
    if reduced is None or scores is None or reduced.axis is None or not reduced.keepdim:
        return
    summed = values.exponent(reduced.of)
    if summed is not None and ast.unparse(summed) == ast.unparse(scores) and values.holds(scores, node):
        yield node, f"torch.softmax({ast.unparse(scores)}, dim={reduced.dim})"


def _operand(node: ast.expr) -> str:
    """The text as the operand of an operator or the receiver of a method."""
    text = ast.unparse(node)
    return (
        text
        if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
        else f"({text})"
    )


_KINDS: dict[str, Callable[[LocalValues, ast.expr], _Proposals]] = {
    "guard": _guard,
    "mask": _mask,
    "square": _square,
    "sum": _sum,
    "softmax": _softmax,
}
