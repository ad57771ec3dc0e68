"""The half by a level's rules alone, and live autocast to compare it with, bit for bit.

Rules alone: before any search, repair or moved cast, which change bits on purpose.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ....models.package import Precision
from ....models.program import runnable
from ....models.spec import ModelSpec
from .composites import open_composites
from .plan import make_plan
from .policy import LISTS
from .rewrite import HalfProgram, rewrite


def half_by_rules(
    whole: ExportedProgram,
    spec: ModelSpec,
    example: Sequence[Tensor],
    lists: str = "cuda",
    half_loops: bool = False,
) -> HalfProgram:
    """The program at O1 in FP16 by the lists of ``cpu`` or ``cuda``. Raises as `rewrite` does."""
    module = open_composites(runnable(whole), LISTS[lists])
    plan = make_plan(module, Precision(), lists, half_loops)
    return rewrite(whole, plan, spec, example, module)


def outputs_of(program: ExportedProgram, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What the program gives where its weights and the inputs are; the inputs stay as they are."""
    with torch.inference_mode():
        return tuple(runnable(program)(*[tensor.clone() for tensor in inputs]))


def live_outputs(program: ExportedProgram, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same under live FP16 autocast of the inputs' device. Raises RuntimeError where autocast does."""
    with torch.autocast(inputs[0].device.type, dtype=torch.float16):
        return outputs_of(program, inputs)


def same_numbers(live: Tensor, half: Tensor) -> bool:
    """Whether they are equal bit for bit, once the live one has the half program's output datatype; NaN equals NaN."""
    return torch.allclose(live.to(half.dtype), half, rtol=0.0, atol=0.0, equal_nan=True)
