"""Mistakes around a GradScaler itself: names that do not exist, where it is built, what a checkpoint has of it."""

import ast
from collections.abc import Iterator

from ....models.python_text.rewriting import Rewriting
from .finding import Finding
from .own_code import dotted, given_to, receiver_of
from .script_names import ScriptNames
from .walk import Located, text_of

_AMP = frozenset({"torch.amp", "torch.cuda.amp", "apex.amp"})


def amp_backward(names: ScriptNames) -> Iterator[Finding]:
    for call, receiver, _ in names.methods("backward"):
        module, given = receiver_of(call), given_to(call)
        if receiver in names.values or module is None or not names.is_one_of(module, _AMP):
            continue
        scaler = next(iter(sorted(names.scalers)), None)
        loss = text_of(given[0]) if given else "loss"
        scaled = loss if scaler is None else f"{scaler}.scale({loss})"
        of_sum = isinstance(given[0], ast.Name | ast.Attribute | ast.Call | ast.Subscript) if given else True
        yield names.finding(
            call, "amp-backward",
            f"{receiver} has no function backward: a GradScaler scales the loss, and backward is the tensor's",
            f"{scaled if scaler or of_sum else f'({loss})'}.backward()",
        )  # fmt: skip


def unscale_name(names: ScriptNames) -> Iterator[Finding]:
    for call, receiver, _ in names.methods("unscale"):
        if receiver in names.scalers:
            arguments = ", ".join(map(text_of, given_to(call)))
            yield names.finding(
                call, "scaler-unscale",
                "a GradScaler has no method unscale; unscale_, which works in place, is meant",
                f"{receiver}.unscale_({arguments})",
            )  # fmt: skip


def scaler_in_loop(names: ScriptNames) -> Iterator[Finding]:
    """Only where the optimizer outlives the pass of the loop: a loop over folds builds both anew, and rightly so."""
    for scaler in sorted(names.scalers):
        steps = _steps(names, scaler)
        for value, made in names.values.get(scaler, ()):
            if value is None or not names.makes_scaler(value):
                continue
            for loop in made.place.loops[::-1]:
                inside = [(call, at) for call, at in steps if loop in at.place.loops]
                if inside and not any(_bound_in(names, loop, call) for call, _ in inside):
                    message = (
                        f"the loop in line {getattr(loop, 'lineno', 1)} builds a new GradScaler in each pass, so the "
                        f"scale starts at its first value every time and never settles: build it before that loop"
                    )
                    yield names.finding(value, "scaler-in-loop", message, _before_loop(names, loop, value))
                    break


def scaler_not_saved(names: ScriptNames) -> Iterator[Finding]:
    """A checkpoint with the state of the optimizer and not of the scaler; a state that is saved and never loaded."""
    for scaler in sorted(names.scalers):
        if not names.made_by(scaler) or escapes(names, scaler):
            continue
        tail = scaler.rpartition(".")[2]
        for method in ("state_dict", "load_state_dict"):
            calls = names.methods(method)
            if any(receiver.rpartition(".")[2] == tail for _, receiver, _ in calls):
                continue
            for call, receiver, at in calls:
                if not names.is_optimizer(receiver):
                    continue
                local = scaler if at.place.classes or not scaler.startswith("self.") else tail
                with_it = _with_state if method == "state_dict" else _with_load
                advice = with_it(names, call, local)
                if advice is not None:
                    yield names.finding(
                        call, "scaler-not-saved",
                        f"the checkpoint has the state of {receiver} and not that of {scaler}: after "
                        "loading it, the scale "
                        "starts anew, and the first steps are skipped until it has fallen again. Save and load it too",
                        advice,
                    )  # fmt: skip


RULES = (amp_backward, unscale_name, scaler_in_loop, scaler_not_saved)


def _with_state(names: ScriptNames, call: ast.Call, scaler: str) -> str | Rewriting | None:
    parent: ast.AST = names.statements.parents[call]
    state = f"{scaler}.state_dict()"
    if isinstance(parent, ast.Dict):
        return f"{text_of(call)}, 'scaler': {state}"
    if isinstance(parent, ast.keyword):
        return f"{text_of(call)}, scaler={state}"
    if isinstance(parent, ast.Assign) and isinstance(target := parent.targets[0], ast.Subscript):
        return names.rewriting().behind(parent, [f"{text_of(target.value)}['scaler'] = {state}"])
    if isinstance(parent, ast.List | ast.Tuple):
        return f"{text_of(call)}, {state}"
    if isinstance(parent, ast.Call) and (dotted(parent.func) or "").endswith("save") and len(parent.args) > 1:
        state_of = f"{{'optimizer': {text_of(call)}, 'scaler': {state}}}"
        return state_of if _loads(names) == [] else None
    return None


def _before_loop(names: ScriptNames, loop: ast.AST, value: ast.expr) -> Rewriting:
    statement = names.statements.of(value)
    assert isinstance(loop, ast.stmt)
    source = names.statements.source(statement)
    return names.rewriting().without(statement).before(loop, source)


def _loads(names: ScriptNames) -> list[ast.Call]:
    return [call for call, receiver, _ in names.methods("load_state_dict") if names.is_optimizer(receiver)]


def _key(names: ScriptNames, scaler: str) -> str:
    """The key under which the script saves the scaler's state."""
    for call, receiver, _ in names.methods("state_dict"):
        parent = names.statements.parents[call]
        if receiver.rpartition(".")[2] == scaler.rpartition(".")[2]:
            if isinstance(parent, ast.Dict):
                return text_of(parent.keys[parent.values.index(call)] or call)
            if isinstance(parent, ast.keyword):
                return repr(parent.arg)
            if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript):
                return text_of(parent.targets[0].slice)
    return "'scaler'"


def _with_load(names: ScriptNames, call: ast.Call, scaler: str) -> Rewriting | None:
    """Only where the checkpoint is taken apart by keys: `optimizer.load_state_dict(state["optimizer"])`."""
    given = call.args[0] if call.args else None
    if isinstance(given, ast.Subscript):
        source = text_of(given.value)
        line = f"{scaler}.load_state_dict({source}[{_key(names, scaler)}])"
        return names.rewriting().behind(names.statements.of(call), [line])
    return None


def _steps(names: ScriptNames, scaler: str) -> list[tuple[ast.Call, Located]]:
    return [(call, at) for call, receiver, at in names.methods("step") if receiver == scaler and call.args]


def escapes(names: ScriptNames, scaler: str) -> bool:
    """True if the scaler is used where this file does not show what becomes of it. Known uses are its methods, other
    names for it, tests of it, and calls of the file's own functions."""
    own = {one.node.name for one in names.all if isinstance(one.node, ast.FunctionDef)}
    reads = [one.node for one in names.all if isinstance(one.node, ast.Name | ast.Attribute)
             and isinstance(one.node.ctx, ast.Load) and dotted(one.node) == scaler]  # fmt: skip
    harmless: set[int] = set()
    for one in names.all:
        match one.node:
            case ast.Attribute(value=value):
                harmless.add(id(value))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=words) if name in own:
                harmless |= {id(arg) for arg in args} | {id(word.value) for word in words}
            case ast.Assign(targets=[ast.Name()], value=value):
                harmless.add(id(value))
            case ast.Compare(left=left):
                harmless.add(id(left))
            case ast.If(test=test) | ast.IfExp(test=test):
                harmless.add(id(test))
    return any(id(one) not in harmless for one in reads)


def _bound_in(names: ScriptNames, loop: ast.AST, step: ast.Call) -> bool:
    """True if the loop binds the optimizer that steps, or the object that holds it, or if this cannot be known."""
    optimizer = dotted(step.args[0])
    if optimizer is None:
        return True
    holders = {optimizer, optimizer.partition(".")[0]}
    bound = [one for name in holders for _, one in names.values.get(name, ())]
    return any(loop in one.place.loops or one.node is loop for one in bound)
