"""Clipping of gradients that still have a scaler's scale."""

import ast
from collections.abc import Iterator

from .events import UNKNOWN, Event, Events
from .flow import Called
from .order_rules import runs_with, site_of, spelled
from .own_code import dotted, given_to, receiver_of
from .script_names import ScriptNames
from .training_script import Finding
from .walk import text_of


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


RULES = (clip_before_unscale, clipping_hook)


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
