"""Mistakes around a GradScaler: the order of its calls, and what is called in its place."""

import ast
from collections.abc import Iterator

from .script_names import ScriptNames, dotted
from .training_script import Finding
from .walk import Located, text_of

_AMP = frozenset({"torch.amp", "torch.cuda.amp", "apex.amp"})
_CLIPS = frozenset(
    {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"}
    | {"torch.nn.utils.clip_grad.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_value_"}
)


def amp_backward(names: ScriptNames) -> Iterator[Finding]:
    for call, receiver, _ in names.methods("backward"):
        assert isinstance(call.func, ast.Attribute)
        if receiver in names.values or not names.is_one_of(call.func.value, _AMP):
            continue
        scaler = next(iter(sorted(names.scalers)), "scaler")
        loss = text_of(call.args[0]) if call.args else "loss"
        yield names.finding(
            call, "amp-backward",
            f"{receiver} has no function backward: a GradScaler scales the loss, and backward is the tensor's",
            names.script.line_with(call, f"{scaler}.scale({loss}).backward()"),
        )  # fmt: skip


def unscale_name(names: ScriptNames) -> Iterator[Finding]:
    for call, receiver, _ in names.methods("unscale"):
        if receiver in names.scalers:
            arguments = ", ".join(map(text_of, call.args))
            yield names.finding(
                call, "scaler-unscale",
                "a GradScaler has no method unscale; unscale_, which works in place, is meant",
                names.script.line_with(call, f"{receiver}.unscale_({arguments})"),
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
                    yield names.finding(
                        value, "scaler-in-loop", message, names.script.lines[value.lineno - 1].strip()
                    )
                    break


def unscaled_step(names: ScriptNames) -> Iterator[Finding]:
    for call, receiver, at in names.methods("step"):
        if call.args or call.keywords or not names.is_optimizer(receiver) or receiver in names.scalers:
            continue
        backward = _last_backward(names, at)
        scaler = names.scaled_backward(*backward) if backward is not None else None
        if backward is None or scaler is None or not at.place.follows(backward[1].place):
            continue
        if _handles(names, scaler, receiver, at):
            continue
        yield names.finding(
            call, "unscaled-step",
            f"{receiver}.step() takes gradients that {scaler} has scaled, so the step is thousands of times too long",
            names.script.line_with(call, f"{scaler}.step({receiver})"),
        )  # fmt: skip


def missing_update(names: ScriptNames) -> Iterator[Finding]:
    updated = {receiver for _, receiver, _ in names.methods("update")}
    for scaler in sorted(names.scalers - updated):
        steps = _steps(names, scaler)
        if steps and not _escapes(names, scaler):
            call, _ = steps[-1]
            yield names.finding(
                call, "missing-update",
                f"{scaler}.update() is missing: the scale never changes, and the second step raises RuntimeError",
                names.script.line_with(call, text_of(call)) + f"\n{scaler}.update()",
            )  # fmt: skip


def update_between_steps(names: ScriptNames) -> Iterator[Finding]:
    for call, scaler, at in names.methods("update"):
        steps = _steps(names, scaler) if scaler in names.scalers else []
        steps = [(step, one) for step, one in steps if one.place == at.place]
        before = [step for step, one in steps if one.order < at.order]
        after = [(step, one) for step, one in steps if one.order > at.order]
        if not before or not after or text_of(before[-1].args[0]) == text_of(after[0][0].args[0]):
            continue
        if not _may_run_backward(names, at, after[0][1]):
            yield names.finding(
                call, "update-between-steps",
                f"{scaler}.update() stands between two steps whose gradients have the old scale: where it changes the "
                "scale, the second step is too long or too short. Update once, after the last step",
                f"# {scaler}.update() once, after the last step",
            )  # fmt: skip


def update_in_window(names: ScriptNames) -> Iterator[Finding]:
    """Accumulation: the step waits for the last part, the update does not."""
    for call, scaler, at in names.methods("update"):
        if scaler not in names.scalers or call.args or _method_at(names, "unscale_", scaler, at):
            continue
        steps = [one for _, one in _steps(names, scaler) if one.place.scope is at.place.scope]
        further = [set(one.place.conditions) - set(at.place.conditions) for one in steps]
        same_loop = all(one.place.loops == at.place.loops for one in steps)
        if steps and same_loop and all(any("%" in test for test, _ in tests) for tests in further):
            test = next(test for test, _ in sorted(further[0]) if "%" in test)
            yield names.finding(
                call, "update-in-window",
                f"{scaler}.update() runs in passes that take no step, so the parts of a batch are scaled differently; "
                f"it belongs under the test `{test}`, behind {scaler}.step",
                f"# behind {scaler}.step: {scaler}.update()",
            )  # fmt: skip


def clip_before_unscale(names: ScriptNames) -> Iterator[Finding]:
    for call, at in names.calls:
        if not names.is_one_of(call.func, _CLIPS):
            continue
        backward = _last_backward(names, at)
        scaler = names.scaled_backward(*backward) if backward is not None else None
        if backward is None or scaler is None or not at.place.follows(backward[1].place):
            continue
        after = [
            (step, one)
            for step, one in _steps(names, scaler)
            if one.order > at.order and one.place.scope is at.place.scope and not one.place.excludes(at.place)
        ]
        if not after or _unscales_before(names, scaler, at):
            continue
        optimizer = text_of(after[0][0].args[0])
        yield names.finding(
            call, "clip-before-unscale",
            f"the gradients that are clipped still have the scale of {scaler}, so the clipping shrinks them to almost "
            "nothing: unscale them first",
            f"{scaler}.unscale_({optimizer})\n" + names.script.line_with(call, text_of(call)),
        )  # fmt: skip


def optimizer_without_scaler_state(names: ScriptNames) -> Iterator[Finding]:
    """A script that saves and loads the optimizer, and of its scaler neither."""
    stated = {
        receiver for name in ("state_dict", "load_state_dict") for _, receiver, _ in names.methods(name)
    }
    loaded = {receiver for _, receiver, _ in names.methods("load_state_dict")}
    for scaler in sorted(names.scalers - stated):
        if not any(names.makes_scaler(value) for value, _ in names.values.get(scaler, ())) or _escapes(
            names, scaler
        ):
            continue
        for call, receiver, _ in names.methods("state_dict"):
            if receiver in names.optimizers and receiver in loaded and _in_dictionary(names, call):
                yield names.finding(
                    call, "scaler-not-saved",
                    f"the checkpoint has the state of {receiver} and not that of {scaler}: after loading it, the scale "
                    "starts anew, and the first steps are skipped until it has fallen again. Load it too",
                    names.script.line_with(call, f"{text_of(call)}, 'scaler': {scaler}.state_dict()"),
                )  # fmt: skip


RULES = (
    amp_backward, unscale_name, scaler_in_loop, unscaled_step, missing_update, update_between_steps, update_in_window,
    clip_before_unscale, optimizer_without_scaler_state,
)  # fmt: skip


def _steps(names: ScriptNames, scaler: str) -> list[tuple[ast.Call, Located]]:
    return [(call, at) for call, receiver, at in names.methods("step") if receiver == scaler and call.args]


def _method_at(names: ScriptNames, method: str, scaler: str, at: Located) -> bool:
    return any(name == scaler and one.place.scope is at.place.scope for _, name, one in names.methods(method))


def _last_backward(names: ScriptNames, at: Located) -> tuple[ast.Call, Located] | None:
    """The backward before ``at`` in the same function, on no opposite branch."""
    before = [
        (call, one)
        for call, _, one in names.methods("backward")
        if one.place.scope is at.place.scope and one.order < at.order and not one.place.excludes(at.place)
    ]
    return before[-1] if before else None


def _handles(names: ScriptNames, scaler: str, optimizer: str, at: Located) -> bool:
    """Whether the script unscales, or steps through the scaler, in a way that may concern this optimizer."""
    for method in ("step", "unscale_", "unscale"):
        for call, receiver, _ in names.methods(method):
            if receiver == scaler and call.args:
                other = dotted(call.args[0])
                known = other in names.optimizers and optimizer in names.optimizers
                if other == optimizer or not known:
                    return True
    by_hand = ("get_scale", "_scale", "inv_scale", "found_inf")
    scope = at.place.scope
    return any(
        isinstance(one.node, ast.Attribute) and one.node.attr in by_hand and one.place.scope is scope
        for one in names.all
    )


def _escapes(names: ScriptNames, scaler: str) -> bool:
    """Whether the scaler goes where this file does not show what becomes of it. Its own functions, and tests of it,
    are known."""
    own = {one.node.name for one in names.all if isinstance(one.node, ast.FunctionDef)}
    harmless: set[int] = set()
    for one in names.all:
        match one.node:
            case ast.Attribute(value=value):
                harmless.add(id(value))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=words) if name in own:
                harmless |= {id(arg) for arg in args} | {id(word.value) for word in words}
            case ast.Compare(left=left):
                harmless.add(id(left))
            case ast.If(test=test) | ast.IfExp(test=test):
                harmless.add(id(test))
    return any(
        isinstance(one.node, ast.Name | ast.Attribute)
        and isinstance(one.node.ctx, ast.Load)
        and dotted(one.node) == scaler
        and id(one.node) not in harmless
        for one in names.all
    )


def _bound_in(names: ScriptNames, loop: ast.AST, step: ast.Call) -> bool:
    """Whether the loop binds the stepped optimizer, or the object that holds it; or that cannot be known."""
    optimizer = dotted(step.args[0])
    if optimizer is None:
        return True
    holders = {optimizer, optimizer.partition(".")[0]}
    targets = {
        name
        for name in holders
        for _, one in names.values.get(name, ())
        if loop in one.place.loops or one.node is loop
    }
    return bool(targets)


def _may_run_backward(names: ScriptNames, start: Located, end: Located) -> bool:
    """Whether a call between the two may run a backward: any but those of the scaler, the optimizer or of clipping."""
    known = ("step", "update", "unscale_", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "parameters")
    for call, at in names.calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func) or ""
        if start.order < at.order < end.order and call is not start.node and name not in known:
            return True
    return False


def _unscales_before(names: ScriptNames, scaler: str, at: Located) -> bool:
    """Whether an earlier call may have unscaled, or the clipping reckons with the scale itself."""
    for one in names.all:
        if one.place.scope is not at.place.scope or not isinstance(one.node, ast.Attribute | ast.Name):
            continue
        name = one.node.attr if isinstance(one.node, ast.Attribute) else one.node.id
        if name in ("get_scale", "_scale") or ("unscale" in name and one.order < at.order):
            return True
    return False


def _in_dictionary(names: ScriptNames, call: ast.Call) -> bool:
    return any(isinstance(one.node, ast.Dict) and call in one.node.values for one in names.all)
