"""The expression behind a local name, and the tensor operations that an expression of source spells."""

import ast
from dataclasses import dataclass

from ...models.python_text.python_script import Script
from ...models.python_text.rewriting import Statements


@dataclass(frozen=True, slots=True)
class Reduced:
    """A sum or mean of ``of``. ``dim``: the text of its axes; ``axis``: the one of them, None for several."""

    name: str
    of: ast.expr
    dim: str
    axis: int | None
    keepdim: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """The statements that nothing reads once the expression is replaced. ``fits``: the new expression may stand
    there."""

    statements: tuple[ast.stmt, ...]
    fits: bool


class LocalValues:
    """Reads the expressions of one file. `begin` names the expression to replace; the statements from which `behind`
    then takes values are remembered in ``lines``."""

    def __init__(self, script: Script) -> None:
        self.tree, self.statements = script.tree, Statements(script)
        self._root: ast.expr = ast.Constant(None)
        self._used: list[tuple[str, ast.Assign]] = []
        self._moved: ast.expr | None = None
        self._bound: dict[str, list[ast.expr]] = {}
        for node in ast.walk(script.tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._bound.setdefault(ast.unparse(node.targets[0]), []).append(node.value)
            elif isinstance(node, ast.arguments):
                self._bind_defaults(node)

    def _bind_defaults(self, given: ast.arguments) -> None:
        named = [*given.posonlyargs, *given.args][::-1]
        pairs = [
            *zip(named, given.defaults[::-1], strict=False),
            *zip(given.kwonlyargs, given.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            if default is not None:
                self._bound.setdefault(argument.arg, []).append(default)

    def begin(self, root: ast.expr) -> None:
        self._root, self._used, self._moved = root, [], None

    @property
    def lines(self) -> set[int]:
        """The lines of the statements that the replaced expression is made of."""
        statements = [self.statements.of(self._root), *(statement for _, statement in self._used)]
        own = [one for one in statements if not hasattr(one, "body")] or [self._root]
        return {line for one in own for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}

    def literal(self, node: ast.expr, depth: int = 3) -> ast.Constant | None:
        """The number that an expression is, also through names and attributes that the file binds once."""
        if isinstance(node, ast.Constant):
            return node if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
        found = self._bound.get(ast.unparse(node), []) if isinstance(node, ast.Name | ast.Attribute) else []
        return self.literal(found[0], depth - 1) if len(found) == 1 and depth else None

    def behind(self, node: ast.expr) -> ast.expr:
        """The value that an earlier statement of the same block gave a name; the node itself for all else."""
        if not isinstance(node, ast.Name):
            return node
        statement = self.statements.of(node)
        block = self.statements.body(statement)
        for earlier in reversed(block[: block.index(statement)]):
            if node.id not in _stored(earlier):
                continue
            if not isinstance(earlier, ast.Assign) or ast.unparse(earlier.targets[0]) != node.id:
                break
            self._used += [] if (node.id, earlier) in self._used else [(node.id, earlier)]
            return self.behind(earlier.value)
        return node

    def call(self, node: ast.expr) -> tuple[str, list[ast.expr]]:
        """`f` and [x, y] of `torch.f(x, y)`, of `F.f(x, y)` and of `x.f(y)`; empty for anything else."""
        if not isinstance(node, ast.Call):
            return "", []
        if isinstance(node.func, ast.Name):
            return node.func.id, node.args
        if not isinstance(node.func, ast.Attribute):
            return "", []
        is_module = ast.unparse(node.func.value) in (
            "torch",
            "F",
            "functional",
            "nn.functional",
            "torch.nn.functional",
        )
        return node.func.attr, node.args if is_module else [node.func.value, *node.args]

    def root(self, node: ast.expr) -> tuple[ast.expr, float] | None:
        """What a square root is taken of, with 0.5, or with -0.5 for its reciprocal."""
        name, given = self.call(node)
        if name in ("sqrt", "rsqrt") and len(given) == 1:
            return given[0], 0.5 if name == "sqrt" else -0.5
        powered = self._power(node)
        return powered if powered is not None and abs(powered[1]) == 0.5 else None

    def squared(self, node: ast.expr) -> ast.expr | None:
        name, given = self.call(node)
        if name == "square" and len(given) == 1:
            return given[0]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return node.left if ast.unparse(node.left) == ast.unparse(node.right) else None
        powered = self._power(node)
        return powered[0] if powered is not None and powered[1] == 2 else None

    def _power(self, node: ast.expr) -> tuple[ast.expr, float] | None:
        name, given = self.call(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            name, given = "pow", [node.left, node.right]
        if name != "pow" or len(given) != 2:
            return None
        exponent = _evaluated(given[1])
        return (given[0], exponent) if isinstance(exponent, int | float) else None

    def exponent(self, node: ast.expr) -> ast.expr | None:
        """x of `torch.exp(x)`, also behind a name."""
        name, given = self.call(self.behind(node))
        return given[0] if name == "exp" and len(given) == 1 else None

    def reduced(self, node: ast.expr, *names: str) -> Reduced | None:
        """A reduction over axes that the source says."""
        name, given = self.call(node)
        if name not in names or not isinstance(node, ast.Call):
            return None
        words = {word.arg: word.value for word in node.keywords}
        dim = words.get("dim", words.get("axis", given[1] if len(given) > 1 else None))
        keepdim = words.get("keepdim", words.get("keepdims", given[2] if len(given) > 2 else None))
        axes = _evaluated(dim) if dim is not None else None
        keeps = False if keepdim is None else _evaluated(keepdim)
        if (
            not given
            or dim is None
            or not isinstance(axes, int | tuple | list)
            or not isinstance(keeps, bool)
        ):
            return None
        return Reduced(name, given[0], ast.unparse(dim), axes if isinstance(axes, int) else None, keeps)

    def is_number(self, node: ast.expr) -> bool:
        """True for a literal, an arithmetic expression of literals, a size of a tensor, the number of a name."""
        name, _ = self.call(node)
        sized = (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "shape"
        )
        numbers = isinstance(_evaluated(node), int | float) or self.literal(node) is not None
        of_numbers = isinstance(node, ast.BinOp) and self.is_number(node.left) and self.is_number(node.right)
        return sized or numbers or of_numbers or name == "size"

    def holds(self, node: ast.expr, root: ast.expr) -> bool:
        """Remembers that ``node`` is to stand in ``root``; True if no name that it reads is known to change between."""
        self._moved = node
        return self.gone(root).fits

    def gone(self, root: ast.expr) -> Gone:
        """The statements behind names that nothing else reads; whether what was moved reads the same numbers
        there."""
        last, gone = self.statements.of(root), list[ast.stmt]()
        if self._moved is None:
            return Gone((), True)
        block, origin = self.statements.body(last), self.statements.of(self._moved)
        between = block[block.index(origin) : block.index(last)]
        reads = {one.id for one in ast.walk(self._moved) if isinstance(one, ast.Name)}
        for name, statement in sorted(self._used, key=lambda one: one[1].lineno, reverse=True):
            still = name in reads and statement is not origin
            if not still and not self._is_read(name, statement, last, [root, *gone]):
                gone.append(statement)
        fits = all(one in gone or reads.isdisjoint(_stored(one)) for one in between)
        return Gone(tuple(gone), fits)

    def _is_read(
        self, name: str, since: ast.stmt, last: ast.stmt, left_out: list[ast.expr | ast.stmt]
    ) -> bool:
        around = [one for one in self.statements.around(last) if isinstance(one, ast.FunctionDef)]
        scope = around[0] if around else self.tree
        without = {id(node) for one in left_out for node in ast.walk(one)}
        ends = isinstance(last, ast.Return) or name in _stored(last)
        until = last.end_lineno or last.lineno if ends else float("inf")
        return any(
            isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Load)
            and (since.end_lineno or 0) < one.lineno <= until and id(one) not in without
            for one in ast.walk(scope)
        )  # fmt: skip


def _stored(statement: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    return {
        one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }


def _evaluated(node: ast.expr) -> object:
    """The value of a literal; None for anything else."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
