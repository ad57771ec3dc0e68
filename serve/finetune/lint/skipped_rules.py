"""The rules about schedules and moving averages that run although the scaler skipped the step, or before the step."""

import ast
from collections.abc import Iterator

from .events import Event, Events
from .order_rules import spelled
from .own_code import dotted
from .rewriting import Rewriting
from .script_names import ScriptNames
from .training_script import Finding

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


RULES = (scheduler_before_step, scheduler_on_skipped, average_on_skipped)


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
