"""A `.pt` file is no model: the message says what it holds, and its three lines make it one."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from halfeven.exporters.guessing.bare import advice_for, guess_at
from halfeven.models.errors import BadFolder
from halfeven.models.store.store import Store
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


def written(kind: str, path: Path) -> Path:
    net = Net()
    if kind == "safetensors":
        safetensors.torch.save_model(net, str(path := path.with_suffix(".safetensors")))
    elif kind == "scripted":
        torch.jit.save(torch.jit.trace(net, torch.zeros(2, 4)), path)
    else:
        torch.save(net if kind == "pickled" else net.state_dict(), path)
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pickled", "holds a pickled"),
        ("state", "holds weights without the code"),
        ("scripted", "holds TorchScript"),
        ("safetensors", "holds weights without the code"),
    ],
)
def test_the_three_lines_make_the_file_a_model(
    kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(kind, tmp_path / "model.pt")
    with pytest.raises(BadFolder, match=words) as said:
        guess_at(str(file))
    lines = str(said.value).splitlines()[1:]
    assert len(lines) == 3
    monkeypatch.chdir(tmp_path)
    x = np.random.normal(size=(16, 4)).astype(np.float32)
    exec("\n".join(line.strip() for line in lines), {"Net": Net, "x": x})
    assert Store(tmp_path / "halfeven-store").live_number("net") == 1


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


def test_nothing_of_a_file_is_run_and_one_that_torch_did_not_write_has_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Hostile()}, tmp_path / "hostile.pt")
    assert "a pickled posix.mkdir" in advice_for(tmp_path / "hostile.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Hostile()))
    (tmp_path / "text.pt").write_text("no pickle")
    assert advice_for(tmp_path / "plain.pt") == advice_for(tmp_path / "text.pt") == ""
    assert not (tmp_path / "ran").exists()
