"""The order of backward, unscale, clipping, step and update around a GradScaler."""

import ast
from collections.abc import Iterator, Sequence

from ....models.python_text.rewriting import Rewriting
from .events import UNKNOWN, Event, Events
from .finding import Finding
from .flow import Called
from .own_code import dotted, receiver_of
from .scaler_rules import escapes
from .script_names import ScriptNames
from .walk import text_of


def unscaled_step(names: ScriptNames, events: Events) -> Iterator[Finding]:
    for step in events.of("plain-step"):
        backward = next(reversed(events.before(step, "backward")), None)
        scaler = backward.scaler if backward is not None else None
        if backward is None or scaler in (None, UNKNOWN) or not runs_with(step, backward):
            continue
        handled = [one.target for one in events.of("step", "unscale") if one.scaler == scaler]
        known = step.target in names.optimizers
        if any(one == step.target or one not in names.optimizers or not known for one in handled):
            continue
        if scaler is None or events.by_hand(scaler):
            continue
        assert isinstance(step.at.call.func, ast.Attribute)
        optimizer = text_of(step.at.call.func.value)
        yield names.finding(
            step.at.call, "unscaled-step",
            f"{optimizer}.step() takes gradients that {scaler} has scaled, so the step is thousands of times too long",
            f"{spelled(events, scaler, step.at)}.step({optimizer})",
        )  # fmt: skip


def unscaled_backward(names: ScriptNames, events: Events) -> Iterator[Finding]:
    for step in events.of("step"):
        previous = [one.order for one in events.before(step, "step") if one.place.loops == step.place.loops]
        for backward in events.before(step, "backward"):
            if backward.scaler is not None or backward.order < max(previous, default=-1):
                continue
            if not runs_with(backward, step) or not same_loop(backward, step):
                continue
            between = [one for one in events.after(backward, "plain-step", "step") if one.order <= step.order]
            otherwise = any(
                one.scaler and one.place.excludes(backward.place) for one in events.of("backward")
            )
            if between[0] is not step or otherwise:
                continue
            call = backward.at.call
            loss = receiver_of(call) or call
            if events.flow.full(loss, backward.at.frame) == "torch.autograd":
                loss = call.args[0]
            scaler = spelled(events, step.scaler or "scaler", backward.at)
            yield names.finding(
                loss, "unscaled-backward",
                f"{text_of(loss)} is not scaled, and {scaler}.step divides its gradients by the scale "
                "all the same: they "
                "are thousands of times too small, or it raises an error because nothing was scaled",
                names.rewriting().replace(loss, f"{scaler}.scale({text_of(loss)})"),
            )  # fmt: skip


def missing_update(names: ScriptNames, events: Events) -> Iterator[Finding]:
    for scaler in sorted({one.scaler for one in events.of("step") if one.scaler}):
        steps = [one for one in events.of("step") if one.scaler == scaler]
        updated = any(one.scaler == scaler for one in events.of("update"))
        if updated or _updated_elsewhere(names, events, scaler):
            continue
        statement = site_of(steps[-1], steps[0])
        own = dotted(steps[-1].at.argument(0, "optimizer"))
        for loop in steps[-1].at.at.place.loops[-1:]:
            if isinstance(loop, ast.For) and own is not None and own == dotted(loop.target):
                statement = loop
        yield names.finding(
            steps[-1].at.call, "missing-update",
            f"{scaler}.update() is missing: the scale never changes, and the second step raises RuntimeError",
            names.rewriting().behind(statement, [f"{spelled(events, scaler, steps[-1].at)}.update()"]),
        )  # fmt: skip


def update_between_steps(names: ScriptNames, events: Events) -> Iterator[Finding]:
    for update in events.of("update"):
        steps = [one for one in events.of("step") if one.scaler == update.scaler
                 and one.place.loops == update.place.loops
                 and one.place.conditions == update.place.conditions]  # fmt: skip
        before = [one for one in steps if one.order < update.order]
        after = [one for one in steps if one.order > update.order]
        if not before or not after or before[-1].target == after[0].target:
            continue
        if not _may_run_backward(events, update, after[0]):
            advice = names.rewriting().without(update.at.statement)
            later = [one for one in events.of("update") if one.scaler == update.scaler]
            if later[-1].order <= after[-1].order:
                advice.behind(site_of(after[-1], update), [text_of(update.at.call)])
            yield names.finding(
                update.at.call, "update-between-steps",
                f"{update.scaler}.update() stands between two steps whose gradients have the old scale: where it "
                "changes the scale, the second step is too long or too short. Update once, after the last step",
                advice,
            )  # fmt: skip


def update_in_window(names: ScriptNames, events: Events) -> Iterator[Finding]:
    """Accumulation: the step waits for the last part, the update does not."""
    for update in events.of("update"):
        used = [one for one in events.of("step", "unscale") if one.scaler == update.scaler]
        if not used or update.at.call.args or any(not same_loop(one, update) for one in used):
            continue
        further = frozenset.intersection(*[one.extra(update) for one in used])
        if not further:
            continue
        step = next(reversed([one for one in used if one.kind == "step"]), used[-1])
        test, _ = sorted(further)[0]
        yield names.finding(
            update.at.call, "update-in-window",
            f"{update.scaler}.update() runs in passes that take no step, so it raises AssertionError, "
            "or the parts of a "
            f"batch are scaled differently; it belongs under the test `{test}`, behind {update.scaler}.step",
            names.rewriting().without(site_of(update, step)).behind(step.at.statement, [text_of(update.at.call)]),
        )  # fmt: skip


def unscaled_again(names: ScriptNames, events: Events) -> Iterator[Finding]:
    for unscale in events.of("unscale"):
        since = events.last_update(unscale, unscale.scaler)
        for one in events.before(unscale, "unscale", "step"):
            if one.scaler != unscale.scaler or one.target != unscale.target or one.order < since:
                continue
            subset = not one.extra(unscale) or not unscale.extra(one)
            in_loop = one.place.loops[:1] == unscale.place.loops[:1]
            if subset and in_loop and one.at.call is not unscale.at.call:
                what = "has unscaled" if one.kind == "unscale" else "has stepped"
                yield names.finding(
                    unscale.at.call, "unscale-again",
                    f"{unscale.scaler} {what} {unscale.target} already in line {one.at.call.lineno}, "
                    "so this line raises "
                    "RuntimeError: gradients are unscaled once between two updates, before they are clipped",
                    names.rewriting().without(unscale.at.statement),
                )  # fmt: skip
                break


def passes_without_update(names: ScriptNames, events: Events) -> Iterator[Finding]:
    """An unscale (or a step) in a pass that ends without an update: the next pass raises RuntimeError."""
    for used in events.of("unscale", "step"):
        updates = [one for one in events.after(used, "update") if one.scaler == used.scaler]
        if not updates or not used.place.loops:
            continue
        inner = all(len(one.place.loops) < len(used.place.loops) for one in updates)
        inner = inner and not _bound_by_loop(names, used)
        further = [one.extra(used) for one in updates]
        if not inner and (not all(further) or _covered(further)):
            continue
        if used.kind == "step" and any(one.kind == "unscale" for one in events.before(used, "unscale")):
            continue
        yield from _without_update(names, events, used, updates[-1], inner)


def _without_update(
    names: ScriptNames, events: Events, used: Event, update: Event, inner: bool
) -> Iterator[Finding]:
    tests = [test for test, _ in sorted(update.extra(used))]
    depends = used.kind == "step" or any(_depends_on_gradients(events, test, used) for test in tests)
    if depends and not inner:
        yield names.finding(
            update.at.call, "update-skipped",
            f"{update.scaler}.update() runs only under the test `{tests[0]}`, while line "
            f"{used.at.call.lineno} has used "
            f"the gradients already: after a pass without it, {used.scaler} raises RuntimeError. Update in each pass",
            _update_always(names, used, update),
        )  # fmt: skip
        return
    steps = [one for one in events.after(used, "step") if one.scaler == used.scaler]
    if not steps or used.kind == "step":
        return
    loop = used.place.loops[-1]
    trains = any(loop in one.place.loops for one in events.of("backward"))
    if inner and isinstance(loop, ast.stmt) and not trains:
        yield names.finding(
            used.at.call, "unscale-again",
            f"{used.scaler}.unscale_ runs in each pass of the loop in line {loop.lineno}, whose second pass raises "
            "RuntimeError: gradients are unscaled once between two updates",
            names.rewriting().without(used.at.statement).before(loop, [text_of(used.at.call)]),
        )  # fmt: skip
        return
    moved = [used.at.statement]
    moved += [one.at.statement for one in events.after(used, "clip")
              if one.order < steps[0].order and one.at.frame is used.at.frame
              and one.at.statement in names.statements.body(used.at.statement)]  # fmt: skip
    advice = names.rewriting()
    text = [line for one in moved for line in names.statements.source(one)]
    for one in moved:
        advice.without(one)
    yield names.finding(
        used.at.call, "unscale-in-window",
        f"{used.scaler}.unscale_ runs for each part of a batch, the update only after the last: the second part raises "
        "RuntimeError, and gradients of different scales are added. Unscale once, before the step",
        advice.before(steps[0].at.statement, text),
    )  # fmt: skip


def _update_always(names: ScriptNames, used: Event, update: Event) -> Rewriting:
    text = [text_of(update.at.call)]
    block = names.statements.body(used.at.statement)
    around = [update.at.statement, *names.statements.around(update.at.statement)]
    holder = next((one for one in around if isinstance(one, ast.stmt) and one in block), update.at.statement)
    if holder is update.at.statement or isinstance(holder, ast.For | ast.While):
        leaving = [one.node for one in names.all if isinstance(one.node, ast.Continue)
                   and used.at.call.lineno < one.node.lineno < update.at.call.lineno]  # fmt: skip
        advice = names.rewriting()
        for one in leaving:
            advice.before(one, text)
        return advice if leaving else names.rewriting().replace(update.at.call, text[0])
    return names.rewriting().without(update.at.statement).behind(holder, text)


def other_optimizer(names: ScriptNames, events: Events) -> Iterator[Finding]:
    """One optimizer's gradients are unscaled, and another steps."""
    for scaler in sorted({one.scaler for one in events.of("unscale") if one.scaler}):
        unscaled = [one for one in events.of("unscale") if one.scaler == scaler]
        steps = [one for one in events.of("step") if one.scaler == scaler]
        if not all(one.target in names.optimizers for one in [*unscaled, *steps]) or not steps:
            continue
        stepped = {one.target for one in steps}
        for one in unscaled:
            after = [step for step in events.after(one, "step") if step.scaler == scaler]
            if one.target in stepped or not after:
                continue
            argument = after[0].at.argument(0, "optimizer")
            mine = one.at.argument(0, "optimizer")
            if argument is not None and mine is not None:
                yield names.finding(
                    after[0].at.call, "other-optimizer",
                    f"line {one.at.call.lineno} unscales the gradients of {one.target}, which never "
                    "steps: this line steps "
                    f"{after[0].target}, whose gradients nothing has clipped",
                    names.rewriting().replace(argument, text_of(mine)),
                )  # fmt: skip


RULES = (
    unscaled_step, unscaled_backward, missing_update, update_between_steps, update_in_window,
    unscaled_again, passes_without_update, other_optimizer,
)  # fmt: skip


def runs_with(one: Event, other: Event) -> bool:
    return one.place.follows(other.place)


def same_loop(one: Event, other: Event | Called) -> bool:
    """True if ``one`` stands inside all loops around ``other``; it may stand in a further loop inside of these."""
    return one.place.loops[: len(other.place.loops)] == other.place.loops


def site_of(event: Event, other: Event) -> ast.stmt:
    """The statement that leads to the event, in the function that both are called from."""
    mine, others, depth = event.at.sites, other.at.sites, 0
    while depth < min(len(mine), len(others)) - 1 and mine[depth] is others[depth]:
        depth += 1
    loops = [one for one in event.place.loops if one not in other.place.loops and isinstance(one, ast.stmt)]
    return loops[0] if loops and depth == len(mine) - 1 else mine[depth]


def spelled(events: Events, scaler: str, at: Called) -> str:
    """The name by which the function around ``at`` calls the scaler."""
    for one in events.called:
        if one.frame.scope is at.frame.scope and (receiver := receiver_of(one.call)) is not None:
            name = dotted(receiver)
            if name is not None and events.flow.scaler_of(receiver, one.frame) == scaler:
                return name
    return scaler


def _covered(further: Sequence[frozenset[tuple[str, bool]]]) -> bool:
    """True if two updates, given by the tests around each, stand on the two branches of one test."""
    single = {next(iter(tests)) for tests in further if len(tests) == 1}
    return any((test, not outcome) in single for test, outcome in single)


def _bound_by_loop(names: ScriptNames, used: Event) -> bool:
    """True if a loop around ``used`` binds its optimizer, so that each pass has another one, or this is not known."""
    argument = used.at.argument(0, "optimizer")
    head = (dotted(argument) or "").partition(".")[0]
    return dotted(argument) is None or any(
        one.node in used.place.loops for _, one in names.values.get(head, ())
    )


def _depends_on_gradients(events: Events, test: str, used: Event) -> bool:
    if ".grad" in test or "isfinite" in test:
        return True
    updates = events.after(used, "update")
    bound = [one for name in _words(test) for _, one in events.names.values.get(name, ())]
    return bool(updates) and any(
        one.place.scope is used.at.at.place.scope
        and used.at.at.order < one.order < updates[-1].at.at.order
        and not isinstance(one.node, ast.AugAssign | ast.For)
        for one in bound
    )


def _words(test: str) -> set[str]:
    if not test.isprintable() or test.startswith(("case ", "except ")):
        return set()
    return {text for node in ast.walk(ast.parse(test, mode="eval")) if (text := dotted(node))}


def _may_run_backward(events: Events, start: Event, end: Event) -> bool:
    """True if a call between ``start`` and ``end`` may run a backward: any but ``known`` and the own functions."""
    known = ("step", "update", "unscale_", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "parameters")
    for one in events.called:
        name = one.method or dotted(one.call.func) or ""
        own = events.flow.target(one.call, one.frame) is not None
        if start.order < one.order < end.order and name not in known and not own:
            return True
    return False


def _updated_elsewhere(names: ScriptNames, events: Events, scaler: str) -> bool:
    """True if any part of the file updates the scaler, or the file does not show what becomes of the scaler."""
    tail = scaler.rpartition(".")[2]
    if any(receiver.rpartition(".")[2] == tail for _, receiver, _ in names.methods("update")):
        return True
    return escapes(names, scaler)
