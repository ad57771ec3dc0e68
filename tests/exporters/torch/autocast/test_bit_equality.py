"""Over the whole corpus and zoo: the half program is, bit for bit, the captured program under live autocast.

Before any search, repair or moved cast: those change bits on purpose.
"""

from collections.abc import Sequence

import pytest
import torch
from halfeven.exporters.torch.autocast.composites import open_composites
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.policy import LISTS
from halfeven.exporters.torch.autocast.rewrite import rewrite
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.models.package import Precision
from halfeven.models.program import on_device, runnable
from torch import Tensor
from torch.export import ExportedProgram

from tests.corpus import CORPUS, captured, cases, fresh

# Where the plan keeps more in FP32 than live autocast would.
KEPT = {
    "autocast off": "an autocast(enabled=False) region is a true FP32 island: its inputs are upcast",
    "autocast off for CUDA": "the same",
    "zoo llama": "its rotary embedding is such an island",
    "lstm": "recurrent ops stay FP32",
    "gru": "recurrent ops stay FP32",
    "zoo lstm": "recurrent ops stay FP32",
}
NAMES = [name for name in CORPUS if name not in KEPT]


def run(program: ExportedProgram, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        return tuple(runnable(program)(*[tensor.clone() for tensor in inputs]))


def live(program: ExportedProgram, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    try:
        with torch.autocast(inputs[0].device.type, dtype=torch.float16):
            return run(program, inputs)
    except RuntimeError as error:
        pytest.skip(f"live autocast raises: {str(error)[:120]}")


def is_bit_equal(name: str, lists: str, device: torch.device) -> bool:
    model, rows = captured(name), min(CORPUS[name].max_batch_size, 3)
    inputs = [tensor.to(device) for tensor in fresh(name, rows, seed=5).values()]
    whole = on_device(model.program, device) if device.type == "cuda" else model.program
    expected = live(whole, inputs)
    module = open_composites(runnable(model.program), LISTS[lists])
    half = rewrite(model.program, make_plan(module, Precision(), lists), model.spec, model.example, module)
    program = on_device(half.program, device) if device.type == "cuda" else half.program
    pairs = zip(expected, run(program, inputs), strict=True)
    return all(torch.allclose(a.to(b.dtype), b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize("name", cases(NAMES))
def test_a_half_program_is_bit_equal_to_live_autocast(name: str) -> None:
    assert is_bit_equal(name, "cpu", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_half_program_is_bit_equal_to_live_autocast_on_cuda(name: str) -> None:
    use_true_fp32()
    assert is_bit_equal(name, "cuda", torch.device("cuda:0"))
