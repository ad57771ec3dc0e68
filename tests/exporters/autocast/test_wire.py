"""Half on the wire: the whole takes and gives half, and half programs need no casts at their ends."""

import pytest
import torch
from halfeven.exporters.autocast.plan import make_plan
from halfeven.exporters.autocast.rewrite import rewrite
from halfeven.exporters.autocast.wire import wired
from halfeven.models.archive.archive import load_program, save_program
from halfeven.models.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn

from tests.nets import NETS, normal
from tests.programs import Whole, whole

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def wired_whole(model: Whole, io_dtype: str) -> Whole:
    return Whole(*wired(model.program, model.spec, io_dtype, model.example))


@pytest.mark.parametrize("io_dtype", HALF)
def test_the_whole_computes_in_fp32_on_what_it_was_given_and_rounds_once(io_dtype: str) -> None:
    model = whole(NETS["residual"].build(), NETS["residual"].inputs(8))
    half = wired_whole(model, io_dtype)
    image = torch.randn(5, 3, 6, 6).to(HALF[io_dtype])
    assert torch.equal(half.run(image)[0], model.run(image.float())[0].to(HALF[io_dtype]))
    assert {tensor.type.torch for tensor in (*half.spec.inputs, *half.spec.outputs)} == {HALF[io_dtype]}


def test_integers_and_what_is_not_fp32_stay_and_fp32_leaves_all_as_it_was() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            return x, ids + 1, x.double(), x > 0

    inputs = {"x": torch.randn(8, 4), "ids": torch.randint(0, 9, (8, 4))}
    model = whole(Mixed(), inputs)
    half = wired_whole(model, "fp16")
    assert [tensor.datatype for tensor in half.spec.inputs] == ["FP16", "INT64"]
    assert [tensor.datatype for tensor in half.spec.outputs] == ["FP16", "INT64", "FP64", "BOOL"]
    answers = half.run(torch.ones(2, 4).half(), inputs["ids"][:2])
    assert [tensor.dtype for tensor in answers] == [tensor.type.torch for tensor in half.spec.outputs]
    assert wired(model.program, model.spec, "fp32", model.example)[:2] == (model.program, model.spec)


def test_a_net_that_is_half_throughout_needs_no_cast_at_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = whole(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), normal("input", 8)(8))
    half = wired_whole(model, "fp16")
    path = tmp_path_factory.mktemp("wire") / "whole.pt2"
    save_program(half.program, path, weights=True)
    again = load_program(path)
    made = rewrite(again, make_plan(runnable(again), Precision()), half.spec, half.example)
    assert made.casts == 0
    x = torch.randn(4, 8).half()
    plain = rewrite(model.program, make_plan(runnable(model.program), Precision()), model.spec, model.example)
    assert torch.equal(runnable(made.program)(x)[0].float(), runnable(plain.program)(x.float())[0])
