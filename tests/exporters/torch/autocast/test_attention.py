"""Attention in half rounds in an emulation as the nodes do that its ONNX file has for it."""

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from halfeven.exporters.onnx.stored import half_storage
from halfeven.exporters.torch.autocast.dtypes import Typing
from halfeven.exporters.torch.autocast.emulation import Emulation, half_rounding
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.rewrite import rewrite
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn

from tests.programs import original
from tests.slow import slow_but

LENGTH, HEADS, WIDTH = 12, 2, 16


class Sharp(nn.Module):
    """Scores of some tens, where the rounding of a score shows."""

    mask: Tensor | None

    def __init__(self, mask: Tensor | None, causal: bool) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        return F.scaled_dot_product_attention(
            heads, heads.roll(1, -2), heads, attn_mask=self.mask, is_causal=self.causal
        )


MASKS = {
    "plain": (lambda: None, False),
    "causal": (lambda: None, True),
    "biased": (lambda: torch.randn(LENGTH, LENGTH), False),
    "masked": (lambda: torch.rand(LENGTH, LENGTH) > 0.3, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but({"masked"}, MASKS))
def test_it_is_nearer_to_the_files_own_storage_than_one_rounding_is(kind: str, tmp_path: Path) -> None:
    mask, causal = MASKS[kind]
    made = original(Sharp(mask(), causal), {"x": 3 * torch.randn(4, LENGTH, HEADS * WIDTH)})
    module, precision = runnable(made.program), Precision("O3")
    plan = make_plan(module, precision)
    half = rewrite(made.program, plan, made.spec, made.example)
    write_onnx(half.program, made.spec, tmp_path / "half.onnx", {})
    x = 3 * torch.randn(4, LENGTH, HEADS * WIDTH)
    (name,) = (tensor.name for tensor in made.spec.inputs)
    file = half_storage(onnx.load(tmp_path / "half.onnx"), made.spec)({name: x.numpy()})[
        made.spec.outputs[0].name
    ]

    def gap(opened: bool) -> float:
        dtypes = Typing(module, made.example).under(plan)
        emulation = Emulation(module, dtypes, half_rounding(torch.float16), opened=opened)
        with torch.inference_mode():
            (answer,) = emulation.run(x.clone())
        return float((answer - torch.from_numpy(file)).abs().max())

    assert gap(opened=True) < 0.5 * gap(opened=False)
