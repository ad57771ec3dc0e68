"""The calls of a training loop by meaning: backward, unscale, clipping, step, update, schedule, moving average."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .flow import Called, Flow, Frame
from .own_code import dotted, method_of, receiver_of
from .script_names import ScriptNames
from .walk import Located, Place, text_of

_CLIPS = frozenset(
    f"torch.nn.utils.{module}clip_grad_{kind}_" for module in ("", "clip_grad.") for kind in ("norm", "value")
) | {"torch.nn.utils.clip_grads_with_norm_", "torch.nn.utils.get_total_norm"}
_READS_GRADIENTS = frozenset(
    {"clamp", "clip", "clamp_min", "clamp_max", "norm", "nan_to_num", "clip_grad_norm"}
)
_BY_HAND = ("get_scale", "_scale", "inv_scale", "found_inf", "_unscale_grads_", "_found_inf_per_device")
_SCHEDULER = re.compile(r"sched", re.I)
_AVERAGE = re.compile(
    r"(^|[._])(ema|averaged|swa|shadow)([._0-9]|$)|ema_?(model|net|weights|params)|moving_average|[a-z]EMA|^EMA",
    re.I,
)
_AVERAGING = re.compile(r"(^|[._])(update|step|update_\w+|\w*(update_ema|ema_update|update_average)\w*)$")
_KNOWS_OF_SKIPS = re.compile(
    r"get_scale|_scale\b|\bscale\b|skip|found_inf|_step_count|was_run|isfinite|isinf|overflow|stepped"
)
_DEEPEST = 10
UNKNOWN = "?"


@dataclass(frozen=True, eq=False)
class Event:
    """``scaler``: of a backward, the one that scaled the loss (None: none did, `?`: not known). ``target``: the
    optimizer, or what is clipped."""

    kind: str
    at: Called
    scaler: str | None = None
    target: str | None = None

    @property
    def place(self) -> Place:
        return self.at.place

    @property
    def order(self) -> int:
        return self.at.order

    def extra(self, other: "Event") -> frozenset[tuple[str, bool]]:
        """The tests that this event needs and the other does not."""
        return frozenset(self.place.conditions) - frozenset(other.place.conditions)


class Events:
    """The events of one reading, in order."""

    def __init__(self, flow: Flow, reading: list[Called]) -> None:
        self.flow, self.names, self.called = flow, flow.names, reading
        self.all = [event for one in reading for event in self._of(one)]

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.all if event.kind in kinds]

    def before(self, event: Event, *kinds: str) -> list[Event]:
        return [
            one for one in self.of(*kinds) if one.order < event.order and not one.place.excludes(event.place)
        ]

    def after(self, event: Event, *kinds: str) -> list[Event]:
        return [
            one for one in self.of(*kinds) if one.order > event.order and not one.place.excludes(event.place)
        ]

    def last_update(self, event: Event, scaler: str | None) -> int:
        """The order of the scaler's last update before the event; -1 where there is none."""
        updates = [one.order for one in self.before(event, "update") if one.scaler == scaler]
        return max(updates, default=-1)

    def by_hand(self, scaler: str) -> bool:
        """True if the script itself computes with the scale, in a function that is read here."""
        scopes = {one.at.place.scope for one in self.called}
        return any(
            isinstance(one.node, ast.Attribute)
            and one.node.attr in _BY_HAND
            and one.place.scope in scopes
            and not (one.node.attr == "get_scale" and self._only_compared(one.node))
            for one in self.names.all
        )

    def _only_compared(self, asked: ast.Attribute) -> bool:
        """True if the scale is only compared, as in a script that looks whether a step was skipped."""
        parents = self.names.statements.parents
        call = parents[asked]
        holder = parents.get(call)
        if (
            isinstance(holder, ast.Assign)
            and len(holder.targets) == 1
            and (name := dotted(holder.targets[0]))
        ):
            read = [one.node for one in self.names.all if dotted(one.node) == name
                    and isinstance(getattr(one.node, "ctx", None), ast.Load)]  # fmt: skip
            return all(isinstance(parents[node], ast.Compare) for node in read)
        return isinstance(holder, ast.Compare)

    def _of(self, one: Called) -> Iterator[Event]:
        call, flow = one.call, self.flow
        method, receiver = self._method(one)
        scaler = flow.scaler_of(receiver, one.frame) if receiver is not None else None
        first = one.argument(0, "optimizer")
        if scaler is not None:
            kinds = {"step": "step", "update": "update", "unscale_": "unscale"}
            if method in kinds and (method == "update" or first is not None):
                target = flow.name(first, one.frame) or (text_of(first) if first else None)
                yield Event(kinds[method], one, scaler, target)
            return
        if method == "backward" and receiver is not None:
            full = flow.full(receiver, one.frame)
            of_library = full.startswith(("torch.", "apex."))
            if full == "torch.autograd":
                receiver = one.argument(0, "tensors")
            elif of_library or flow.kind_of(receiver, one.frame) or self._engine(call):
                return
            if receiver is not None:
                yield Event("backward", one, self.scale_of(receiver, one.at, one.frame))
        elif (clipped := self._clipped(one, receiver, method)) is not None:
            yield Event("clip", one, target=clipped or None)
        elif method == "step" and receiver is not None and not call.args and not call.keywords:
            name = flow.name(receiver, one.frame) or ""
            looped = self._looped_over(one, receiver)
            if any(_SCHEDULER.search(source) for source in looped) or any(
                map(self._schedules, (name, *looped))
            ):
                yield Event("schedule", one, target=name)
            elif self.names.is_optimizer(name):
                yield Event("plain-step", one, target=name)
            elif self._averages(one, receiver, method):
                yield Event("average", one, target=name)
        elif self._averages(one, receiver, method):
            yield Event("average", one, target=dotted(call.func))

    def _method(self, one: Called) -> tuple[str, ast.expr | None]:
        """Name and receiver of a method, also where the bound method has a name of its own."""
        func = one.call.func
        if isinstance(func, ast.Name):
            value = self.names.only(func)
            func = value if isinstance(value, ast.Attribute) else func
        return (func.attr, func.value) if isinstance(func, ast.Attribute) else ("", None)

    @staticmethod
    def _engine(call: ast.Call) -> bool:
        """`accelerator.backward(loss)`: a loss is given, so the receiver is none."""
        first = call.args[0] if call.args else None
        return first is not None and not isinstance(first, ast.Constant) and "grad" not in text_of(first)

    def _clipped(self, one: Called, receiver: ast.expr | None, method: str) -> str | None:
        """The module whose gradients are clipped ('' where it is not known); None where nothing is."""
        full = self.flow.full(one.call.func, one.frame)
        if full in _CLIPS or self.names.is_one_of(one.call.func, _CLIPS):
            for node in ast.walk(one.call.args[0]) if one.call.args else ():
                if method_of(node) == "parameters":
                    return self.flow.name(receiver_of(node), one.frame) or ""
            return ""
        if full.startswith(("torch._foreach_clamp", "torch._foreach_norm")):
            method = "clamp"
        if method == "register_hook" and one.call.args and self._clamps(one.call.args[0]):
            return ""
        if not _READS_GRADIENTS & {method.rstrip("_"), full.rpartition(".")[2].rstrip("_")}:
            return None
        parts = [receiver, *one.call.args] if receiver is not None else one.call.args
        for part in parts:
            value = self.flow.value(part, one.at, one.frame)[0] if isinstance(part, ast.Name) else None
            looped = any(_of_gradients(self.names, source) for source in self._looped_over(one, part))
            if looped or _reads_grad(part) or (value is not None and _reads_grad(value)):
                return ""
        return None

    def _clamps(self, hook: ast.expr) -> bool:
        """True if ``hook``, the hook of a gradient, clips the gradient."""
        function = self.names.own.functions.get(dotted(hook) or "")
        called = [node.func for node in ast.walk(function or hook) if isinstance(node, ast.Call)]
        return any(
            (dotted(func) or getattr(func, "attr", "")).rpartition(".")[2].startswith(("clamp", "clip"))
            for func in called
        )

    def _schedules(self, name: str) -> bool:
        """True where the name stands for a learning-rate schedule: by its value, else by the name itself."""
        values = [value for value, _ in self.names.values.get(name, ())]
        held = [one for value in values for one in _elements(value)]
        made = [self.names.full(one.func) or "" for one in held if isinstance(one, ast.Call)]
        if any(one.startswith("torch.optim.lr_scheduler.") or _SCHEDULER.search(one) for one in made):
            return True
        return bool(_SCHEDULER.search(name)) and not self.names.values.get(name)

    def _averages(self, one: Called, receiver: ast.expr | None, method: str) -> bool:
        """True if the call updates a moving average, as the average's class or a name shows."""
        called = dotted(one.call.func) or ""
        if receiver is None:
            return bool(_AVERAGING.search(called) and re.search(r"ema|average", called, re.I))
        name = self.flow.name(receiver, one.frame) or ""
        made = self.names.made_by(name)
        if method == "update_parameters" and any(full.endswith("AveragedModel") for full in made):
            return True
        looped = self._looped_over(one, receiver)
        if method in ("lerp_", "mul_") and re.search(r"avg|average", " ".join([name, *looped])):
            return True
        named = any(_AVERAGE.search(text) for text in (name, *made, called, *looped))
        return named and bool(_AVERAGING.search(called) or method in ("lerp_", "mul_"))

    @staticmethod
    def _looped_over(one: Called, receiver: ast.expr) -> list[str]:
        """The expressions over which a loop binds the receiver: `ema.parameters()` of `for e in ema.parameters()`."""
        while isinstance(receiver, ast.Attribute):
            receiver = receiver.value
        found: list[str] = []
        for loop in one.place.loops:
            if isinstance(loop, ast.For) and isinstance(receiver, ast.Name):
                targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
                sources = (
                    loop.iter.args if isinstance(loop.iter, ast.Call) and loop.iter.args else [loop.iter]
                )
                found += [text_of(source) for target, source in zip(targets, sources, strict=False)
                          if isinstance(target, ast.Name) and target.id == receiver.id]  # fmt: skip
        return found

    def scale_of(self, node: ast.expr | None, at: Located, frame: Frame, depth: int = 0) -> str | None:
        """The scaler by which a loss was multiplied."""
        if node is None or depth > _DEEPEST:
            return UNKNOWN
        match node:
            case ast.Name() | ast.Attribute():
                value, there, where = self.flow.value(node, at, frame)
                if value is None and isinstance(node, ast.Attribute):
                    return self.scale_of(node.value, at, frame, depth + 1)
                elsewhere = self.names.values.get(dotted(node) or "", [])
                if value is None and frame.scope is self.names.script.tree and not elsewhere:
                    return None
                if value is None and any(_are_rows(one.node) for _, one in elsewhere):
                    return None
                if value is None and isinstance(node, ast.Name) and len(elsewhere) == 1:
                    value, there = elsewhere[0]  # what another function of the file returned
                    where = self.flow.frame_of(there.place.scope)
                return self.scale_of(value, there, where, depth + 1)
            case ast.BinOp(left=left, right=right):
                return _together([self.scale_of(one, at, frame, depth + 1) for one in (left, right)])
            case ast.IfExp(body=body, orelse=orelse):
                both = {self.scale_of(one, at, frame, depth + 1) for one in (body, orelse)}
                return both.pop() if len(both) == 1 else UNKNOWN
            case ast.Subscript(value=value) | ast.UnaryOp(operand=value):
                return self.scale_of(value, at, frame, depth + 1)
            case ast.Call():
                return self._scale_of_call(node, at, frame, depth)
        return None

    def _scale_of_call(self, call: ast.Call, at: Located, frame: Frame, depth: int) -> str | None:
        func = call.func
        if isinstance(func, ast.Name):
            bound = self.flow.value(func, at, frame)[0]
            func = bound if isinstance(bound, ast.Attribute) else func
        if isinstance(func, ast.Attribute):
            if func.attr == "scale":
                return self.flow.scaler_of(func.value, frame) or UNKNOWN
            if func.attr in ("mean", "sum", "clone", "to", "squeeze", "float", "div", "mul"):
                return self.scale_of(func.value, at, frame, depth + 1)
        target = self.flow.target(call, frame)
        if target is None:
            return None
        if not self._scales(target, set()):
            given = [*call.args, *(word.value for word in call.keywords)]
            return _together([self.scale_of(one, at, frame, depth + 1) for one in given])
        results = self.names.own.returns(target)
        inner = self.flow.entered(target, call, at, frame, self.names.statements.of(call))
        ends = {self.scale_of(value, self.flow.end_of(target), inner, depth + 1) for value in results}
        return ends.pop() if len(ends) == 1 else UNKNOWN if ends else None

    def _scales(self, function: ast.AST, seen: set[ast.AST]) -> bool:
        """True if a function of the script may scale a loss, itself or in other functions of the file that it calls."""
        seen.add(function)
        own = self.names.own
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr == "scale":
                return True
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
                inner = [one for one in (*own.functions.values(), *own.owner) if one.name == name]
                if any(self._scales(one, seen) for one in inner if one not in seen):
                    return True
        return False

    def knows_of_skips(self, event: Event, since: Event) -> bool:
        """True if the event stands under a test of the scale, or of a value that was computed from the scale."""
        for test, _ in event.extra(since) | frozenset(event.place.conditions):
            if _KNOWS_OF_SKIPS.search(test):
                return True
            for name in re.findall(r"[A-Za-z_][\w.]*", test):
                if any(_KNOWS_OF_SKIPS.search(text_of(value)) for value in self.names.values_of(name)):
                    return True
        return False


def _elements(value: ast.expr | None) -> list[ast.expr]:
    """The value, or what a list of it holds."""
    if isinstance(value, ast.List | ast.Tuple):
        return list(value.elts)
    return [value.elt] if isinstance(value, ast.ListComp) else [value] if value is not None else []


def _are_rows(node: ast.AST) -> bool:
    """True if ``node`` is a loop over rows: what it reads has neither "loss" nor "scale" in its text."""
    return isinstance(node, ast.For) and not re.search(r"scale|loss", text_of(node.iter), re.I)


def _of_gradients(names: ScriptNames, source: str) -> bool:
    """True if ``source``, which a loop reads, has gradients: `grads` of `grads = [p.grad for p in …]`."""
    return source.endswith(".grad") or any(map(_reads_grad, names.values_of(source)))


def _reads_grad(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node))


def _together(scales: list[str | None]) -> str | None:
    known = [one for one in scales if one not in (None, UNKNOWN)]
    return known[0] if known else UNKNOWN if UNKNOWN in scales else None
