"""What follows a step although the scaler skipped it, or comes before it: schedules, moving averages."""

import ast
from collections.abc import Iterator

from .events import Event, Events
from .order_rules import same_loop, spelled
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
    steps = [one for one in events.before(event, "step") if one.place.loops and same_loop(event, one)
             and _inner(events, event) == _inner(events, one)]  # fmt: skip
    return steps[-1] if steps and not events.knows_of_skips(event, steps[-1]) else None


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
    here = spelled(events, step.scaler or "scaler", event.at)
    statement = event.at.statement
    loops = [one for one in event.place.loops if one not in step.place.loops]
    if loops and isinstance(loops[0], ast.stmt) and event.at.frame is step.at.frame:
        statement = loops[0]
    kept = _SCALE if len(event.at.sites) == len(step.at.sites) else f"{_holder(here)}{_SCALE}"
    first = (updates or [step])[0]
    source = [f"    {line}" for line in names.statements.source(statement)]
    advice = names.rewriting()
    if first.at.statement is not statement and kept not in names.values:
        advice.before(first.at.statement, [f"{kept} = {scaler}.get_scale()"])
    without = [f"not ({text})" if held else f"({text})" for text, held in sorted(first.extra(event))]
    test = f"if {' or '.join([*without, f'{here}.get_scale() >= {kept}'])}:  # not skipped"
    if updates and event.order < updates[0].order and updates[0].at.frame is event.at.frame:
        return advice.without(statement).behind(updates[0].at.statement, [test, *source])
    return advice.in_place_of(statement, [test, *source])


def _holder(scaler: str) -> str:
    return scaler.rpartition(".")[0] + "." if "." in scaler else ""
