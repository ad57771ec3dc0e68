"""Operations of a captured program that go wrong in a training under CUDA autocast, found without running it.

Types are those that the plan of level O1, which follows torch.autocast, gives each tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node

from ....models.folder.package import Precision
from ....models.program import runnable, walk
from ...policy.classes import Rule, Trait, has
from .dtypes import Typing
from .plan import make_plan, module_path, op_name
from .policy import CUDA

BANNED_OPERATION, LARGE_MASK, SMALL_GUARD = "BANNED_OPERATION", "LARGE_MASK", "SMALL_GUARD"
_FILLS = ("masked_fill", "where")


@dataclass(frozen=True, slots=True)
class HalfFault:
    """``node``: its name in the program. ``module``: the path of the `nn.Module` that it comes from."""

    code: str
    node: str
    op: str
    module: str
    message: str


def half_faults(program: ExportedProgram, example: Sequence[Tensor], dtype: str) -> list[HalfFault]:
    """The faults under ``dtype`` (fp16 or bf16). ``example``: inputs of the program, whose sizes are used."""
    module = runnable(program)
    plan = make_plan(module, Precision("O1", dtype), half_loops=True)
    types = Typing(module, example).under(plan)
    limits = torch.finfo(plan.dtype)
    found: list[HalfFault] = []
    for name, node in walk(module):
        if not isinstance(node.target, OpOverload):
            continue
        place = (name, op_name(node), module_path(node))
        where = f"'{op_name(node)}' of module '{module_path(node) or '(the model itself)'}' (node {name})"
        if CUDA.rule(node.target) is Rule.BANNED:
            message = (
                f"{where} raises an error under CUDA autocast: take its form with logits, without the sigmoid"
            )
            found.append(HalfFault(BANNED_OPERATION, *place, message))
        if not types.is_half(name):
            continue
        if op_name(node).removesuffix("_") in _FILLS and any(
            -1e300 < one < limits.min for one in _numbers(node)
        ):
            message = (
                f"{where} fills a half with {min(_numbers(node)):g}, and {dtype} ends at {limits.min:g}: take "
                "torch.finfo(scores.dtype).min"
            )
            found.append(HalfFault(LARGE_MASK, *place, message))
        if guard := _vanishing(node, limits.smallest_normal * limits.eps / 2):
            message = (
                f"{where} guards with {guard:g}, which {dtype} rounds to zero: a division by zero or log(0) "
                "follows; compute it in FP32, or take a guard that the half holds"
            )
            found.append(HalfFault(SMALL_GUARD, *place, message))
    return found


def _vanishing(node: Node, at_most: float) -> float | None:
    """The number that a sum or a floor adds against zero, where a division, a root or a logarithm reads the result."""
    guards = has(op_name(node), Trait.ADDS, Trait.FLOORS)
    reads = any(isinstance(user.target, OpOverload) and _divides_by(user, node) for user in node.users)
    if not guards or not reads:
        return None
    return next((one for one in _numbers(node) if 0 < one <= at_most), None)


def _divides_by(user: Node, node: Node) -> bool:
    name = op_name(user)
    return has(name, Trait.ROOT) or (has(name, Trait.DIVIDES) and len(user.args) > 1 and user.args[1] is node)


def _numbers(node: Node) -> list[float]:
    """The numbers among a node's arguments."""
    given = (*node.args, *node.kwargs.values())
    return [float(one) for one in given if isinstance(one, int | float) and not isinstance(one, bool)]
