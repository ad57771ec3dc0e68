"""Mistakes around autocast: old names, backward inside the region, a loss that is banned there; and own autograd
functions, whose forward and backward compute in the same types only where torch is told to."""

import ast
from collections.abc import Iterator

from ....exporters.policy.classes import Rule, class_of
from ....models.python_text.rewriting import Rewriting
from .events import Event, Events
from .finding import Finding
from .flow import Called
from .own_code import Function, dotted, method_of, receiver_of, words_of
from .script_names import ScriptNames
from .walk import text_of

_OLD = {
    f"torch.{device}.amp.{name}": (device, name)
    for device in ("cuda", "cpu")
    for name in ("GradScaler", "autocast", "custom_fwd", "custom_bwd")
}
_OLD_ARGUMENTS = ("enabled", "dtype", "cache_enabled")  # of torch.cuda.amp.autocast, in their order
# Calls that compute nothing whose type autocast chooses.
_BEHIND = frozenset(
    ("backward", "scale", "step", "update", "unscale_", "zero_grad", "clip_grad_norm_", "item", "append", "parameters")
)  # fmt: skip
_BANNED = frozenset({"torch.nn.functional.binary_cross_entropy"})
_BANNED_LOSSES = frozenset({"torch.nn.BCELoss"})
_BASES = frozenset({"torch.autograd.Function", "torch.autograd.function.Function"})
_PLACES = (
    "torch.amp",
    "torch.cuda.amp",
    "torch.cpu.amp",
    "torch.amp.autocast_mode",
    "torch.cuda.amp.autocast_mode",
)


def deprecated_names(names: ScriptNames) -> Iterator[Finding]:
    """A name that is imported from both places, the old one for old versions of torch, is no mistake."""
    called = {id(call.func): call for call, _ in names.calls}
    for one in names.all:
        node = one.node
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        old = names.full(node)
        if old not in _OLD or names.is_alias(node):
            continue
        device, name = _OLD[old]
        whole, new = called.get(id(node), node), _modern(device, name, called.get(id(node)))
        yield names.finding(
            whole, "deprecated-amp",
            f"{old} is deprecated and warns: torch.amp.{name} takes the device as an argument",
            new,
        )  # fmt: skip


def backward_in_autocast(names: ScriptNames, events: Events) -> Iterator[Finding]:
    for backward in events.of("backward"):
        region = names.autocast_of(backward.place)
        if region is None:
            continue
        yield names.finding(
            backward.at.call, "backward-in-autocast",
            f"backward runs in the autocast region of line {region.lineno}, which torch does not recommend: its "
            "operations run in the types that the forward pass chose. Call it behind the region",
            _behind_region(names, backward, region),
        )  # fmt: skip


def _behind_region(names: ScriptNames, backward: Event, region: ast.Call) -> Rewriting:
    """The end of the region's block is moved out of it, where only steps and the like follow; else the region is
    switched off for the one line."""
    sites = [one for site in reversed(backward.at.sites) for one in [site, *names.statements.around(site)]]
    block = next((one for one in sites if isinstance(one, ast.With) and any(
        names.behind(item.context_expr) is region for item in one.items)), None)  # fmt: skip
    rest = block.body if block is not None else []
    begin = next((number for number, one in enumerate(rest) if one in sites), len(rest))
    tail = rest[begin:]
    called = [node for one in tail for node in ast.walk(one) if isinstance(node, ast.Call)]
    plain = all((method_of(one) or dotted(one.func)) in _BEHIND for one in called)
    advice = names.rewriting()
    if block is not None and tail and plain and begin > 0 and len(block.items) == 1:
        lines = [line for one in tail for line in names.statements.source(one)]
        for one in tail:
            advice.without(one)
        return advice.behind(block, lines)
    statement = backward.at.statement
    device = next(map(text_of, [*words_of(region, "device_type"), *region.args[:1]]), "'cuda'")
    source = [f"    {line}" for line in names.statements.source(statement)]
    off = f"with torch.autocast({device}, enabled=False):"
    return advice.in_place_of(statement, [off, *source])


def banned_loss(names: ScriptNames, events: Events) -> Iterator[Finding]:
    """BCELoss raises in a CUDA autocast region (torch: "unsafe to autocast")."""
    for one in events.called:
        region = names.autocast_of(one.place)
        if region is None or _on_cpu(region):
            continue
        made = _loss_made(events, one)
        if made is None and not names.is_one_of(one.call.func, _BANNED) and not _is_banned_alias(events, one):
            continue
        where = f"in the autocast region of line {region.lineno}"
        node = made if made is not None else one.call
        advice, remedy = _loss_of_logits(names, events, one, made)
        yield names.finding(
            node, "banned-loss",
            f"binary cross entropy of probabilities raises an error {where} (line {one.call.lineno}): {remedy}", advice,
        )  # fmt: skip


def _loss_made(events: Events, one: Called) -> ast.Call | None:
    """The `BCELoss()` that is called, also as one of an own module's attributes, or given as an argument."""
    node: ast.expr | None = one.call.func
    frame = one.frame
    for _ in range(8):
        if isinstance(node, ast.Name) and node.id in frame.arguments:
            node, frame, _at = frame.arguments[node.id]
        elif method_of(node) in ("cuda", "to"):
            node = receiver_of(node)
        elif (result := events.names.own.result(node)) is not None:
            node = result
        elif isinstance(node, ast.Name | ast.Attribute):
            name = dotted(node) or ""
            name = name if name in events.names.values else events.flow.name(node, frame) or name
            values = events.names.values.get(name, ())
            node, scope = (values[0][0], values[0][1].place.scope) if len(values) == 1 else (None, None)
            if (
                isinstance(node, ast.Name)
                and scope is not None
                and (given := events.flow.given(node.id, scope))
            ):
                node, frame = given[:2]
        elif isinstance(node, ast.Subscript):
            held = events.names.only(node.value)
            pairs = zip(held.keys, held.values, strict=True) if isinstance(held, ast.Dict) else ()
            key = text_of(node.slice)
            node = next((value for one, value in pairs if one is not None and text_of(one) == key), None)
        else:
            break
    return node if isinstance(node, ast.Call) and events.names.is_one_of(node.func, _BANNED_LOSSES) else None


def _is_banned_alias(events: Events, one: Called) -> bool:
    return events.flow.full(one.call.func, one.frame) in _BANNED


def _loss_of_logits(
    names: ScriptNames, events: Events, one: Called, made: ast.Call | None
) -> tuple[Rewriting, str]:
    """A loss with logits, where the sigmoid before the loss is seen and can be left away; else in FP32, out of
    autocast."""
    advice = names.rewriting()
    sigmoid = _sigmoid(names, events, one)
    if sigmoid is not None and (inner := _inside(names, sigmoid)) is not None:
        advice.replace(sigmoid, text_of(inner))
        if made is not None:
            advice.replace(made.func, "torch.nn.BCEWithLogitsLoss")
        else:
            advice.replace(one.call.func, "torch.nn.functional.binary_cross_entropy_with_logits")
        return advice, "take the loss of the logits, and leave the sigmoid before it away"
    given = [f"{text_of(arg)}.float()" for arg in one.call.args[:2]]
    given += [*map(text_of, one.call.args[2:]), *map(text_of, one.call.keywords)]
    wide = f"{text_of(one.call.func)}({', '.join(given)})"
    statement = one.statement
    source = names.rewriting().replace(one.call, wide).within(statement)
    lines = ["with torch.autocast('cuda', enabled=False):", *(f"    {line}" for line in source)]
    return advice.in_place_of(statement, lines), (
        "compute it in FP32 out of autocast; better still is the loss of the logits, without the last sigmoid"
    )


def _sigmoid(names: ScriptNames, events: Events, one: Called) -> ast.Call | None:
    """The one sigmoid whose result is the loss's first input, and nothing else's."""
    node, at, frame = (one.argument(0, "input"), one.at, one.frame)
    for _ in range(6):
        if isinstance(node, ast.Name):
            uses = [found for found in names.all if isinstance(found.node, ast.Name) and found.node.id == node.id
                    and isinstance(found.node.ctx, ast.Load) and found.place.scope is at.place.scope]  # fmt: skip
            if len(uses) > 1:
                return None
            node, at, frame = events.flow.value(node, at, frame)
        elif isinstance(node, ast.Call) and method_of(node) in ("float", "squeeze", "flatten", "view"):
            operands = names.operation(node)[1]
            node = operands[0] if operands is not node.args else None
        else:
            break
    return node if isinstance(node, ast.Call) and _inside(names, node) is not None else None


def _inside(names: ScriptNames, call: ast.Call) -> ast.expr | None:
    """The argument `x` of `sigmoid(x)` or `x.sigmoid()`."""
    full = names.full(call.func) or ""
    if full in ("torch.sigmoid", "torch.nn.functional.sigmoid") and call.args:
        return call.args[0]
    is_method = method_of(call) == "sigmoid" and not call.args and not full.startswith("torch.")
    return receiver_of(call) if is_method else None


RULES = (backward_in_autocast, banned_loss)


def _modern(device: str, name: str, call: ast.Call | None) -> str:
    given = [text_of(arg) for arg in call.args] if call else []
    if name == "autocast":
        given = [f"{word}={value}" for word, value in zip(_OLD_ARGUMENTS, given, strict=False)]
    given += [text_of(word) for word in (call.keywords if call else [])]
    first = f"device_type='{device}'" if name.startswith("custom") else f"'{device}'"
    if name.startswith("custom") and call is not None and call.args:
        return f"torch.amp.{name}({', '.join([*given, first])})"
    if name == "GradScaler" and call is None:
        return "torch.amp.GradScaler"
    if name == "autocast" and call is None:
        return f"(lambda *given, **words: torch.amp.autocast('{device}', *given, **words))"
    return f"torch.amp.{name}({', '.join([first, *given])})"


def _on_cpu(region: ast.Call) -> bool:
    named = [*region.args[:1], *words_of(region, "device_type")]
    return any(isinstance(one, ast.Constant) and one.value == "cpu" for one in named)


def undecorated_function(names: ScriptNames, in_half: bool) -> Iterator[Finding]:
    """Only where the function computes what autocast chooses a type for: a straight-through estimator needs nothing."""
    applied = {receiver for _, receiver, _ in names.methods("apply")}
    applied |= {dotted(one.node.value) or "" for one in names.all
                if isinstance(one.node, ast.Attribute) and one.node.attr == "apply"}  # fmt: skip
    loops = [
        one.node for one in names.all if isinstance(one.node, ast.For) and dotted(one.node.target) in applied
    ]
    applied |= {node.id for loop in loops for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}
    for kind, node in names.own.classes.items():
        forward, backward = names.own.method(kind, "forward"), names.own.method(kind, "backward")
        if not in_half or kind not in applied or forward is None or backward is None:
            continue
        if names.own.method(kind, "setup_context") is not None:  # torch has no custom_fwd for these
            continue
        if not any(names.is_one_of(base, _BASES) for base in node.bases):
            continue
        missing = [(one, name) for one, name in ((forward, "custom_fwd"), (backward, "custom_bwd"))
                   if not _decorated(names, one, name)]  # fmt: skip
        if not missing or not any(
            _chosen(names, inner) for one in (forward, backward) for inner in ast.walk(one)
        ):
            continue
        device = _device(names, forward, backward)
        advice = names.rewriting()
        for one, name in missing:
            advice.decorated(one, f"@torch.amp.{name}(device_type={device!r})")
        words = " and ".join(f"{one.name} has no {name}" for one, name in missing)
        yield names.finding(
            missing[0][0], "custom-function",
            f"{kind} computes under autocast, and {words}: backward runs outside the region, so it gets half and FP32 "
            "mixed, or rounds otherwise than forward",
            advice,
        )  # fmt: skip


def _decorated(names: ScriptNames, function: Function, name: str) -> bool:
    for one in function.decorator_list:
        called = one.func if isinstance(one, ast.Call) else one
        text = dotted(called) or ""
        if names.is_one_of(called, frozenset(f"{place}.{name}" for place in _PLACES)) or text.endswith(name):
            return True
        if any(name in ast.unparse(value) for value in names.values_of(text)):
            return True
    return False


def _chosen(names: ScriptNames, node: ast.AST) -> bool:
    """True if autocast chooses the type in which ``node`` computes."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult | ast.Pow)
    if not isinstance(node, ast.Call):
        return False
    name, _ = names.operation(node)
    known = bool(method_of(node)) or (names.full(node.func) or "").startswith("torch.")
    return known and class_of(name.rstrip("_")).o1 in (Rule.LOWER, Rule.FP32, Rule.FP32_DTYPE)


def _device(names: ScriptNames, *functions: Function) -> str:
    """The device of the decorator that is there; CUDA where none is."""
    decorators = [one for function in functions for one in function.decorator_list]
    regions = [call for call, _ in names.calls if (names.full(call.func) or "").endswith("autocast")]
    named = [word for one in decorators if isinstance(one, ast.Call) for word in words_of(one, "device_type")]
    named += [call.args[0] for call in regions if call.args]
    named += [word for call in regions for word in words_of(call, "device_type")]
    texts = [one.value for one in named if isinstance(one, ast.Constant)]
    return next((text for text in texts if isinstance(text, str)), "cuda")
