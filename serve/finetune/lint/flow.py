"""Reads the calls of a script in the order in which they run, the file's own functions where they are called.

A name of a helper stands for what its caller gave (`step(opt)` called as `step(self.optimizer)`), an alias for what it
was bound to, an attribute of an object of an own class for `self.…`. So the rules see one order and one name each,
however the script is cut into functions.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from .own_code import Function, dotted, method_of, receiver_of
from .script_names import ScriptNames
from .walk import Located, Place

_DEEPEST = 8  # helpers in helpers; names behind names
_MOST = 20_000  # calls of a script, helpers counted at each place
_MOVES = frozenset(
    {"cuda", "to", "cpu", "half", "float", "bfloat16", "train", "eval", "double", "requires_grad_"}
)


@dataclass(frozen=True, eq=False)
class Frame:
    """One reading of a function: what its parameters stand for, and the statements that lead to it."""

    scope: ast.AST
    arguments: dict[str, tuple[ast.expr, "Frame", Located]] = field(default_factory=dict)
    owner: str | None = None  # the class of `self`
    sites: tuple[ast.stmt, ...] = ()
    place: Place | None = None  # of the call

    def placed(self, at: Located) -> Place:
        """The place at which a node of this function runs."""
        return at.place if self.place is None else at.place.within(self.place)


@dataclass(frozen=True, eq=False)
class Called:
    """A call: where it stands (``at``), and where it runs (``place``, in the function that the reading began with)."""

    call: ast.Call
    at: Located
    place: Place
    frame: Frame
    order: int
    statement: ast.stmt

    @property
    def sites(self) -> tuple[ast.stmt, ...]:
        return (*self.frame.sites, self.statement)

    @property
    def method(self) -> str:
        return self.call.func.attr if isinstance(self.call.func, ast.Attribute) else ""

    def argument(self, number: int = 0, *words: str) -> ast.expr | None:
        given = [word.value for word in self.call.keywords if word.arg in words]
        return self.call.args[number] if len(self.call.args) > number else next(iter(given), None)


class Flow:
    def __init__(self, names: ScriptNames) -> None:
        self.names = names
        self._inside: dict[ast.AST, list[tuple[ast.Call, Located]]] = {}
        for call, at in names.calls:
            self._inside.setdefault(at.place.scope, []).append((call, at))
        for call, at in _averaging(names):
            self._inside.setdefault(at.place.scope, []).append((call, at))
        for inside in self._inside.values():
            inside.sort(key=lambda pair: pair[1].order)
        self._left = _MOST
        self._frames: list[Frame] = []

    @cached_property
    def readings(self) -> list[list[Called]]:
        """The calls of the module, and of each function that no other one of the file calls."""
        own = self.names.own
        scopes: list[ast.AST] = [
            self.names.script.tree,
            *own.functions.values(),
            *own.owner,
            *own.classes.values(),
        ]
        scopes += [scope for scope in self._inside if scope not in scopes]
        called = {
            target
            for scope in scopes
            for call, at in self._inside.get(scope, [])
            if (target := self.target(call, self.frame_of(scope))) is not None
            and target is not at.place.scope
        }
        roots = [scope for scope in scopes if scope not in called]
        return [list(self._read(self.frame_of(scope))) for scope in dict.fromkeys(roots)]

    @cached_property
    def frames(self) -> list[Frame]:
        """Every reading of every function: a function is read again at each call."""
        self.readings  # noqa: B018 (reads the script)
        return self._frames

    def frame_of(self, scope: ast.AST) -> Frame:
        owner = self.names.own.owner.get(scope) if isinstance(scope, Function) else None
        return Frame(scope, owner=owner.name if owner else None)

    def _read(self, frame: Frame, stack: tuple[ast.AST, ...] = ()) -> Iterator[Called]:
        self._frames.append(frame)
        for call, at in self._inside.get(frame.scope, []):
            self._left -= 1
            if self._left < 0:
                return
            place = frame.placed(at)
            statement = self.names.statements.of(call)
            yield Called(call, at, place, frame, _MOST - self._left, statement)
            target = self.target(call, frame)
            if (
                target is not None
                and target is not frame.scope
                and target not in stack
                and len(stack) < _DEEPEST
            ):
                inner = self.entered(target, call, at, frame, statement)
                yield from self._read(inner, (*stack, frame.scope))

    def entered(self, target: Function, call: ast.Call, at: Located, frame: Frame, site: ast.stmt) -> Frame:
        owner = self.names.own.owner.get(target)
        parameters = [one.arg for one in [*target.args.posonlyargs, *target.args.args]]
        static = any(dotted(one) == "staticmethod" for one in target.decorator_list)
        parameters = parameters[1:] if owner is not None and not static else parameters
        given = dict(
            zip(parameters, (arg for arg in call.args if not isinstance(arg, ast.Starred)), strict=False)
        )
        given |= {word.arg: word.value for word in call.keywords if word.arg}
        arguments = {name: (value, frame, at) for name, value in given.items()}
        return Frame(target, arguments, owner.name if owner else None, (*frame.sites, site), frame.placed(at))

    def target(self, call: ast.Call, frame: Frame) -> Function | None:
        """The own function that a call runs: by name, a method, or an own module's `forward`."""
        own = self.names.own
        if isinstance(call.func, ast.Name):
            if call.func.id in own.functions and call.func.id not in frame.arguments:
                return own.functions[call.func.id]
            if call.func.id in own.classes:
                return own.method(call.func.id, "__init__")
        elif (receiver := receiver_of(call)) is not None:
            kind = self.kind_of(receiver, frame)
            if kind is not None and (method := own.method(kind, method_of(call))) is not None:
                return method
        if (kind := self.kind_of(call.func, frame)) is not None:
            return own.method(kind, "forward") or own.method(kind, "__call__")
        return None

    def kind_of(self, node: ast.AST, frame: Frame, depth: int = 0) -> str | None:
        """The own class of an object."""
        own = self.names.own
        if depth > _DEEPEST:
            return None
        if isinstance(node, ast.Name) and node.id in ("self", "cls") and frame.owner:
            return frame.owner
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in own.classes:
                return node.func.id
            moved = receiver_of(node) if method_of(node) in _MOVES else None
            return self.kind_of(moved, frame, depth + 1) if moved is not None else None
        name = dotted(node)
        if name is None:
            return None
        if name in frame.arguments:
            value, outer, _ = frame.arguments[name]
            return self.kind_of(value, outer, depth + 1)
        kinds = {
            self.kind_of(value, frame, depth + 1) if value is not None and dotted(value) != name else None
            for value, _ in self.names.values.get(self.name(node, frame) or name, ())
        }
        return kinds.pop() if len(kinds) == 1 else None

    def given(self, name: str, scope: ast.AST) -> tuple[ast.expr, Frame, Located] | None:
        """The expression that a parameter of the function ``scope`` stands for, by its first call in the file."""
        return next((frame.arguments[name] for frame in [self._constructed(scope), *self.frames]
                     if frame.scope is scope and name in frame.arguments), None)  # fmt: skip

    def name(self, node: ast.AST | None, frame: Frame, depth: int = 0) -> str | None:
        """The one name of what a name or an attribute stands for; the text of anything else that was given for it."""
        node = self._held(node)
        name = dotted(node)
        if node is None or name is None or depth > _DEEPEST:
            return name
        head, dot, rest = name.partition(".")
        if head in frame.arguments:
            value, outer, _ = frame.arguments[head]
            behind = self.name(value, outer, depth + 1)
            if behind is not None:
                return behind + dot + rest
            return None if dot else ast.unparse(value)
        bound = self.names.values.get(name, ())
        if len(bound) == 1 and isinstance(value := bound[0][0], ast.Name | ast.Attribute):
            return self.name(value, self._of_binding(frame, bound[0][1].place.scope), depth + 1)
        if dot and head != "self":
            holders = [value for value, _ in self.names.values.get(head, ())]
            if holders and all(
                isinstance(one, ast.Call) and dotted(one.func) in self.names.own.classes for one in holders
            ):
                return "self" + dot + rest
        return name

    def _held(self, node: ast.AST | None) -> ast.AST | None:
        """The element of `optimizers["g"]` or `optimizers[0]` where the script writes the dictionary or list out."""
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
            return node
        held, key = self.names.only(node.value), node.slice.value
        if isinstance(held, ast.Dict):
            pairs = zip(held.keys, held.values, strict=True)
            return next(
                (value for one, value in pairs if isinstance(one, ast.Constant) and one.value == key), node
            )
        if (
            isinstance(held, ast.List | ast.Tuple)
            and isinstance(key, int)
            and -len(held.elts) <= key < len(held.elts)
        ):
            return held.elts[key]
        return node

    def _of_binding(self, frame: Frame, scope: ast.AST) -> Frame:
        """The reading of the function that binds a name; for an attribute, the one construction of its object."""
        return frame if scope is frame.scope else self._constructed(scope)

    def _constructed(self, scope: ast.AST) -> Frame:
        if not isinstance(scope, Function) or scope.name != "__init__":
            return self.frame_of(scope)
        owner = self.names.own.owner.get(scope)
        made = [(call, at) for call, at in self.names.calls
                if owner is not None and isinstance(call.func, ast.Name) and call.func.id == owner.name]  # fmt: skip
        if len(made) != 1:
            return self.frame_of(scope)
        call, at = made[0]
        return self.entered(scope, call, at, self.frame_of(at.place.scope), self.names.statements.of(call))

    def owner(self, optimizer: str | None) -> str | None:
        """The module whose parameters an optimizer has."""
        owner = self.names.optimizers.get(optimizer or "")
        if owner is None or optimizer is None:
            return None
        scope = self.names.values[optimizer][0][1].place.scope
        return self.name(ast.parse(owner, mode="eval").body, self._constructed(scope))

    def name_at(self, node: ast.AST, at: Located) -> str | None:
        """The name, as the function at ``at`` knows it."""
        return self.name(node, self._constructed(at.place.scope))

    def full(self, node: ast.AST | None, frame: Frame) -> str:
        """The name with its import written out, through aliases."""
        name = self.name(node, frame)
        if not name or not name.replace(".", "").isidentifier():
            return ""
        return self.names.full(ast.parse(name, mode="eval").body) or ""

    def value(self, node: ast.expr, at: Located, frame: Frame) -> tuple[ast.expr | None, Located, Frame]:
        """The expression to which a name was bound, in the function that binds it."""
        if isinstance(node, ast.Name) and node.id in frame.arguments:
            value, outer, there = frame.arguments[node.id]
            return value, there, outer
        value = self.names.last_value(dotted(node) or "", at)
        there = next(
            (one for made, one in self.names.values.get(dotted(node) or "", ()) if made is value), at
        )
        return value, there, frame

    def end_of(self, function: Function) -> Located:
        """A place behind everything in the function."""
        last = [one for one in self.names.all if one.place.scope is function][-1]
        return replace(last, place=replace(last.place, conditions=()))

    def scaler_of(self, node: ast.AST, frame: Frame) -> str | None:
        """The name of the GradScaler that an expression is."""
        name = self.name(node, frame)
        if name is None:
            return None
        made_here = isinstance(node, ast.expr) and self._is_made_here(node, frame)
        return name if name in self.names.scalers or made_here else None

    def _is_made_here(self, node: ast.expr, frame: Frame) -> bool:
        for _ in range(_DEEPEST):
            if not isinstance(node, ast.Name) or node.id not in frame.arguments:
                break
            node, frame, _at = frame.arguments[node.id]
        return isinstance(node, ast.Call) and self.names.makes_scaler(node)


def _averaging(names: ScriptNames) -> Iterator[tuple[ast.Call, Located]]:
    """`average[k] = decay * average[k] + …` as the call that does the same in place."""
    for one in names.all:
        if isinstance(one.node, ast.Assign) and isinstance(one.node.value, ast.BinOp):
            target = one.node.targets[0]
            if isinstance(target, ast.Subscript | ast.Attribute) and ast.unparse(target) in ast.unparse(
                one.node.value
            ):
                holder = target.value
                call = ast.copy_location(ast.Call(ast.Attribute(holder, "lerp_"), [], []), one.node)
                names.statements.parents[call] = one.node
                yield call, one
