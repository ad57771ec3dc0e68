"""Every kind of source, from its folder to the captured program, in a child of its own; and the way out by Ctrl-C."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.capture.capture import Captured, capture
from halfeven.models.capture.regions import ISLAND
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import CaptureFailed
from halfeven.models.folder.package import read_folder
from halfeven.models.program import walk
from safetensors.torch import load_file, save_file
from torch import nn

from tests.model_folders import samples_of, tensor, write_folder
from tests.patience import PATIENCE_S

CPU = torch.device("cpu")


def islands(captured: Captured) -> set[str]:
    marked = [n for _, n in walk(captured.program.graph_module) if ISLAND in n.meta.get("custom", {})]
    return {f"{node.target}: {node.meta['custom'][ISLAND]}" for node in marked}


def answers(captured: Captured, *arrays: np.ndarray) -> list[np.ndarray]:
    return TorchEngine(captured.program, "fp32", CPU).run([[array] for array in arrays])


REGIONS = """
import torch
from torch import nn
from torch.cuda.amp import custom_bwd, custom_fwd

class Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @custom_bwd
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.same = nn.Linear(4, 3)
        self.same.weight = self.linear.weight

    @torch.autocast("cpu")
    def forward(self, x):
        y = Square.apply(self.linear(x)) + self.same(x)
        with torch.autocast("cuda", enabled=False):
            y = y.float().softmax(-1)
        return torch.stack([torch.cond(row.sum() > 0, torch.sin, torch.cos, (row,)) for row in (y[:1],)])[0] + y

def build():
    torch.manual_seed(7)
    return Net().half()
"""


@pytest.mark.slow
def test_islands_halves_and_control_flow_of_a_users_own_code(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", REGIONS, max_batch_size=4)
    captured = capture(read_folder(folder), samples_of({"x": (4,)}))
    assert islands(captured) == {
        "aten.to.dtype: custom_fwd(cast_inputs=float32)",
        "aten.square.default: custom_fwd(cast_inputs=float32)",
        "aten.to.dtype: autocast(enabled=False)",
        "aten.softmax.int: autocast(enabled=False)",
    }
    ops = [str(node.target) for _, node in walk(captured.program.graph_module)]
    assert "cond" in ops and "aten.sin.default" in ops
    values = [node.meta.get("val") for _, node in walk(captured.program.graph_module)]
    assert {v.dtype for v in values if isinstance(v, torch.Tensor)} == {torch.float32, torch.bool}
    assert "4 half-precision tensors of the module" in captured.notes[0]
    assert "torch.autocast on cpu" in captured.notes[1]
    state = captured.program.state_dict
    assert (
        state["same.weight"].data_ptr() == state["linear.weight"].data_ptr() != state["same.bias"].data_ptr()
    )


class Exported(nn.Module):
    """A net as somebody else exported it, with a dictionary, a keyword and a region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x.to(self.linear.weight.dtype))
        with torch.autocast("cpu", enabled=False):
            return {"n": shift * 2, "y": y.float() + shift}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_foreign_program_is_opened_in_the_child_and_captured_again(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    net = Exported().eval().requires_grad_(False).to(dtype)
    free = {0: torch.export.Dim.DYNAMIC(min=1, max=64)}
    x = torch.randn(3, 4), torch.randn(3, 3)
    program = torch.export.export(net, x[:1], {"shift": x[1]}, dynamic_shapes={"x": free, "shift": free})
    folder = write_folder(
        tmp_path / "net",
        "",
        source="program.pt2",
        inputs=[tensor("shift", "FP32", [-1, 3]), tensor("x", "FP32", [-1, 4])],
        outputs=[tensor("y", "FP32", [-1, 3]), tensor("n", "FP32", [-1, 3])],
    )
    torch.export.save(program, folder / "program.pt2")
    captured = capture(read_folder(folder), samples_of({"shift": (3,), "x": (4,)}))
    assert captured.notes == (
        ("2 half-precision tensors of the module were widened to FP32",) if dtype == torch.float16 else ()
    )
    assert {t.dtype for t in captured.program.state_dict.values()} == {torch.float32}
    assert "aten.add.Tensor: autocast(enabled=False)" in islands(captured)
    given = samples_of({"shift": (3,), "x": (4,)}, count=5)
    expected = net.float()(torch.from_numpy(given["x"]), shift=torch.from_numpy(given["shift"]))
    for came, name in zip(answers(captured, given["shift"], given["x"]), ("y", "n"), strict=True):
        np.testing.assert_allclose(came, expected[name].numpy(), rtol=1e-5, atol=1e-6)


def test_an_onnx_file_takes_another_road(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", source="model.onnx", files={"model.onnx": ""})
    with pytest.raises(CaptureFailed, match=r"model.onnx is an ONNX file"):
        capture(read_folder(folder), samples_of({"x": (4,)}))


def bert(folder: Path, half: bool = False) -> nn.Module:
    """A tiny BERT, saved as ``save_pretrained`` does, with its model.toml."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertForSequenceClassification(config).eval()
    (model.half() if half else model).save_pretrained(folder)
    write_folder(
        folder,
        "",
        source="hf:.",
        max_batch_size=4,
        inputs=[tensor(name, "INT64", [-1, -1]) for name in ("attention_mask", "input_ids")],
        outputs=[tensor("logits", "FP32", [-1, 2])],
    )
    return model.float()


def words(count: int, length: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng()
    mask = np.arange(length) < random.integers(1, length + 1, (count, 1))
    return {"attention_mask": mask.astype(np.int64), "input_ids": random.integers(0, 50, (count, length))}


@pytest.mark.slow
def test_a_transformers_folder_becomes_the_model_that_its_configuration_names(tmp_path: Path) -> None:
    model = bert(tmp_path / "bert", half=True)
    captured = capture(read_folder(tmp_path / "bert"), words(8, 7))
    assert len(captured.notes) == 1
    assert "half-precision tensors of model.safetensors were widened to FP32" in captured.notes[0]
    given = words(4, 12)  # another length
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(array) for name, array in given.items()}).logits
    came = answers(captured, *given.values())
    np.testing.assert_allclose(came[0], expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_without_a_weight_that_is_needed_is_refused_by_its_name(tmp_path: Path) -> None:
    bert(tmp_path / "bert")
    file = tmp_path / "bert/model.safetensors"
    state = load_file(file)
    del state["bert.pooler.dense.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(CaptureFailed, match=r"no weights for \['bert.pooler.dense.weight'\]"):
        capture(read_folder(tmp_path / "bert"), words(8, 7))


@pytest.mark.slow
def test_without_the_transformers_library_the_extra_to_install_is_named(tmp_path: Path) -> None:
    files = {
        "config.json": "{}",
        "model.safetensors": "",
        "transformers.py": "raise ImportError('not there')",
    }
    folder = write_folder(tmp_path / "bert", "", source="hf:.", files=files)
    with pytest.raises(CaptureFailed, match=r"pip install 'halfeven\[hf\]'"):
        capture(read_folder(folder), samples_of({"x": (4,)}))


@pytest.mark.slow
def test_code_in_a_transformers_folder_is_never_run(tmp_path: Path) -> None:
    bert(tmp_path / "bert")
    canary = tmp_path / "canary"
    file = tmp_path / "bert/config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    names = {
        "AutoConfig": "evil.Config",
        "AutoModelForSequenceClassification": "evil.Model",
        "AutoModel": "evil.Model",
    }
    file.write_text(json.dumps(config | {"auto_map": names, "architectures": ["Evil"], "model_type": "evil"}))
    (tmp_path / "bert/evil.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    with pytest.raises(CaptureFailed):
        capture(read_folder(tmp_path / "bert"), words(8, 7))
    assert not canary.exists()


@pytest.mark.slow
def test_ctrl_c_while_the_users_code_runs_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    folder = write_folder(
        tmp_path / "net",
        "import os, time\nwith open('ready', 'w') as fifo:\n    fifo.write(str(os.getpid()))\ntime.sleep(600)\n",
    )
    os.mkfifo(folder / "ready")
    ready = os.open(folder / "ready", os.O_RDONLY | os.O_NONBLOCK)
    script = (
        "import signal, sys, pathlib, numpy as np\n"
        # a shell's background jobs inherit that SIGINT is ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from halfeven.models.folder.package import read_folder; from halfeven.models.capture.capture import capture\n"
        "capture(read_folder(pathlib.Path(sys.argv[1])), {'x': np.ones((3, 4), np.float32)})\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert select.select([ready], [], [], 120)[0]
        child = int(os.read(ready, 20))
        assert list((tmp_path / "tmp").glob("halfeven-capture-*"))
        parent.send_signal(signal.SIGINT)
        said = parent.communicate(timeout=PATIENCE_S)[1]
    finally:
        parent.kill()
        os.close(ready)
    assert "KeyboardInterrupt" in said
    assert not Path(f"/proc/{child}").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
