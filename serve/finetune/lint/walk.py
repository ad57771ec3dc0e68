"""Every node of a script in the order of the text, with what surrounds it: function, loops, conditions, `with` items.

Two nodes under opposite outcomes of one test never run in one pass. A test is known by its text, so `if amp:` here and
`if not amp:` there are opposite; tests with different texts are taken as independent.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

Condition = tuple[str, bool]  # the test's text, its outcome
_OF_PRECISION = re.compile(r"amp|fp16|half|scal|mixed|precision|dtype|16|cuda|enabled", re.I)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Place:
    """The loops, tests, `with` items and classes around a node; ``scope``: the innermost function, class or module."""

    scope: ast.AST
    loops: tuple[ast.AST, ...] = ()
    conditions: tuple[Condition, ...] = ()
    regions: tuple[ast.expr, ...] = ()
    classes: tuple[ast.ClassDef, ...] = ()

    def within(self, outer: "Place") -> "Place":
        """The place of a helper's node where the helper is called at ``outer``."""
        return replace(
            outer,
            loops=outer.loops + self.loops,
            conditions=outer.conditions + self.conditions,
            regions=outer.regions + self.regions,
            classes=self.classes,
        )

    def excludes(self, other: "Place") -> bool:
        """True if nodes at both places never run in one pass: one needs the opposite of a test that the other needs."""
        mine = set(self.conditions)
        return any((test, not outcome) in mine for test, outcome in other.conditions)

    def follows(self, other: "Place") -> bool:
        """True if the node runs in a pass in which the node at ``other`` does: it needs no test about precision that
        the other does not need. Other tests (`if clip:`) may have the outcome that the node needs."""
        further = set(self.conditions) - set(other.conditions)
        return (
            self.scope is other.scope
            and not self.excludes(other)
            and not any(_OF_PRECISION.search(test) for test, _ in further)
        )


@dataclass(frozen=True, slots=True)
class Located:
    """A node and its place. ``order``: the node's number in the order of the text."""

    node: ast.AST
    place: Place
    order: int


def located(tree: ast.Module) -> list[Located]:
    """Every statement and expression of the tree."""
    found: list[Located] = []
    for node, place in _block(tree.body, Place(tree)):
        found.append(Located(node, place, len(found)))
    return found


def text_of(node: ast.AST) -> str:
    """The node's text in Python's own form."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return "…"


def _block(body: Sequence[ast.stmt], place: Place) -> Iterator[tuple[ast.AST, Place]]:
    for statement in body:
        yield from _statement(statement, place)
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], _LEAVES):
            place = _under(place, _failed(statement.test))


def _statement(statement: ast.stmt, place: Place) -> Iterator[tuple[ast.AST, Place]]:
    yield statement, place
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from _expressions([*statement.decorator_list, statement.args], place)
            decorators = tuple(statement.decorator_list)
            yield from _block(statement.body, Place(statement, regions=decorators, classes=place.classes))
        case ast.ClassDef():
            yield from _expressions([*statement.decorator_list, *statement.bases], place)
            yield from _block(statement.body, Place(statement, classes=(*place.classes, statement)))
        case ast.If():
            yield from _branches(statement, place)
        case ast.For() | ast.AsyncFor() | ast.While():
            head = (
                [statement.test] if isinstance(statement, ast.While) else [statement.iter, statement.target]
            )
            yield from _expressions(head, place)
            yield from _block(statement.body, replace(place, loops=(*place.loops, statement)))
            yield from _block(statement.orelse, place)
        case ast.With() | ast.AsyncWith():
            items = [item.context_expr for item in statement.items]
            yield from _expressions(items, place)
            yield from _block(statement.body, replace(place, regions=(*place.regions, *items)))
        case ast.Try() | ast.TryStar():
            yield from _block(statement.body, place)
            for handler in statement.handlers:
                yield from _block(handler.body, _under(place, [(f"except in line {handler.lineno}", True)]))
            yield from _block(statement.orelse, place)
            yield from _block(statement.finalbody, place)
        case ast.Match():
            yield from _expressions([statement.subject], place)
            for case in statement.cases:
                yield from _block(case.body, _under(place, [(f"case in line {case.pattern.lineno}", True)]))
        case _:
            yield from _expressions(list(ast.iter_child_nodes(statement)), place)


def _branches(statement: ast.If, place: Place) -> Iterator[tuple[ast.AST, Place]]:
    """An `if` with all its `elif`: as a loop, for a chain of them nests one level each."""
    while True:
        yield from _expressions([statement.test], place)
        yield from _block(statement.body, _under(place, _held(statement.test)))
        place = _under(place, _failed(statement.test))
        if len(statement.orelse) != 1 or not isinstance(statement.orelse[0], ast.If):
            break
        statement = statement.orelse[0]
        yield statement, place
    yield from _block(statement.orelse, place)


def _expressions(nodes: Sequence[ast.AST], place: Place) -> Iterator[tuple[ast.AST, Place]]:
    waiting = [(node, place) for node in reversed(nodes)]
    while waiting:
        node, around = waiting.pop()
        yield node, around
        if isinstance(node, ast.IfExp):
            yes, no = _under(around, _held(node.test)), _under(around, _failed(node.test))
            waiting += [(node.orelse, no), (node.body, yes), (node.test, around)]
        else:
            waiting += [(child, around) for child in reversed(list(ast.iter_child_nodes(node)))]


def _under(place: Place, conditions: Sequence[Condition]) -> Place:
    return replace(place, conditions=(*place.conditions, *conditions))


def _held(test: ast.expr) -> list[Condition]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return [condition for part in test.values for condition in _held(part)]
    return [_condition(test, True)]


def _failed(test: ast.expr) -> list[Condition]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return [condition for part in test.values for condition in _failed(part)]
    return [_condition(test, False)]


def _condition(test: ast.expr, outcome: bool) -> Condition:
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, outcome = test.operand, not outcome
    match test:
        case ast.Compare(
            left=left, ops=[ast.Is() | ast.Eq()], comparators=[ast.Constant(value=None | False)]
        ):
            return text_of(left), not outcome
        case ast.Compare(
            left=left, ops=[ast.IsNot() | ast.NotEq()], comparators=[ast.Constant(value=None | False)]
        ):
            return text_of(left), outcome
    return text_of(test), outcome
