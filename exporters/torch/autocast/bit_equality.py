"""The half by a level's rules alone, and live autocast to compare it with, bit for bit.

Rules alone: before any search, repair or moved cast, which change bits on purpose.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ....models.engines.cuda_graphs import adds_in_any_order, agreement_of, agrees
from ....models.folder.package import Precision
from ....models.program import runnable
from ....models.spec.spec import ModelSpec
from .kernels import in_one_dtype
from .plan import make_plan
from .policy import LISTS
from .rewrite import HalfProgram, rewrite
from .surgery import open_composites


def half_by_rules(
    original: ExportedProgram,
    spec: ModelSpec,
    example: Sequence[Tensor],
    lists: str = "cuda",
    half_loops: bool = False,
) -> HalfProgram:
    """The program at O1 in FP16 by the lists of ``cpu`` or ``cuda``. Raises as `rewrite` does."""
    module = open_composites(runnable(original), LISTS[lists])
    plan = in_one_dtype(module, make_plan(module, Precision(), lists, half_loops), example)
    return rewrite(original, plan, spec, example, module)


def outputs_of(program: ExportedProgram, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a program, in its own datatypes, on the device that has its weights and ``inputs``. ``inputs`` are
    cloned, because a program may write into them."""
    with torch.inference_mode():
        return tuple(runnable(program)(*[tensor.clone() for tensor in inputs]))


def live_outputs(program: ExportedProgram, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a program under `torch.autocast` in FP16, on the device that has its weights and ``inputs``.

    Raises RuntimeError where an operation cannot run under autocast.
    """
    with torch.autocast(inputs[0].device.type, dtype=torch.float16):
        return outputs_of(program, inputs)


def same_numbers(live: Tensor, half: Tensor, agreement: float = 0.0) -> bool:
    """True where two outputs are equal bit for bit, after ``live`` was cast to the datatype of ``half``; NaN equals
    NaN. ``agreement``: the part of the largest magnitude by which they may differ all the same."""
    cast = live.to(half.dtype)
    return torch.allclose(cast, half, rtol=0.0, atol=0.0, equal_nan=True) or agrees(cast, half, agreement)


def agreement_on(device: torch.device, program: ExportedProgram, precision: str = "fp16") -> float:
    """The largest allowed difference of two runs of a half: 0 (equal bits), unless ops add in any order on CUDA."""
    in_any_order = adds_in_any_order(runnable(program)) if device.type == "cuda" else []
    return agreement_of(precision, in_any_order)
