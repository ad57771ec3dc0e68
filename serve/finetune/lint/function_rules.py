"""Own autograd functions under autocast: forward and backward compute in the same types only where torch is told to."""

import ast
from collections.abc import Iterator

from ....exporters.policy.classes import Rule, class_of
from .own_code import Function, dotted, method_of, words_of
from .script_names import ScriptNames
from .training_script import Finding

_BASES = frozenset({"torch.autograd.Function", "torch.autograd.function.Function"})
_PLACES = (
    "torch.amp",
    "torch.cuda.amp",
    "torch.cpu.amp",
    "torch.amp.autocast_mode",
    "torch.cuda.amp.autocast_mode",
)


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


RULES = (undecorated_function,)
