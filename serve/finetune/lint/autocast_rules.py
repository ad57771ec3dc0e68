"""Mistakes around autocast: old names, backward inside the region, a loss that is banned there."""

import ast
from collections.abc import Iterator

from .script_names import ScriptNames, dotted
from .training_script import Finding
from .walk import text_of

_OLD = {
    f"torch.{device}.amp.{name}": (device, name)
    for device in ("cuda", "cpu")
    for name in ("GradScaler", "autocast", "custom_fwd", "custom_bwd")
}
_OLD_ARGUMENTS = ("enabled", "dtype", "cache_enabled")  # of torch.cuda.amp.autocast, in their order
_BANNED = frozenset({"torch.nn.functional.binary_cross_entropy"})
_BANNED_LOSSES = frozenset({"torch.nn.BCELoss"})


def deprecated_names(names: ScriptNames) -> Iterator[Finding]:
    """A name that is imported from both places, the old one for old versions of torch, is no mistake."""
    called = {id(call.func): call for call, _ in names.calls}
    for one in names.all:
        node = one.node
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        old = names.full(node)
        if old not in _OLD:
            continue
        device, name = _OLD[old]
        whole, new = called.get(id(node), node), _modern(device, name, called.get(id(node)))
        yield names.finding(
            whole, "deprecated-amp",
            f"{old} is deprecated and warns: torch.amp.{name} takes the device as an argument",
            names.script.line_with(whole, new),
        )  # fmt: skip


def backward_in_autocast(names: ScriptNames) -> Iterator[Finding]:
    for call, _, at in names.methods("backward"):
        region = names.autocast_of(at.place)
        if region is not None:
            yield names.finding(
                call, "backward-in-autocast",
                f"backward stands in the autocast region of line {region.lineno}, which torch does not recommend: its "
                "operations run in the types that the forward pass chose. Move the line out of the region, to the "
                "indentation of its `with`",
                names.script.lines[call.lineno - 1].strip(),
            )  # fmt: skip


def banned_loss(names: ScriptNames) -> Iterator[Finding]:
    """BCELoss raises in a CUDA autocast region (torch: "unsafe to autocast")."""
    for call, at in names.calls:
        region = names.autocast_of(at.place)
        if region is None or _on_cpu(region):
            continue
        words = f"binary cross entropy of probabilities raises an error in the autocast region of line {region.lineno}"
        if names.is_one_of(call.func, _BANNED):
            arguments = ", ".join(map(text_of, [*call.args])) + "".join(
                f", {word.arg}={text_of(word.value)}" for word in call.keywords
            )
            new = f"torch.nn.functional.binary_cross_entropy_with_logits({arguments})"
            remedy = "take the loss of the logits, and leave the sigmoid before it away"
            yield names.finding(call, "banned-loss", f"{words}: {remedy}", names.script.line_with(call, new))
            continue
        values = [value for value, _ in names.values.get(dotted(call.func) or "", ())]
        if (
            len(values) == 1
            and isinstance(made := values[0], ast.Call)
            and names.is_one_of(made.func, _BANNED_LOSSES)
        ):
            new = text_of(made).replace(text_of(made.func), "torch.nn.BCEWithLogitsLoss", 1)
            remedy = f"line {call.lineno} calls it: take the loss of the logits, and leave the sigmoid before it away"
            yield names.finding(made, "banned-loss", f"{words}; {remedy}", names.script.line_with(made, new))


RULES = (deprecated_names, backward_in_autocast, banned_loss)


def _modern(device: str, name: str, call: ast.Call | None) -> str:
    given = [text_of(arg) for arg in call.args] if call else []
    if name == "autocast":
        given = [f"{word}={value}" for word, value in zip(_OLD_ARGUMENTS, given, strict=False)]
    given += [f"{word.arg}={text_of(word.value)}" if word.arg else f"**{text_of(word.value)}"
              for word in (call.keywords if call else [])]  # fmt: skip
    first = f"device_type='{device}'" if name.startswith("custom") else f"'{device}'"
    if name == "custom_bwd" and call is not None and call.args:
        return f"torch.amp.custom_bwd({', '.join([*given, first])})"
    return f"torch.amp.{name}({', '.join([first, *given])})"


def _on_cpu(region: ast.Call) -> bool:
    named = [*region.args[:1], *(word.value for word in region.keywords if word.arg == "device_type")]
    return any(isinstance(one, ast.Constant) and one.value == "cpu" for one in named)
