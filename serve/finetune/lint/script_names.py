"""Finds what the names of a script mean: imported names, GradScalers, optimizers with their models, autocast regions.

A name counts as a scaler only where each of its values in the file is a GradScaler. What cannot be known from this
file alone (an object built elsewhere, a name with two meanings) is left out: the rules are silent about it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from ....models.python_text.python_script import Script
from ....models.python_text.rewriting import Rewriting, Statements
from .finding import Finding
from .own_code import OwnCode, dotted, given_to, method_of, receiver_of, words_of
from .walk import Located, Place, located

SCALERS = frozenset(
    {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler"}
    | {"torch.amp.grad_scaler.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"}
)
AUTOCASTS = frozenset(
    {"torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast"}
)
_OPTIMIZER = re.compile(
    r"(^|[._])(opt|optim|optimizer)s?(_?[A-Za-z0-9]{1,3}|_[a-z]+)?$|(_|^)[a-zA-Z]+_(opt|optim|optimizer)$"
)
_OTHER_OPTIMIZERS = ("apex.optimizers.", "bitsandbytes.optim.", "transformers.AdamW", "timm.optim.")
_DEEPEST = 8
_NO_OPTIMIZER = re.compile(r"sched|profil|option", re.I)
_SCALER = re.compile(r"(^|[._])(grad_?)?scaler(_?[A-Za-z0-9]{1,3})?$")


class ScriptNames:
    """The facts of one script that the rules ask for."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.all = located(script.tree)
        self.statements = Statements(script)
        self._imports = _imports(self.all)
        self.own = OwnCode(self.all)
        self.values: dict[str, list[tuple[ast.expr | None, Located]]] = defaultdict(list)
        for one in self.all:
            for name, value in _bound(one.node, self.own.result):
                if value is None or dotted(value) != name:
                    self.values[name].append((value, _bound_at(one)))

    def finding(self, node: ast.expr | ast.stmt, rule: str, message: str, advice: str | Rewriting) -> Finding:
        """``advice``: the text to write in place of ``node``, or further changes."""
        if isinstance(advice, str):
            advice = self.rewriting().replace(node, advice)
        first, last, instead = advice.block()
        if re.search(r"\btorch\.", instead) and "torch" not in self._imports:
            advice.before(self.statements.of(node), ["import torch"])
            first, last, instead = advice.block()
        return Finding(str(self.script.path), node.lineno, rule, message, instead, first, last)

    def rewriting(self) -> Rewriting:
        return Rewriting(self.statements)

    def full(self, node: ast.AST) -> str | None:
        """The dotted name with its import written out; None where the name is imported from two places or is none."""
        name = dotted(node)
        if name is None:
            return None
        head, dot, rest = name.partition(".")
        places = self._places(head)
        return next(iter(places)) + dot + rest if len(places) == 1 else None

    def is_alias(self, node: ast.AST) -> bool:
        return (dotted(node) or "").partition(".")[0] not in self._imports

    def _places(self, head: str) -> set[str]:
        """The full names of ``head`` by its imports, also through an alias (`amp = torch.cuda.amp`); else ``head``."""
        if head in self._imports:
            return self._imports[head]
        alias = dotted(self.only(head))
        first = (alias or "").partition(".")
        if alias is None or first[0] not in self._imports or len(self._imports[first[0]]) != 1:
            return {head}
        return {next(iter(self._imports[first[0]])) + first[1] + first[2]}

    def is_one_of(self, node: ast.AST, wanted: frozenset[str]) -> bool:
        """True if each import of the name is one of ``wanted`` (a script may fall back from one to the other)."""
        name = dotted(node)
        if name is None:
            return False
        head, dot, rest = name.partition(".")
        return all(place + dot + rest in wanted for place in self._places(head))

    def only(self, name: ast.AST | str | None) -> ast.expr | None:
        """The value of a name that the file binds once; None for any other."""
        values = self.values.get(name if isinstance(name, str) else dotted(name) or "", ())
        return values[0][0] if len(values) == 1 else None

    def values_of(self, name: str) -> list[ast.expr]:
        """The expressions to which the file binds a name."""
        return [value for value, _ in self.values.get(name, ()) if value is not None]

    def made_by(self, name: str) -> list[str]:
        """The full names of what is called for a name's values."""
        return [self.full(one.func) or "" for one in self.values_of(name) if isinstance(one, ast.Call)]

    def operation(self, call: ast.Call) -> tuple[str, list[ast.expr]]:
        """The operation of a call and its operands: `f` and [x, y] of `torch.f(x, y)`, of `x.f(y)` and of `f(x, y)`."""
        full, receiver = self.full(call.func) or "", receiver_of(call)
        if full.startswith("torch."):
            return full.rpartition(".")[2], call.args
        if receiver is not None:
            return method_of(call), [receiver, *call.args]
        return dotted(call.func) or "", call.args

    @cached_property
    def calls(self) -> list[tuple[ast.Call, Located]]:
        return [(one.node, one) for one in self.all if isinstance(one.node, ast.Call)]

    def methods(self, name: str) -> list[tuple[ast.Call, str, Located]]:
        """Calls of a method of that name, with the receiver's dotted name ('' where it has none)."""
        return [
            (call, dotted(receiver_of(call)) or "", one)
            for call, one in self.calls
            if method_of(call) == name
        ]

    @cached_property
    def scalers(self) -> frozenset[str]:
        """Names whose every value is a GradScaler that is not switched off; and of parameters, those called `scaler`
        that scale a loss in this file."""
        found = {
            name
            for name, values in self.values.items()
            if any(self.makes_scaler(value) for value, _ in values)
            and all(self.makes_scaler(value) or _is_none(value) for value, _ in values)
        }
        return frozenset(found | {name for name in self._scaling if name not in self.values})

    @cached_property
    def _scaling(self) -> frozenset[str]:
        """The names called `scaler` by which the file scales a loss."""
        named = {receiver for _, receiver, _ in self.methods("scale") if _SCALER.search(receiver)}
        return frozenset(named | {name.rpartition(".")[2] for name in named})

    def makes_scaler(self, value: ast.expr | None, depth: int = 0) -> bool:
        if depth > _DEEPEST:
            return False
        if isinstance(value, ast.IfExp):
            return any(self.makes_scaler(one, depth + 1) for one in (value.body, value.orelse)) and all(
                self.makes_scaler(one, depth + 1) or _is_none(one) for one in (value.body, value.orelse)
            )
        if isinstance(value, ast.Name | ast.Attribute):
            name = dotted(value) or ""
            behind = [one for one, _ in self.values.get(name, ()) if one is not value]
            return (
                all(self.makes_scaler(one, depth + 1) for one in behind) if behind else name in self._scaling
            )
        if not isinstance(value, ast.Call):
            return False
        if (result := self.own.result(value)) is not None:
            return self.makes_scaler(result, depth + 1)
        if not self.is_one_of(value.func, SCALERS) and not self._is_subclass(value.func, SCALERS):
            return False
        return not _is_off(value)

    def _is_subclass(self, node: ast.AST, wanted: frozenset[str]) -> bool:
        own = self.own.classes.get(dotted(node) or "")
        return own is not None and any(self.is_one_of(base, wanted) for base in own.bases)

    @cached_property
    def optimizers(self) -> dict[str, str | None]:
        """Name of an optimizer → name of the module whose parameters it has, where that is known."""
        found: dict[str, str | None] = {}
        for name, values in self.values.items():
            made = [(self._optimizer_call(value), one) for value, one in values]
            if made and all(call is not None for call, _ in made):
                owners = {self._owner(call, one) for call, one in made if call is not None}
                found[name] = owners.pop() if len(owners) == 1 else None
        looped = {
            name
            for name, values in self.values.items()
            if values and all(self._loops_over(one, found) for _, one in values)
        }
        return found | dict.fromkeys(looped - found.keys())

    def _loops_over(self, one: Located, optimizers: dict[str, str | None]) -> bool:
        """True if the node is a loop over optimizers: `for opt in (first, second)`."""
        source = one.node.iter if isinstance(one.node, ast.For) else None
        source = self.only(source) or source
        elements = source.elts if isinstance(source, ast.List | ast.Tuple) else []
        return bool(elements) and all(dotted(element) in optimizers for element in elements)

    def is_optimizer(self, name: str) -> bool:
        """True if the name means an optimizer: by its value, or, where this file does not bind it, by its spelling."""
        if name in self.values:
            return name in self.optimizers
        return bool(_OPTIMIZER.search(name)) and not _NO_OPTIMIZER.search(name)

    def _optimizer_call(self, value: ast.expr | None, depth: int = 0) -> ast.Call | None:
        if not isinstance(value, ast.Call) or depth > _DEEPEST:
            return None
        if (result := self.own.result(value)) is not None:
            return self._optimizer_call(result, depth + 1)
        name = self.full(value.func) or ""
        of_torch = name.startswith("torch.optim.") and name.count(".") == 2
        return value if of_torch or name.startswith(_OTHER_OPTIMIZERS) else None

    def _owner(self, call: ast.Call, at: Located) -> str | None:
        """The one module of which the optimizer's arguments take parameters."""
        parts: list[ast.AST] = [*given_to(call)]
        for part in list(parts):
            if isinstance(part, ast.Name) and (value := self.last_value(part.id, at)) is not None:
                parts.append(value)
        owners = {
            dotted(receiver_of(node))
            for part in parts
            for node in ast.walk(part)
            if method_of(node) in ("parameters", "named_parameters")
        }
        return owners.pop() if len(owners) == 1 else None

    def last_value(self, name: str, at: Located) -> ast.expr | None:
        """The expression to which a name was last bound before ``at`` in the same function; None if unsure."""
        before = [
            (value, one)
            for value, one in self.values.get(name, ())
            if one.place.scope is at.place.scope and one.order < at.order and not one.place.excludes(at.place)
        ]
        if not before:
            return None
        value, one = before[-1]
        return value if set(one.place.conditions) <= set(at.place.conditions) else None

    def autocast_of(self, place: Place) -> ast.Call | None:
        """The innermost autocast region around a place, where it is switched on."""
        for item in reversed(place.regions):
            region = self.behind(item)
            if isinstance(region, ast.Call) and self.is_one_of(region.func, AUTOCASTS):
                return None if _is_off(region) else region
        return None

    def behind(self, item: ast.expr, depth: int = 0) -> ast.expr | None:
        """The expression that a `with` item means: the one value of a name, the result of an own function or lambda."""
        for _ in range(_DEEPEST if depth < _DEEPEST else 0):
            if isinstance(item, ast.IfExp):
                branches = (self.behind(item.body, depth + 1), self.behind(item.orelse, depth + 1))
                casts = [
                    one
                    for one in branches
                    if isinstance(one, ast.Call) and self.is_one_of(one.func, AUTOCASTS)
                ]
                return casts[0] if casts else item
            called = isinstance(item, ast.Call) and not self.is_one_of(item.func, AUTOCASTS)
            value = self.only(item.func if called and isinstance(item, ast.Call) else item)
            if (result := self.own.result(item)) is not None:
                item = result
            elif called and isinstance(value, ast.Lambda):
                item = value.body
            elif value is not None and not isinstance(item, ast.Call):
                item = value
            else:
                break
        return item

    def of_half(self, region: ast.Call) -> bool:
        """True if an autocast region may be in FP16: it names no other dtype, and no processor."""
        named = words_of(region, "dtype", "device_type")
        texts = [self.full(word) or "" for word in named]
        on_cpu = any(
            isinstance(one, ast.Constant) and one.value == "cpu" for one in [*named, *region.args[:1]]
        )
        return not on_cpu and not any(text.endswith(("bfloat16", "float32")) for text in texts)

    @cached_property
    def uses_half(self) -> bool:
        """True if the script computes in FP16: it has a GradScaler, or an autocast region in FP16."""
        return any(
            self.makes_scaler(call)
            or (self.is_one_of(call.func, AUTOCASTS) and self.of_half(call) and not _is_off(call))
            for call, _ in self.calls
        )


def _imports(nodes: list[Located]) -> dict[str, set[str]]:
    """Local name → the full names that it is imported from."""
    found: dict[str, set[str]] = defaultdict(set)
    for one in nodes:
        if isinstance(one.node, ast.Import):
            for alias in one.node.names:
                head = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or head].add(head)
        elif isinstance(one.node, ast.ImportFrom):
            for alias in one.node.names:
                found[alias.asname or alias.name].add(f"{one.node.module or '.'}.{alias.name}")
    return found


def _bound(
    node: ast.AST, result: Callable[[ast.expr | None], ast.expr | None]
) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that a statement or expression binds, each with its value; None where that is not an expression."""
    pairs: list[tuple[ast.AST, ast.expr | None]] = []
    match node:
        case ast.Assign():
            pairs = [(target, node.value) for target in node.targets]
        case ast.AnnAssign() | ast.NamedExpr():
            pairs = [(node.target, node.value)]
        case ast.AugAssign():
            read = (
                ast.copy_location(ast.Name(node.target.id), node.target)
                if isinstance(node.target, ast.Name)
                else None
            )
            together = ast.BinOp(read, node.op, node.value) if read is not None else None
            pairs = [(node.target, ast.copy_location(together, node) if together is not None else None)]
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            pairs = [(node.target, None)]
        case ast.With() | ast.AsyncWith():
            pairs = [(item.optional_vars, None) for item in node.items if item.optional_vars is not None]
    while pairs:
        target, value = pairs.pop()
        if isinstance(target, ast.Tuple | ast.List):
            value = result(value) or value
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            paired = len(values) == len(target.elts)
            pairs += [
                (one, values[place] if paired else _item(value, place))
                for place, one in enumerate(target.elts)
            ]
        elif isinstance(target, ast.Starred):
            pairs.append((target.value, None))
        elif (name := dotted(target)) is not None:
            yield name, value


def _item(value: ast.expr | None, place: int) -> ast.expr | None:
    """One of several results of a call."""
    if not isinstance(value, ast.Call):
        return None
    return ast.copy_location(ast.Subscript(value, ast.copy_location(ast.Constant(place), value)), value)


def _bound_at(one: Located) -> Located:
    """An assignment binds its names behind its last node."""
    if isinstance(one.node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return replace(one, order=one.order + sum(1 for _ in ast.walk(one.node)) - 1)
    return one


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_off(call: ast.Call) -> bool:
    """True if the call makes a scaler or an autocast region with ``enabled=False``."""
    return any(isinstance(one, ast.Constant) and one.value is False for one in words_of(call, "enabled"))
