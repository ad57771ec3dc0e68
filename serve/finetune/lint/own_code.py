"""The functions and classes of a script, and what a call of them gives."""

import ast
from collections.abc import Sequence

from .walk import Located

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def dotted(node: ast.AST | None) -> str | None:
    """`a.b.c` of names and attributes; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def method_of(node: ast.AST | None) -> str:
    """`f` of the call `x.f()`; empty for anything else."""
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def receiver_of(node: ast.AST | None) -> ast.expr | None:
    """`x` of the call `x.f()`; None for anything else."""
    return node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None


def words_of(call: ast.Call, *names: str) -> list[ast.expr]:
    """The arguments of a call that are given by one of these names."""
    return [word.value for word in call.keywords if word.arg in names]


def given_to(call: ast.Call) -> list[ast.expr]:
    """All arguments of a call."""
    return [*call.args, *(word.value for word in call.keywords)]


class OwnCode:
    """The functions and classes of the script by name. A name that two functions share is left out."""

    def __init__(self, nodes: Sequence[Located]) -> None:
        self.classes = {one.node.name: one.node for one in nodes if isinstance(one.node, ast.ClassDef)}
        self.owner: dict[Function, ast.ClassDef] = {}
        self._methods: dict[tuple[str, str], Function] = {}
        self._returns: dict[ast.AST, list[ast.expr]] = {}
        plain: dict[str, list[Function]] = {}
        for one in nodes:
            if isinstance(one.node, _FUNCTIONS):
                if isinstance(one.place.scope, ast.ClassDef):
                    self._methods[one.place.scope.name, one.node.name] = one.node
                    self.owner[one.node] = one.place.scope
                else:
                    plain.setdefault(one.node.name, []).append(one.node)
            elif isinstance(one.node, ast.Return) and one.node.value is not None:
                self._returns.setdefault(one.place.scope, []).append(one.node.value)
        self.functions = {name: found[0] for name, found in plain.items() if len(found) == 1}

    def method(self, kind: str, name: str) -> Function | None:
        """The method of a class or of its own bases."""
        for _ in range(len(self.classes) + 1):
            if (found := self._methods.get((kind, name))) is not None or kind not in self.classes:
                return found
            kind = next((base.id for base in self.classes[kind].bases if isinstance(base, ast.Name)), "")
        return None

    def returns(self, function: Function) -> list[ast.expr]:
        return self._returns.get(function, [])

    def result(self, call: ast.expr | None) -> ast.expr | None:
        """The expression that the one `return` of the called function gives, in the names of that function."""
        function = None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            function = self.functions.get(call.func.id)
        elif dotted(receiver_of(call)) == "self":
            found = [method for (_, name), method in self._methods.items() if name == method_of(call)]
            function = found[0] if len(found) == 1 else None
        results = self.returns(function) if function is not None else []
        return results[0] if len(results) == 1 else None
