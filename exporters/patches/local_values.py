"""The expression behind a local name, and what becomes of the statements between when it is written in place."""

import ast

from ...models.python_text.python_script import Script
from ...models.python_text.rewriting import Statements


class LocalValues:
    """Reads the expressions of one file. `begin` names the expression to replace; the statements from which `behind`
    then takes values are remembered."""

    def __init__(self, script: Script) -> None:
        self.tree, self.statements = script.tree, Statements(script)
        self._root: ast.expr = ast.Constant(None)
        self._used: list[tuple[str, ast.Assign]] = []
        self._bound: dict[str, list[ast.expr | None]] = {}
        for node in ast.walk(script.tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._bound.setdefault(ast.unparse(node.targets[0]), []).append(node.value)
            elif isinstance(node, ast.arguments):
                last = zip(node.args[::-1], node.defaults[::-1], strict=False)
                for argument, default in [*last, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
                    self._bound.setdefault(argument.arg, []).append(default)

    def begin(self, root: ast.expr) -> None:
        self._root, self._used = root, []

    @property
    def lines(self) -> set[int]:
        """The lines of the statements that the replaced expression is made of."""
        statements = [self.statements.of(self._root), *(statement for _, statement in self._used)]
        found = [self._root if hasattr(one, "body") else one for one in statements]
        return {line for one in found for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}

    def literal(self, node: ast.expr | None, depth: int = 3) -> tuple[ast.Constant, float] | None:
        """The literal and its number without its sign, also through names and attributes that the file binds once."""
        if isinstance(node, ast.UnaryOp):
            return self.literal(node.operand, depth)
        if isinstance(node, ast.Constant):
            try:
                return (node, float(node.value)) if type(node.value) in (int, float) else None  # type: ignore[arg-type]
            except OverflowError:  # an integer of hundreds of digits
                return None
        found = self._bound.get(ast.unparse(node), []) if isinstance(node, ast.Name | ast.Attribute) else []
        return self.literal(found[0], depth - 1) if len(found) == 1 and depth else None

    def behind(self, node: ast.expr) -> ast.expr:
        """The value that an earlier statement of the same block gave a name; the node itself for all else."""
        if not isinstance(node, ast.Name):
            return node
        statement = self.statements.of(node)
        block = self.statements.body(statement)
        earlier = next((one for one in block[: block.index(statement)][::-1] if node.id in stored(one)), None)
        if not isinstance(earlier, ast.Assign) or ast.unparse(earlier.targets[0]) != node.id:
            return node
        if (node.id, earlier) not in self._used:
            self._used.append((node.id, earlier))
        return self.behind(earlier.value)

    def gone(self, moved: ast.expr) -> tuple[ast.stmt, ...] | None:
        """The statements behind names that nothing reads once ``moved`` is written in place of the expression. None
        where a name that it reads has another value there."""
        last, origin, gone = self.statements.of(self._root), self.statements.of(moved), list[ast.stmt]()
        reads = {one.id for one in ast.walk(moved) if isinstance(one, ast.Name)}
        for name, statement in sorted(self._used, key=lambda one: one[1].lineno, reverse=True):
            still = name in reads and statement is not origin
            if not still and not self._is_read(name, statement, [self._root, *gone]):
                gone.append(statement)
        block = self.statements.body(last)
        between = block[block.index(origin) : block.index(last)]
        return tuple(gone) if all(one in gone or reads.isdisjoint(stored(one)) for one in between) else None

    def _is_read(self, name: str, since: ast.stmt, left_out: list[ast.expr | ast.stmt]) -> bool:
        """True if the function reads the name behind a statement, and not in the nodes that are left out."""
        last = self.statements.of(self._root)
        functions = (one for one in self.statements.around(last) if isinstance(one, ast.FunctionDef))
        without = {id(node) for one in left_out for node in ast.walk(one)}
        ends = isinstance(last, ast.Return) or name in stored(last)
        until = last.end_lineno if ends and last.end_lineno else float("inf")
        reads = (
            one
            for one in ast.walk(next(functions, self.tree))
            if isinstance(one, ast.Name) and one.id == name
        )
        return any(
            (since.end_lineno or 0) < one.lineno <= until and id(one) not in without
            for one in reads
            if isinstance(one.ctx, ast.Load)
        )


def stored(statement: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    names = (one for one in ast.walk(statement) if isinstance(one, ast.Name))
    return {one.id for one in names if isinstance(one.ctx, ast.Store)}
