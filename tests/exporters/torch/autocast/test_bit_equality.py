"""The half program is, bit for bit, the captured program under live autocast, over the whole corpus and zoo.

Before any search, repair or moved cast: those change bits on purpose.
"""

import pytest
import torch
from halfeven.exporters.torch.autocast.bit_equality import (
    agreement_on,
    half_by_rules,
    live_outputs,
    outputs_of,
    same_numbers,
)
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.models.program import on_device
from torch.export import ExportedProgram

from tests.corpus import CORPUS, captured, cases, fresh
from tests.exporters.torch.autocast.half_programs import KEPT

ADDS = ("island", "several outputs", "scatter add", "index put")  # with atomics, on CUDA
NAMES = [name for name in CORPUS if name not in KEPT]


def is_bit_equal(name: str, lists: str, device: torch.device) -> bool:
    model, rows = captured(name), min(CORPUS[name].max_batch_size, 3)
    inputs = [tensor.to(device) for tensor in fresh(name, rows, seed=5).values()]

    def placed(program: ExportedProgram) -> ExportedProgram:
        return on_device(program, device) if device.type == "cuda" else program

    try:
        expected = live_outputs(placed(model.program), inputs)
    except RuntimeError as error:
        pytest.skip(f"live autocast raises: {str(error)[:120]}")
    half = half_by_rules(model.program, model.spec, model.example, lists).program
    came, allowed = outputs_of(placed(half), inputs), agreement_on(device, half)
    return all(same_numbers(*pair, allowed) for pair in zip(expected, came, strict=True))


@pytest.mark.parametrize("name", cases(NAMES))
def test_a_half_program_is_bit_equal_to_live_autocast(name: str) -> None:
    assert is_bit_equal(name, "cpu", torch.device("cpu"))


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
    assert is_bit_equal(name, "cuda", torch.device("cuda:0"))
