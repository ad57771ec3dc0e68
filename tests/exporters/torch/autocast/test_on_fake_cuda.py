"""The half program computes what live autocast does on the device, over corpus and zoo on fake CUDA tensors.

Names, datatypes and devices of operations, without a device and without values (`tests/fake_cuda.py`).
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from halfeven.models.engines.cuda_graphs import host_reads
from halfeven.models.program import runnable
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.corpus import CORPUS, captured, cases
from tests.corpus.case import net
from tests.exporters.torch.autocast.half_programs import KEPT, half_program, inputs_of
from tests.fake_cuda import CUDA, OperationLog, Stream, on_fake_cuda

NOT_TRACED = {
    "gru": "torch has no fake kernel for the fused cell",
    "warp": "torch's decomposition of grid_sampler slices, which a torch without CUDA cannot do there",
    "spectrum": "its transform in half is computed by no CPU, and the rewrite asks for the CPU's kernel",
}
if torch.version.cuda is not None and not torch.cuda.is_available():
    NOT_TRACED |= dict.fromkeys(
        ("lstm", "zoo lstm"), "a CUDA build asks for the device before it fakes cuDNN's LSTM"
    )
TRACED = [name for name in CORPUS if name not in NOT_TRACED]
LOOPS = {"lstm", "zoo lstm"}  # half on CUDA alone
# The operators whose results the host has to know before it can go on: no CUDA graph can hold such a model.
SYNCHRONISES = {
    "branch by value": ["cond"],
    "branch by length": ["cond"],
    "while loop": ["while_loop"],
    "zoo switch": ["cond"],
}


@cache
def half_on_cuda(name: str) -> Stream:
    return on_fake_cuda(half_program(name), inputs_of(name), autocast=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(name for name in TRACED if name not in KEPT or name in LOOPS))
def test_the_half_program_computes_what_live_autocast_does_on_cuda(name: str) -> None:
    half = half_on_cuda(name)
    live = on_fake_cuda(captured(name).program, inputs_of(name), autocast=True)
    assert half.operations == live.operations
    assert [shape for _, shape in half.outputs] == [shape for _, shape in live.outputs]


@pytest.mark.parametrize("name", cases(TRACED))
def test_no_result_is_on_the_cpu_and_what_the_host_waits_for_is_named(name: str) -> None:
    half = half_on_cuda(name)
    assert half.elsewhere == []
    assert half.synchronises == SYNCHRONISES.get(name, [])
    assert len(host_reads(runnable(half_program(name)))) == len(half.synchronises), (
        "what the engine looks for"
    )


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        (lambda x: x[x > 0].sum(), "aten::index"),
        (lambda x: x.nonzero().sum(), "aten::nonzero"),
        (lambda x: x * x.sum().item(), "aten::_local_scalar_dense"),
        (lambda x: torch.masked_select(x, x > 0).sum(), "aten::masked_select"),
    ],
)
def test_a_result_that_the_host_has_to_know_is_found(ask: Callable[[Tensor], Tensor], found: str) -> None:
    program = torch.export.export(net(lambda self, x: ask(x)), (torch.randn(4),))
    assert on_fake_cuda(program, [torch.randn(4)], autocast=False).synchronises == [found]


def test_a_cast_that_only_live_autocast_makes_is_found() -> None:
    x = torch.randn(4, 4)
    program = torch.export.export(net(lambda self, x: x @ x), (x,))
    assert on_fake_cuda(program, [x], autocast=False).operations == [
        ("aten::mm", ("float32", "float32"), ("float32",))
    ]
    assert on_fake_cuda(program, [x], autocast=True).operations == [
        ("aten::mm", ("float16", "float16"), ("float16",))
    ]


def test_a_result_on_the_cpu_is_found() -> None:
    log = OperationLog()
    with FakeTensorMode() as mode:
        there = torch.ops.aten._to_copy.default(mode.from_tensor(torch.ones(3)), device=CUDA)
        with log:
            torch.ops.aten._to_copy.default(there, device="cpu")
    assert log.stream.elsewhere == ["aten::_to_copy"]
