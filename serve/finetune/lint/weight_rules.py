"""Weights that are half while a scaler's optimizer trains them."""

import ast
from collections.abc import Iterator

from ....models.python_text.rewriting import Rewriting
from .finding import Finding
from .flow import Flow
from .own_code import dotted, method_of, receiver_of, words_of
from .script_names import ScriptNames
from .value_types import HALVES, WIDES
from .walk import Located, text_of

_WRAPPERS = (
    "get_peft_model",
    "DataParallel",
    "DDP",
    "FullyShardedDataParallel",
    "compile",
    "convert_sync_batchnorm",
)
_MOVES = frozenset({"cuda", "cpu", "to", "train", "eval", "requires_grad_", "from_pretrained", "to_empty"})
_WIDENERS = (
    "cast_training_params",
    "prepare_model_for_kbit_training",
    "prepare_model_for_int8_training",
    "upcast_adapters",
)
_DEEPEST = 8


def half_weights(names: ScriptNames, flow: Flow) -> Iterator[Finding]:
    """A module whose weights are half when its optimizer is made, and a GradScaler that steps this optimizer."""
    for owner, at, who in _trained(names, flow):
        call = _half_at(flow, owner, at)
        if call is not None:
            yield names.finding(
                call, "half-weights",
                f"the weights of {owner} are half, so {who} refuses them (\"Attempting to unscale "
                "FP16 gradients\"): keep "
                "them in FP32, autocast rounds what it computes with",
                _in_fp32(names, call),
            )  # fmt: skip


RULES = (half_weights,)


def _trained(names: ScriptNames, flow: Flow) -> Iterator[tuple[str, Located, str]]:
    """The modules of the script, the places where they are handed over, and the calls that unscale their gradients."""
    stepped: dict[str, str] = {}
    for reading in flow.readings:
        for one in reading:
            if one.method in ("step", "unscale_") and isinstance(one.call.func, ast.Attribute):
                scaler = flow.scaler_of(one.call.func.value, one.frame)
                target = flow.name(one.argument(0, "optimizer"), one.frame)
                if scaler is not None and target is not None:
                    stepped[target] = scaler
    for optimizer, owner in names.optimizers.items():
        if owner is not None and optimizer in stepped:
            yield owner, names.values[optimizer][0][1], stepped[optimizer]
    for call, at in names.calls:
        full = (names.full(call.func) or "").rpartition(".")[2]
        given = [*call.args[:1], *words_of(call, "model")]
        if full.endswith("Trainer") and _has_setting(names, "TrainingArguments", "fp16"):
            yield from ((name, at, "the Trainer's scaler") for one in given if (name := dotted(one)))
        elif "prepare" in (full, method_of(call)) and _has_setting(names, "Accelerator", "mixed_precision"):
            yield from ((name, at, "the Accelerator's scaler") for one in call.args if (name := dotted(one)))


def _has_setting(names: ScriptNames, kind: str, word: str) -> bool:
    return any(
        isinstance(one, ast.Constant) and one.value in (True, "fp16")
        for call, _ in names.calls
        if (dotted(call.func) or "").endswith(kind)
        for one in words_of(call, word)
    )


def _half_at(flow: Flow, name: str, at: Located, depth: int = 0) -> ast.Call | None:
    """The call that made the module of this name half, where nothing made it FP32 again before ``at``."""
    names = flow.names
    if depth > _DEEPEST:
        return None
    changes: list[tuple[int, ast.expr, Located]] = []
    for value, one in names.values.get(name, ()):
        if value is not None and _counts(one, at, name):
            changes.append((one.order, value, one))
    for one in names.all:
        call = one.node.value if isinstance(one.node, ast.Expr) else None
        if isinstance(call, ast.Call) and _counts(one, at, name) and _concerns(call, name):
            changes.append((one.order, call, one))
        elif isinstance(one.node, ast.For) and _counts(one, at, name) and _widens(one.node, name):
            changes.append((one.order, one.node.iter, one))
    given = flow.given(name, at.place.scope)
    found = None if given is None else _made_half(flow, given[0], given[2], "", None, depth + 1)
    for _, value, one in sorted(changes, key=lambda change: change[0]):
        found = _made_half(flow, value, one, name, found, depth)
    return found


def _counts(one: Located, at: Located, name: str) -> bool:
    """True if the change of the name at ``one`` has happened when ``at`` runs."""
    if one.place.scope is not at.place.scope:
        return "." in name or isinstance(one.place.scope, ast.Module)
    return (
        one.order < at.order
        and at.place.follows(one.place)
        and set(one.place.conditions) <= set(at.place.conditions)
    )


def _concerns(call: ast.Call, name: str) -> bool:
    if dotted(receiver_of(call)) == name:
        return method_of(call) in ("half", "to", "float", "bfloat16", "double", "type")
    return (dotted(call.func) or "").rpartition(".")[2].endswith(_WIDENERS) and any(
        name == dotted(one) for one in call.args
    )


def _widens(loop: ast.For, name: str) -> bool:
    """`for p in model.parameters(): p.data = p.data.float()`."""
    over = {dotted(one.value) for one in ast.walk(loop.iter)
            if isinstance(one, ast.Attribute) and one.attr in ("parameters", "named_parameters")}  # fmt: skip
    text = "\n".join(map(text_of, loop.body))
    return name in over and (".float()" in text or "float32" in text or "torch.float)" in text)


def _made_half(
    flow: Flow, value: ast.expr, at: Located, name: str, before: ast.Call | None, depth: int
) -> ast.Call | None:
    """``before``: what had made the name half until here."""
    if isinstance(value, ast.Name | ast.Attribute):
        return before if dotted(value) == name else _half_at(flow, dotted(value) or "", at, depth + 1)
    names = flow.names
    if not isinstance(value, ast.Call) or depth > _DEEPEST:
        return None
    if (result := names.own.result(value)) is not None:
        inner = next((one for one in names.all if one.node is result), at)
        return _made_half(flow, result, inner, "", None, depth + 1)
    called = method_of(value) or dotted(value.func) or ""
    kinds = [names.full(one) for one in _dtypes(value)]
    if (called == "half" and not value.args) or any(map(_is_half, _dtypes(value), kinds)):
        return value
    if called in ("float", "double") or any(kind in WIDES for kind in kinds) or called.endswith(_WIDENERS):
        return None
    if called.endswith(_WRAPPERS) or (
        called == "from_pretrained" and value.args and not isinstance(value.args[0], ast.Constant)
    ):
        return _made_half(flow, value.args[0], at, name, before, depth + 1) if value.args else None
    moved = receiver_of(value) if called in _MOVES else None
    return None if moved is None else _made_half(flow, moved, at, name, before, depth + 1)


def _dtypes(call: ast.Call) -> list[ast.expr]:
    """The arguments that may name a type."""
    positional = call.args if method_of(call) in ("to", "type") else []
    return [*words_of(call, "dtype", "torch_dtype"), *positional]


def _is_half(node: ast.expr, full: str | None) -> bool:
    return full in HALVES or (isinstance(node, ast.Constant) and node.value in ("float16", "fp16", "half"))


def _in_fp32(names: ScriptNames, call: ast.Call) -> Rewriting:
    if given := [one for one in _dtypes(call) if _is_half(one, names.full(one))]:
        wide = "'float32'" if isinstance(given[0], ast.Constant) else "torch.float32"
        return names.rewriting().replace(given[0], wide)
    assert isinstance(call.func, ast.Attribute)
    return names.rewriting().replace(call, f"{text_of(call.func.value)}.float()")
