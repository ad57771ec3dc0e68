"""Calls of the Python API that cannot be right: each message says what was expected, what came and what to give."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import halfeven as he
import numpy as np
import pytest
import torch
from halfeven.models.errors import BadFolder, BadInput, BadSamples, BadSetting, CaptureFailed, HalfevenError
from torch import nn

CONVERT: Any = he.convert  # called against its types
SERVE: Any = he.serve
GIVE = r"model: expected an nn\.Module, or the path of .*, got "
ODD = r"tensor 'x': expected numbers or truth values, every row of one shape .*; got "
MISSING = r"give samples=\{'x': array\}.*; got "

BRANCHING = """
import halfeven as he, numpy as np, torch
class Branching(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
try:
    he.convert(Branching(), {"x": np.ones((16, 4), np.float32)})
except Exception as refused:
    print(type(refused).__name__)
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng().normal(size=(16, 4)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda x: CONVERT(Net, {"x": x}), BadSetting, rf"{GIVE}the class Net: give a module .*, Net\("),
        (lambda x: CONVERT(Net().state_dict(), {"x": x}), BadSetting, f"{GIVE}a dictionary: .*load_state_dict"),
        (lambda x: CONVERT(lambda x: x, {"x": x}), BadSetting, f"{GIVE}a function: call it in the forward"),
        (lambda x: CONVERT(torch.ones(3), {"x": x}), BadSetting, f"{GIVE}a tensor"),
        (lambda x: CONVERT(None, {"x": x}), BadSetting, f"{GIVE}NoneType"),
        (lambda x: CONVERT(Net()), BadSamples, f"{MISSING}no samples"),
        (lambda x: CONVERT(Net(), {}), BadSamples, f"{MISSING}no samples"),
        (lambda x: CONVERT(Net(), x), BadSamples, f"{MISSING}samples of the type ndarray"),
        (lambda x: CONVERT(Net(), [x]), BadSamples, f"{MISSING}samples of the type list"),
        (lambda x: CONVERT(Net(), {"x": x[:0]}), BadSamples, "tensor 'x': expected at least one row, got none"),
        (lambda x: CONVERT(Net(), {"x": [[1.0, 2.0], [3.0]]}), BadInput, f"{ODD}list: .*inhomogeneous"),
        (lambda x: CONVERT(Net(), {"x": ["a", "b"]}), BadInput, f"{ODD}list: its datatype is <U1"),
        (lambda x: CONVERT(Net(), {"x": [None]}), BadInput, f"{ODD}list: its datatype is object"),
        (lambda x: CONVERT(Net(), {"x": torch.eye(4).to_sparse()}), BadInput, f"{ODD}Tensor: "),
        (lambda x: CONVERT(Net(), {1: x}), BadSamples, "expected the name of an input .* as each key, got 1"),
        (lambda x: CONVERT(Net(), {"x": x}, keep="nowhere"), BadSetting, "keep = 'nowhere' matches no node"),
        (lambda x: CONVERT(Net(), {"x": x}, level="O7"), BadFolder, "option level = 'O7': expected one of O0"),
        (lambda x: CONVERT(Net().to("meta"), {"x": x}), CaptureFailed, "Net .*: it lies on the device meta.*load"),
        (lambda x: CONVERT("net.onnx", name="my net"), BadSetting, "the name 'my net' is not a model name"),
        (lambda x: he.load("nowhere", "net"), BadSetting, "there is no store nowhere: `save` of a half"),
        (lambda x: SERVE("nowhere"), BadSetting, "there is no store nowhere"),
        (lambda x: SERVE(Net()), BadSetting, "expected a half, as halfeven.convert gives it, .*, got Net"),
        (lambda x: he.Client("localhost:8000").predict("net", x), HalfevenError, r"got 'localhost:8000'"),
    ],
)  # fmt: skip
def test_the_message_says_what_to_give(
    call: Callable[[Any], Any],
    kind: type[HalfevenError],
    words: str,
    x: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=words) as said:
        call(x)
    assert "\n  " not in str(said.value), "no frame of ours is shown"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.slow(seconds=15)
def test_what_torch_logs_while_it_traces_is_not_printed() -> None:
    """In a process of its own: each test before may have changed where torch's log lines go."""
    done = subprocess.run([sys.executable, "-c", BRANCHING], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("CaptureFailed\n", "")
