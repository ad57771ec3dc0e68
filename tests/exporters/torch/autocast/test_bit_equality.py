"""The half program is, bit for bit, the captured program under live autocast: of the corpus, the zoo, small models.

Before any search, repair or moved cast: those change bits on purpose.
"""

from functools import cache
from itertools import product

import pytest
import torch
from halfeven.exporters.torch.autocast.bit_equality import (
    agreement_on,
    half_by_rules,
    outputs_of,
    same_numbers,
)
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.policy import LISTS
from halfeven.exporters.torch.autocast.rewrite import Autocast, HalfProgram, rewrite
from halfeven.exporters.torch.autocast.surgery import open_composites
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.models.folder.package import Precision
from halfeven.models.program import on_device, runnable
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from tests.control_flow import CONTROL_FLOW
from tests.corpus import CORPUS, captured, cases, fresh
from tests.exporters.torch.autocast.half_programs import KEPT
from tests.exporters.torch.autocast.small_models import COMPOSITES, SMALL, captured_small
from tests.nets import NETS
from tests.programs import Original
from tests.slow import drawn, slow_but

ADDS = ("island", "several outputs", "scatter add", "index put")  # with atomics, on CUDA
NAMES = [name for name in CORPUS if name not in KEPT]


CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
Batch = dict[str, Tensor]


def is_bit_equal(
    model: Original,
    half: HalfProgram,
    batches: list[Batch],
    device: torch.device,
    dtype: str = "fp16",
    may_raise: bool = False,
) -> bool:
    """``may_raise``: live autocast cannot run every model of the corpus, and such a test is skipped."""

    def placed(program: ExportedProgram) -> ExportedProgram:
        return on_device(program, device) if device.type == "cuda" else program

    live, ours, allowed = (
        placed(model.program),
        placed(half.program),
        agreement_on(device, half.program, dtype),
    )
    same = True
    for batch in batches:
        inputs = [tensor.to(device) for tensor in batch.values()]
        try:
            with torch.autocast(device.type, dtype=HALF[dtype]):
                expected = outputs_of(live, inputs)
        except RuntimeError as error:
            if not may_raise:
                raise
            pytest.skip(f"live autocast raises: {str(error)[:120]}")
        came = outputs_of(ours, inputs)
        assert [tensor.dtype for tensor in came] == [output.type.torch for output in model.spec.outputs]
        same &= all(same_numbers(*pair, allowed) for pair in zip(expected, came, strict=True))
    return same


def of_corpus(name: str, device: torch.device) -> bool:
    model, rows = captured(name), min(CORPUS[name].max_batch_size, 3)
    half = half_by_rules(model.program, model.spec, model.example, device.type)
    return is_bit_equal(model, half, [fresh(name, rows, seed=5)], device, may_raise=True)


def of_small(name: str, dtype: str, device: torch.device) -> bool:
    """The batch sizes are others than those it was made with; of control flow some go one way, some the other."""
    batches = [SMALL[name].inputs(rows) for rows in 3 * (1, 2, 7)]
    return is_bit_equal(
        captured_small(name), small_half(name, "O1", dtype, device.type), batches, device, dtype
    )


def opened(name: str, lists: str) -> GraphModule:
    return open_composites(runnable(captured_small(name).program), LISTS[lists])


@cache
def small_half(name: str, level: str, dtype: str, lists: str) -> HalfProgram:
    model, module = captured_small(name), opened(name, lists)
    plan = make_plan(module, Precision(level, dtype), lists)
    return rewrite(model.program, plan, model.spec, model.example, module)


@pytest.mark.parametrize("name", cases(NAMES))
def test_a_half_program_is_bit_equal_to_live_autocast(name: str) -> None:
    assert of_corpus(name, CPU)


FAST = [*product(NETS, HALF), *product(CONTROL_FLOW, ["fp16"])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), slow_but(FAST, [*FAST, *product(COMPOSITES, ["fp16"])]))
def test_a_small_half_program_is_bit_equal_to_live_autocast(name: str, dtype: str) -> None:
    assert of_small(name, dtype, CPU)


@pytest.mark.slow
def test_equal_bits_are_not_asked_on_cuda_of_what_adds_in_any_order_and_of_nothing_else() -> None:
    """Equal bits are asked on a CPU, of integers, and of every other model."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    allowed = {
        name: agreement_on(cuda, captured(name).program) for name in (*ADDS, "gather", "running totals")
    }
    assert allowed == dict.fromkeys(ADDS, 4 * 2.0**-11) | {"gather": 0.0, "running totals": 0.0}
    assert agreement_on(cpu, captured(ADDS[0]).program) == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_half_program_is_bit_equal_to_live_autocast_on_cuda(name: str) -> None:
    use_true_fp32()
    assert of_corpus(name, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), [*product(NETS, HALF)])
def test_a_small_half_program_is_bit_equal_to_live_autocast_on_cuda(name: str, dtype: str) -> None:
    use_true_fp32()
    assert of_small(name, dtype, CUDA)


LEVELS = [*product([*NETS, *CONTROL_FLOW], ["O1"]), *drawn(2, [*product(CONTROL_FLOW, ["O2", "O3"])])]


@pytest.mark.slow
@pytest.mark.parametrize("lists", ["cpu", "cuda"])
@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_what_is_interpreted_is_what_is_written(name: str, level: str, lists: str) -> None:
    """The eager interpretation of the plan and the exported program give the same bits."""
    half, inputs = small_half(name, level, "fp16", lists), list(SMALL[name].inputs(5).values())
    with torch.inference_mode():
        eager = Autocast(opened(name, lists), half.plan).run(*[tensor.clone() for tensor in inputs])
    came = outputs_of(half.program, inputs)
    assert all(torch.equal(one.to(other.dtype), other) for one, other in zip(eager, came, strict=True))
    if name in CONTROL_FLOW:
        for one, exact in zip(came, captured_small(name).run(*inputs), strict=True):
            torch.testing.assert_close(one, exact, rtol=2e-2, atol=2e-2)
