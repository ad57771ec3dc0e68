"""torch.onnx traces again only those programs that it cannot translate otherwise, and every file answers alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.engines.onnx_engine import OnnxEngine
from torch import Tensor, nn
from torch.onnx._internal.exporter import _fx_passes

from tests.corpus.case import net
from tests.programs import original

passes: Any = _fx_passes


def written_over(layer: nn.Module, x: Tensor) -> Tensor:
    before = layer(x)
    read = before.exp()
    F.relu_(before)
    return before + read


def written_through_a_view(layer: nn.Module, x: Tensor) -> Tensor:
    before = layer(x)
    before.view(-1, 2, 3).mul_(2)
    return before


KINDS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], int]] = {  # how often torch traces it again
    "a layer": (lambda layer, x: layer(x).tanh(), 0),
    "a result written over that nothing else reads": (lambda layer, x: layer(x).relu_().exp(), 0),
    "casts": (lambda layer, x: layer(x).to(torch.float64).float().sum(-1), 0),
    "a cast to its own datatype, the answer": (lambda layer, x: layer(x).to(torch.float32), 0),
    "an operation without a translation": (lambda layer, x: 1.0 - F.adaptive_avg_pool1d(layer(x), 1), 0),
    "one that is the answer": (lambda layer, x: torch.rsub(layer(x), 2.0), 0),
    "several answers": (lambda layer, x: torch.topk(layer(x), 2), 0),
    "a result written over that others read": (written_over, 1),
    "a result written through a view": (written_through_a_view, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_cannot_be_translated_otherwise_is_traced_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, traces = KINDS[kind]
    model = original(
        net(lambda self, x: forward(self.layer, x), layer=nn.Linear(6, 6)), {"x": torch.randn(3, 6)}
    )
    again, path = list[object](), tmp_path / "it.onnx"
    decompose = passes.decompose_with_registry
    monkeypatch.setattr(
        passes, "decompose_with_registry", lambda *given: (again.append(given), decompose(*given))[1]
    )
    write_onnx(model.program, model.spec, path, {})
    assert len(again) == traces
    x = torch.randn(5, 6)
    answers = OnnxEngine(path, "fp32", torch.device("cpu")).run([[x.numpy()]])
    for came, expected in zip(answers, model.run(x), strict=True):
        np.testing.assert_allclose(came, expected.numpy(), rtol=1e-5, atol=1e-5)
