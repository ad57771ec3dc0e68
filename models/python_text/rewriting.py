"""Changes of a script's text: expressions replaced, statements written before or behind others, taken out, moved."""

import ast
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from .python_script import Script


class Statements:
    """The statements of a script: to which of them a node belongs, and where their text is."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.starts = [0]
        for line in script.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.script.tree) for child in ast.iter_child_nodes(node)}

    def of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that the node is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def around(self, statement: ast.AST) -> list[ast.AST]:
        """The statements around a statement, the innermost first."""
        found: list[ast.AST] = []
        while statement in self.parents:
            statement = self.parents[statement]
            found.append(statement)
        return found

    def body(self, statement: ast.stmt) -> list[ast.stmt]:
        """The block that the statement is part of."""
        parent = self.parents[statement]
        for name in ("body", "orelse", "finalbody", "handlers"):
            block = getattr(parent, name, [])
            if isinstance(block, list) and statement in block:
                return block
        return [statement]

    def offset(self, line: int, column: int) -> int:
        """The place in the text; columns count bytes."""
        return self.starts[line - 1] + len(self.script.lines[line - 1].encode()[:column].decode())

    def start(self, statement: ast.stmt) -> int:
        decorators = getattr(statement, "decorator_list", [])
        return self.offset(min(one.lineno for one in [statement, *decorators]), statement.col_offset)

    def end(self, node: ast.stmt | ast.expr) -> int:
        return self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def source(self, statement: ast.stmt) -> list[str]:
        """The statement's lines, without its indentation."""
        text = "\n".join(self.script.lines)[self.start(statement) : self.end(statement)].split("\n")
        return [text[0], *(line[statement.col_offset :] for line in text[1:])]

    def indentation(self, line: int) -> str:
        text = self.script.lines[line - 1]
        return text[: len(text) - len(text.lstrip())]


class Rewriting:
    """The changes of one piece of advice. `block` gives the lines that they touch, as they shall be."""

    def __init__(self, statements: Statements) -> None:
        self._of, self._text = statements, "\n".join(statements.script.lines) + "\n"
        self._edits: dict[tuple[int, int], str] = {}
        self._gone: set[ast.stmt] = set()

    def replace(self, node: ast.expr | ast.stmt, text: str) -> "Rewriting":
        self._edits[self._of.offset(node.lineno, node.col_offset), self._of.end(node)] = text
        return self

    def before(self, statement: ast.stmt, lines: Sequence[str]) -> "Rewriting":
        indent = self._alone(statement)
        at = self._of.start(statement)
        self._insert(at, "".join(f"{line}\n{indent}" for line in lines))
        return self

    def behind(self, statement: ast.stmt, lines: Sequence[str]) -> "Rewriting":
        indent = self._alone(statement)
        at = self._of.end(statement)
        rest = self._text[at : self._text.index("\n", at)]
        if not rest.strip() or rest.lstrip().startswith("#"):
            at += len(rest)
        self._insert(at, "".join(f"\n{indent}{line}" for line in lines))
        return self

    def in_place_of(self, statement: ast.stmt, lines: Sequence[str]) -> "Rewriting":
        indent = self._alone(statement)
        self._edits[self._of.start(statement), self._of.end(statement)] = f"\n{indent}".join(lines)
        return self

    def decorated(self, function: ast.stmt, line: str) -> "Rewriting":
        """The decorator as the last one."""
        at = self._of.offset(function.lineno, function.col_offset)
        self._insert(at, f"{line}\n{self._of.indentation(function.lineno)}")
        return self

    def without(self, statement: ast.stmt) -> "Rewriting":
        self._alone(statement)
        start, end = self._of.start(statement), self._of.end(statement)
        self._gone.add(statement)
        if self._gone.issuperset(self._of.body(statement)):
            self._edits[start, end] = "pass"
            return self
        line_start = self._text.rfind("\n", 0, start) + 1
        line_end = self._text.index("\n", end)
        rest = self._text[end:line_end].strip()
        alone = not self._text[line_start:start].strip() and (not rest or rest.startswith("#"))
        if alone:
            start, end = (line_start - 1, line_end) if line_start else (0, line_end + 1)
        self._edits[start, end] = ""
        return self

    def _insert(self, at: int, text: str) -> None:
        self._edits[at, at] = self._edits.get((at, at), "") + text

    def _alone(self, statement: ast.stmt) -> str:
        """Breaks the line, where the statement shares it, into lines; returns the statement's indentation."""
        body, parent = self._of.body(statement), self._of.parents[statement]
        head = body[0]
        indent = self._of.indentation(statement.lineno)
        shares_header = isinstance(parent, ast.stmt) and self._header_line(parent, head) == head.lineno
        if shares_header:
            indent += "    "
            start = self._of.start(head)
            colon = self._text.rindex(":", 0, start)
            self._edits[colon + 1, start] = f"\n{indent}"
        for one, two in pairwise(body):
            if one.end_lineno == two.lineno and (shares_header or two.lineno == statement.lineno):
                self._edits[self._of.end(one), self._of.start(two)] = f"\n{indent}"
        return indent

    @staticmethod
    def _header_line(parent: ast.stmt, head: ast.stmt) -> int:
        """The line on which the header before the block that begins with ``head`` ends."""
        if head.lineno == parent.lineno:
            return parent.lineno
        parts = [getattr(parent, name, None) for name in ("test", "iter", "target")]
        items = [item.context_expr for item in getattr(parent, "items", [])]
        last = max([one.end_lineno or 0 for one in [*parts, *items] if isinstance(one, ast.expr)], default=0)
        return last if head in getattr(parent, "body", []) else 0

    def within(self, statement: ast.stmt) -> list[str]:
        """The statement with its changes, without its indentation."""
        start, end = self._of.start(statement), self._of.end(statement)
        parts, done = [], start
        for (begin, stop), text in sorted(self._edits.items()):
            parts += [self._text[done:begin], text]
            done = stop
        lines = "".join([*parts, self._text[done:end]]).split("\n")
        return [lines[0], *(line[statement.col_offset :] for line in lines[1:])]

    def whole(self) -> str:
        """The file's text with the changes; lines end with a line feed alone."""
        parts, done = list[str](), 0
        for (start, end), text in sorted(self._edits.items()):
            parts += [self._text[done:start], text]
            done = end
        return "".join([*parts, self._text[done:]])

    def block(self) -> tuple[int, int, str]:
        """First and last line that change, and what stands there instead, without the first line's indentation."""
        lines = self._of.script.lines
        edits = sorted(self._edits.items())
        first = self._text.count("\n", 0, edits[0][0][0]) + 1
        last_at = max(max(start, end - 1 if end > start else end) for (start, end), _ in edits)
        last = min(self._text.count("\n", 0, last_at) + 1, len(lines))
        text = self._applied(edits, first, last)
        while first > 1 and not self._fits(text, first):
            first -= 1
            text = self._applied(edits, first, last)
        while first < last and text[0] == lines[first - 1] and self._fits(text[1:], first + 1):
            first, text = first + 1, text[1:]
        while first < last and len(text) > 1 and text[-1] == lines[last - 1].rstrip():
            last, text = last - 1, text[:-1]
        indent = len(self._of.indentation(first))
        return first, last, "\n".join(line[indent:] for line in text)

    def _fits(self, text: Sequence[str], first: int) -> bool:
        """True if the text can be written with the indentation of the line ``first``."""
        return bool(text) and self._least(text) >= len(self._of.indentation(first))

    @staticmethod
    def _least(lines: Sequence[str]) -> int:
        return min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)

    def _applied(self, edits: list[tuple[tuple[int, int], str]], first: int, last: int) -> list[str]:
        done = self._of.starts[first - 1]
        parts: list[str] = []
        for (start, end), text in edits:
            parts += [self._text[done:start], text]
            done = max(done, end)
        parts.append(self._text[done : self._of.starts[last]])
        return [line.rstrip() for line in "".join(parts).rstrip("\n").split("\n")]
