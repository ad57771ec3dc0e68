"""The rules about what depends on a step: clipping of gradients that still have a scaler's scale, and schedules and
moving averages that run although the scaler skipped the step, or before the step."""

import ast
from collections.abc import Iterator

from ....models.python_text.rewriting import Rewriting
from .events import UNKNOWN, Event, Events
from .finding import Finding
from .flow import Called
from .order_rules import runs_with, site_of, spelled
from .own_code import dotted, given_to, receiver_of
from .script_names import ScriptNames
from .walk import text_of

_SCALE = "scale_before"


def scheduler_before_step(names: ScriptNames, events: Events) -> Iterator[Finding]:
    for schedule in events.of("schedule"):
        own = _optimizer_of(events, schedule)
        steps = [one for one in events.of("step")
                 if one.place.loops == schedule.place.loops and own in (None, one.target)
                 and not one.place.excludes(schedule.place)]  # fmt: skip
        if not steps or not schedule.place.loops or any(one.order < schedule.order for one in steps):
            continue
        anchor = _behind_update(events, steps[-1], schedule)
        moved = schedule.at.statement
        yield names.finding(
            schedule.at.call, "scheduler-order",
            f"{schedule.target}.step() runs before {steps[0].scaler}.step: the first learning rate is never used",
            names.rewriting().without(moved).behind(anchor, names.statements.source(moved)),
        )  # fmt: skip


def scheduler_on_skipped(names: ScriptNames, events: Events) -> Iterator[Finding]:
    for schedule in events.of("schedule"):
        step = _step_of(events, schedule)
        if step is not None:
            yield names.finding(
                schedule.at.call, "scheduler-skipped",
                f"{schedule.target}.step() runs also where {step.scaler} has skipped the step, so the schedule goes on "
                "without the optimizer: a skipped step lowers the scale, which tells it",
                _only_after_step(names, events, step, schedule),
            )  # fmt: skip


def average_on_skipped(names: ScriptNames, events: Events) -> Iterator[Finding]:
    statements = {one.at.statement for one in events.of("average")}
    for average in events.of("average"):
        step = _step_of(events, average)
        if step is not None and not statements & set(average.at.frame.sites):
            yield names.finding(
                average.at.call, "average-skipped",
                f"{average.target} averages also where {step.scaler} has skipped the step, so the same weights count "
                "again: a skipped step lowers the scale, which tells it",
                _only_after_step(names, events, step, average),
            )  # fmt: skip


def _optimizer_of(events: Events, schedule: Event) -> str | None:
    """The optimizer whose rates the schedule sets, where the script shows it."""
    for value, at in events.names.values.get(schedule.target or "", ()):
        if isinstance(value, ast.Call) and value.args:
            name = events.flow.name_at(value.args[0], at)
            return name if name in events.names.optimizers else None
    return None


def _step_of(events: Events, event: Event) -> Event | None:
    """The step that the event follows in each pass, where nothing tells whether it was skipped."""
    steps = [
        one
        for one in events.before(event, "step")
        if one.place.loops and _inner(events, event) == _inner(events, one)
    ]
    if not steps or events.knows_of_skips(event, steps[-1]):
        return None
    return steps[-1]


def _inner(events: Events, event: Event) -> ast.AST | None:
    """The innermost loop that computes gradients: not one over parameters or schedules."""
    training = {loop for each in events.of("backward") for loop in each.place.loops}
    return next((one for one in reversed(event.place.loops) if one in training), None)


def _behind_update(events: Events, step: Event, event: Event) -> ast.stmt:
    """The statement of the update, or of the step, in the function that also holds the event."""
    updates = [one for one in events.after(step, "update") if one.scaler == step.scaler]
    last = updates[0] if updates and updates[0].place.loops == step.place.loops else step
    sites, others = last.at.sites, event.at.sites
    apart = (site for place, site in enumerate(sites) if site is not others[min(place, len(others) - 1)])
    return next(apart, sites[-1])


def _only_after_step(names: ScriptNames, events: Events, step: Event, event: Event) -> Rewriting:
    """The scale is remembered before the update, and the statement stands under a test of it."""
    updates = [one for one in events.after(step, "update") if one.scaler == step.scaler]
    scaler = spelled(events, step.scaler or "scaler", (updates or [step])[0].at)
    here = _in_the_function_of(event, step, spelled(events, step.scaler or "scaler", event.at))
    statement = event.at.statement
    loops = [one for one in event.place.loops if one not in step.place.loops]
    if loops and isinstance(loops[0], ast.stmt) and event.at.frame is step.at.frame:
        statement = loops[0]
    together = len(event.at.sites) == len(step.at.sites)
    kept, there = (_SCALE if together else f"{_holder(one)}{_SCALE}" for one in (here, scaler))
    first = (updates or [step])[0]
    source = [f"    {line}" for line in names.statements.source(statement)]
    advice = names.rewriting()
    if first.at.statement is not statement and kept not in names.values:
        advice.before(first.at.statement, [f"{there} = {scaler}.get_scale()"])
    without = [f"not ({text})" if held else f"({text})" for text, held in _further_tests(first, event)]
    test = f"if {' or '.join([*without, f'{here}.get_scale() >= {kept}'])}:  # not skipped"
    if updates and event.order < updates[0].order and updates[0].at.frame is event.at.frame:
        return advice.without(statement).behind(updates[0].at.statement, [test, *source])
    return advice.in_place_of(statement, [test, *source])


def _in_the_function_of(event: Event, step: Event, scaler: str) -> str:
    """``self.scaler`` of an own object, as a function calls it that has the object: by the call that leads to the
    step."""
    outer, inner = event.at.frame, step.at.frame
    if (
        not scaler.startswith("self.")
        or outer.owner == inner.owner
        or len(step.at.sites) <= len(outer.sites) + 1
    ):
        return scaler
    site = step.at.sites[len(outer.sites)]
    called = next((one for one in ast.walk(site) if isinstance(one, ast.Call)), None)
    receiver = (
        called.func.value if called and isinstance(called.func, ast.Attribute) else called and called.func
    )
    name = dotted(receiver) if receiver else None
    return scaler if name is None else name + scaler.removeprefix("self")


def _further_tests(first: Event, event: Event) -> list[tuple[str, bool]]:
    """The tests that the update needs and the event does not, as the event's function writes them."""
    found: set[tuple[str, bool]] = set()
    for text, held in first.extra(event):
        value, outer, _ = first.at.frame.arguments.get(text, (None, None, None))
        if value is not None and outer is event.at.frame:
            text = ast.unparse(value)
        if (text, held) not in event.place.conditions:
            found.add((text, held))
    return sorted(found)


def _holder(scaler: str) -> str:
    return scaler.rpartition(".")[0] + "." if "." in scaler else ""


def clip_before_unscale(names: ScriptNames, events: Events) -> Iterator[Finding]:
    for clip in events.of("clip"):
        if clip.at.method == "register_hook":
            continue
        backward = next(reversed(events.before(clip, "backward")), None)
        if backward is None or backward.scaler in (None, UNKNOWN) or not runs_with(clip, backward):
            continue
        scaler = backward.scaler or ""
        steps = [one for one in events.after(clip, "step") if one.scaler == scaler]
        if not steps or events.by_hand(scaler) or _unscaled(events, clip, scaler):
            continue
        owned = [one for one in steps if clip.target and events.flow.owner(one.target) == clip.target]
        step = (owned or steps)[0]
        anchor = site_of(clip, backward)
        optimizer = text_of(step.at.argument(0, "optimizer") or step.at.call)
        line = f"{spelled(events, scaler, backward.at)}.unscale_({optimizer})"
        advice = names.rewriting().before(anchor, [line])
        for late in events.after(clip, "unscale"):
            if late.order < step.order and late.target == step.target:
                advice.without(late.at.statement)
        yield names.finding(
            clip.at.call, "clip-before-unscale",
            f"the gradients that are clipped still have the scale of {scaler}, so the clipping shrinks them to almost "
            "nothing: unscale them first",
            advice,
        )  # fmt: skip


def clipping_hook(names: ScriptNames, events: Events) -> Iterator[Finding]:
    """A hook sees the gradient while backward runs, so it is scaled whatever is unscaled later."""
    for hook in events.of("clip"):
        scalers = sorted({one.scaler for one in events.of("step") if one.scaler})
        if hook.at.method != "register_hook" or not scalers or events.by_hand(scalers[0]):
            continue
        given = hook.at.call.args[0]
        function = names.own.functions.get(dotted(given) or "") or given
        advice, scale = names.rewriting(), f"{spelled(events, scalers[0], hook.at)}.get_scale()"
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
            bounds = [one for one in given_to(call) if isinstance(one, ast.Constant | ast.UnaryOp)]
            for bound in bounds:
                advice.replace(bound, f"{text_of(bound)} * {scale}")
            if bounds:
                yield names.finding(
                    hook.at.call, "clip-before-unscale",
                    f"the hook clips gradients that still have the scale of {scalers[0]}: its bounds "
                    "need that scale too, "
                    "or clip after unscale_ instead",
                    advice,
                )  # fmt: skip
                break


def _unscaled(events: Events, clip: Event, scaler: str) -> bool:
    """True if the gradients that are clipped have been unscaled since the last update, or this is not known."""
    since = events.last_update(clip, scaler)
    others = {events.flow.owner(one) for one in events.names.optimizers}
    for one in events.before(clip, "unscale"):
        of_other = clip.target and clip.target in others and events.flow.owner(one.target) != clip.target
        if one.scaler == scaler and one.order > since and not of_other:
            return True
    before = [one for one in events.called if since < one.order < clip.order]
    return any(_may_unscale(events, one) for one in before)


def _may_unscale(events: Events, one: Called) -> bool:
    """A helper of another file, or the misspelt method."""
    name = one.method or dotted(one.call.func) or ""
    receiver = receiver_of(one.call)
    of_scaler = receiver is not None and events.flow.scaler_of(receiver, one.frame)
    return "unscale" in name and (not of_scaler or name == "unscale")


RULES = (clip_before_unscale, clipping_hook, scheduler_before_step, scheduler_on_skipped, average_on_skipped)
