"""Apex: the number of a loss beyond those that were announced, clipping of other gradients than the optimizer's own."""

import ast
from collections.abc import Iterator

from ....models.python_text.rewriting import Rewriting
from .events import Events
from .finding import Finding
from .order_rules import same_loop
from .own_code import dotted, receiver_of, words_of
from .script_names import ScriptNames
from .walk import text_of

_INITIALIZE = frozenset({"apex.amp.initialize"})
_CLIPS = frozenset(f"torch.nn.utils.clip_grad_{kind}_" for kind in ("norm", "value"))
_SCALE_LOSS = frozenset({"apex.amp.scale_loss"})


def loss_number(names: ScriptNames, events: Events) -> Iterator[Finding]:
    makes = [call for call, _ in names.calls if names.is_one_of(call.func, _INITIALIZE)]
    if not makes:
        return
    counts = [_number(names, one) for call in makes for one in words_of(call, "num_losses")]
    count = max((one for one in counts if one is not None), default=None) if counts else 1
    if count is None:
        return
    numbered: list[tuple[ast.Call, ast.expr]] = []
    for one in events.called:
        value = one.argument(2, "loss_id") if names.is_one_of(one.call.func, _SCALE_LOSS) else None
        frame = one.frame
        while isinstance(value, ast.Name) and value.id in frame.arguments:
            value, frame, _ = frame.arguments[value.id]
        if value is not None:
            numbered.append((one.call, value))
    used = {_number(names, value) for _, value in numbered}
    free = [one for one in range(count) if one not in used]
    remedy = "Each loss has a number of its own below it" if free else "Announce as many losses as there are"
    limit = f"num_losses={count} of amp.initialize"
    for call, value in numbered:
        number = _number(names, value)
        if number is None or 0 <= number < count:
            continue
        yield names.finding(
            value if free else call, "apex-loss-id",
            f"loss_id={number} is beyond {limit}, which counts from 0: IndexError. {remedy}",
            str(free[0]) if free else _with_losses(names, makes[-1], number + 1),
        )  # fmt: skip


def _with_losses(names: ScriptNames, made: ast.Call, count: int) -> Rewriting:
    """The call `amp.initialize` with the number of losses added."""
    if given := words_of(made, "num_losses"):
        return names.rewriting().replace(given[0], str(count))
    written = f"{text_of(made)[:-1]}{', ' if made.args or made.keywords else ''}num_losses={count})"
    return names.rewriting().replace(made, written)


def apex_clip(names: ScriptNames, events: Events) -> Iterator[Finding]:
    """Inside the region the gradients are scaled; behind it, those of the optimizer are its master gradients."""
    for clip in events.of("clip"):
        if not clip.at.call.args or "master_params" in text_of(clip.at.call):
            continue
        before = [one for one in events.called if names.is_one_of(one.call.func, _SCALE_LOSS)
                  and one.order < clip.order and same_loop(clip, one)]  # fmt: skip
        if not before or not isinstance(clip.at.call.func, ast.Attribute | ast.Name):
            continue
        region = before[-1]
        optimizer = text_of(region.argument(1, "optimizers", "optimizer") or region.call)
        func = region.call.func
        module = text_of(func.value) if isinstance(func, ast.Attribute) else "amp"
        master = f"{module}.master_params({optimizer})"
        advice = names.rewriting()
        inside = region.call in clip.place.regions
        call, statement = clip.at.call, clip.at.statement
        words = [f"{word.arg}={text_of(word.value)}" for word in call.keywords if word.arg != "parameters"]
        new = f"{text_of(call.func)}({', '.join([master, *map(text_of, call.args[1:]), *words])})"
        if not names.is_one_of(call.func, _CLIPS):
            new = f"torch.nn.utils.clip_grad_value_({master}, 1.0)"
        if inside:
            line = names.statements.source(statement)[0].replace(text_of(call), new)
            advice.without(statement).behind(region.statement, [line if new in line else new])
        else:
            advice.replace(call, new)
        yield names.finding(
            call, "apex-clip",
            "these gradients are those of the model, " + ("still scaled" if inside else "not the master gradients that "
            f"{optimizer} steps with") + ": Apex unscales into master gradients when the region of scale_loss ends",
            advice,
        )  # fmt: skip


def apex_unscaled(names: ScriptNames, events: Events) -> Iterator[Finding]:
    """`loss.backward()` in the region, where the scaled loss has another name."""
    for backward in events.of("backward"):
        statement = next(
            (one for one in names.statements.around(backward.at.statement) if isinstance(one, ast.With)), None
        )
        for item in statement.items if statement is not None else ():
            made, bound = item.context_expr, item.optional_vars
            if not isinstance(made, ast.Call) or not names.is_one_of(made.func, _SCALE_LOSS) or bound is None:
                continue
            call = backward.at.call
            given = receiver_of(call) or call
            if dotted(given) != dotted(bound) and made.args and text_of(given) == text_of(made.args[0]):
                yield names.finding(
                    given, "unscaled-backward",
                    f"{text_of(given)} is not scaled, {text_of(bound)} is: the region divides the "
                    "gradients by the scale "
                    "all the same", text_of(bound),
                )  # fmt: skip


RULES = (loss_number, apex_clip, apex_unscaled)


def _number(names: ScriptNames, node: ast.expr) -> int | None:
    node = (names.only(node) or node) if isinstance(node, ast.Name) else node
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else None
