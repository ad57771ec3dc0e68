"""Apex: the number of a loss beyond those that were announced, clipping of other gradients than the optimizer's own."""

import ast
from collections.abc import Iterator

from .events import Events
from .own_code import dotted
from .rewriting import Rewriting
from .script_names import ScriptNames
from .training_script import Finding
from .walk import text_of

_SCALE_LOSS = frozenset({"apex.amp.scale_loss"})


def loss_number(names: ScriptNames, events: Events) -> Iterator[Finding]:
    makes = [
        call for call, _ in names.calls if names.is_one_of(call.func, frozenset({"apex.amp.initialize"}))
    ]
    if not makes:
        return
    counts = [
        _number(names, word.value) for call in makes for word in call.keywords if word.arg == "num_losses"
    ]
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
    for call, value in numbered:
        number = _number(names, value)
        if number is None or 0 <= number < count:
            continue
        free = [one for one in range(count) if one not in used]
        advice: str | None = str(free[0]) if free else None
        message = (
            f"loss_id={number} is beyond num_losses={count} of amp.initialize, which counts from 0: IndexError. "
            + (
                "Each loss has a number of its own below it"
                if free
                else "Announce as many losses as there are"
            )
        )
        if advice is not None:
            yield names.finding(value, "apex-loss-id", message, advice)
        else:
            wider = _with_losses(names, makes[-1], number + 1)
            yield names.finding(call, "apex-loss-id", message, wider)


def _with_losses(names: ScriptNames, made: ast.Call, count: int) -> Rewriting:
    """The call `amp.initialize` with the number of losses added."""
    given = [word.value for word in made.keywords if word.arg == "num_losses"]
    if given:
        return names.rewriting().replace(given[0], str(count))
    arguments = [text_of(one) for one in made.args]
    arguments += [f"{word.arg}={text_of(word.value)}" for word in made.keywords]
    arguments.append(f"num_losses={count}")
    return names.rewriting().replace(made, f"{text_of(made.func)}({', '.join(arguments)})")


def apex_clip(names: ScriptNames, events: Events) -> Iterator[Finding]:
    """Inside the region the gradients are scaled; behind it, those of the optimizer are its master gradients."""
    for clip in events.of("clip"):
        if not clip.at.call.args or "master_params" in text_of(clip.at.call):
            continue
        regions = [one for one in events.called if names.is_one_of(one.call.func, _SCALE_LOSS)]
        before = [
            one
            for one in regions
            if one.order < clip.order and one.place.loops == clip.place.loops[: len(one.place.loops)]
        ]
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
        new = f"{text_of(call.func)}({', '.join([master, *map(text_of, call.args[1:])])}"
        new += (
            "".join(
                f", {word.arg}={text_of(word.value)}" for word in call.keywords if word.arg != "parameters"
            )
            + ")"
        )
        if not names.is_one_of(
            call.func, frozenset({"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"})
        ):
            new = f"torch.nn.utils.clip_grad_value_({master}, 1.0)"
        if inside:
            whole = names.statements.source(statement)[0].replace(text_of(call), new)
            advice.without(statement).behind(region.statement, [whole if new in whole else new])
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
            given = call.func.value if isinstance(call.func, ast.Attribute) else call
            if dotted(given) != dotted(bound) and made.args and text_of(given) == text_of(made.args[0]):
                yield names.finding(
                    given, "unscaled-backward",
                    f"{text_of(given)} is not scaled, {text_of(bound)} is: the region divides the "
                    "gradients by the scale "
                    "all the same", text_of(bound),
                )  # fmt: skip


RULES = (loss_number, apex_clip, apex_unscaled)


def _number(names: ScriptNames, node: ast.expr) -> int | None:
    if isinstance(node, ast.Name):
        values = [value for value, _ in names.values.get(node.id, ())]
        node = values[0] if len(values) == 1 and values[0] is not None else node
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else None
