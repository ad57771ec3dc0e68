"""docs/python.md: its code runs word for word, for each kind of model that it names."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import halfeven as he
import numpy as np
import pytest
import torch
from halfeven.models.errors import BadInput
from torch import nn

from tests.patience import PATIENCE_S
from tests.serve.python_api.page_blocks import BLOCKS
from tests.slow import one_in_turn

BY_A_SERVER = "he.prove("
pytestmark = pytest.mark.usefixtures("plain_setup")


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.hidden(x)))


@dataclass
class Task:
    """A model as `he.convert` takes it, and rows with the right answers for it."""

    net: Any
    draw: Callable[[int], tuple[np.ndarray, np.ndarray]]
    trained: bool = True


def regression(net: Any, trained: bool = True) -> Task:
    weights = np.random.normal(size=(4, 3)).astype(np.float32)

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.normal(size=(rows, 4)).astype(np.float32)
        return x, x @ weights

    return Task(net, draw, trained)


def live_module(_: Path) -> Task:
    return regression(MyModel())


def onnx_file(folder: Path) -> Task:
    example, dynamic = torch.randn(3, 4), {"x": {0: torch.export.Dim.DYNAMIC}}
    program = torch.onnx.export(
        MyModel().eval(), (example,), dynamo=True, dynamic_shapes=dynamic, output_names=["y"], verbose=False
    )
    assert program is not None
    program.save(folder / "mymodel.onnx")
    return regression("mymodel.onnx", trained=False)


def exported_program(folder: Path) -> Task:
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}}
    torch.export.save(
        torch.export.export(MyModel().eval(), (torch.randn(3, 4),), dynamic_shapes=dynamic),
        folder / "mymodel.pt2",
    )
    return regression("mymodel.pt2")


def transformers_folder(folder: Path) -> Task:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = ViTConfig(**sizes, num_channels=1, id2label={row: str(row) for row in range(3)})
    ViTForImageClassification(config).save_pretrained(folder / "mymodel")

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.random.randint(0, 3, rows)
        return np.random.normal(y[:, None, None, None], 0.3, size=(rows, 1, 8, 8)).astype(np.float32), y

    return Task("mymodel", draw)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize(
    "make", [onnx_file, *one_in_turn([live_module, exported_program, transformers_folder], 0)]
)
def test_the_block_runs_word_for_word(
    make: Callable[[Path], Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALFEVEN_STORE", "store")
    task = make(tmp_path)
    (x, y), (x2, y2) = task.draw(64), task.draw(256)
    seen: dict[str, Any] = {"net": task.net, "x": x, "y": y, "x2": x2, "y2": y2}
    before, line, after = BLOCKS[0].partition(BY_A_SERVER)
    exec(before, seen)
    half: he.Half = seen["half"]
    assert half.verdict == "equal", half
    assert half.name == "mymodel"
    assert he.load("store", "mymodel").digest == half.digest
    assert (tmp_path / "out/half.onnx").is_file()
    with he.serve("store", port=0) as other:
        prove, _, rest = (line + after).partition("\n")
        exec(prove.replace("http://host:8000", other.url), seen)
    served = "    seen.append((client.predict('mymodel', x), client.infer('mymodel', {'x': x})))\n"
    served += "    seen.append(asyncio.run(ask(server.url, x)))\n"
    exec(BLOCKS[1], seen)
    lines = rest.splitlines(keepends=True)
    seen["seen"] = []
    if task.trained:
        exec("".join([*lines[:2], served, *lines[2:]]), seen)
        assert half.store.live_number("mymodel") == 1  # rolled back
        assert half.store.numbers("mymodel") == [1, 2]
    else:  # a file has no module to train, and says so
        with pytest.raises(BadInput, match="ONNX"):
            exec("".join([*lines[:2], served, *lines[2:]]), seen)
    (predicted, inferred), row_by_row = seen["seen"]
    np.testing.assert_allclose(np.concatenate(row_by_row), predicted, rtol=0, atol=2**-9)
    np.testing.assert_array_equal(predicted, half(x))  # bit for bit
    (output,) = inferred.values()
    np.testing.assert_array_equal(output, half(x))
    half.close()


def test_the_errors_of_the_page_are_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    block = BLOCKS[2]
    exec(block, {"he": he})
    assert capsys.readouterr().out.strip() == block.strip().rpartition("# ")[2]


@pytest.mark.slow(seconds=15)
def test_the_block_is_clean_for_pyright_at_its_strictest(tmp_path: Path, unpacked_wheel: Path) -> None:
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(unpacked_wheel)]}))
    script = tmp_path / "script.py"
    head = "# pyright: strict, reportUnusedExpression=false\n"  # a notebook shows what a line gives
    given = "import numpy as np\nfrom numpy.typing import NDArray\nfrom torch import nn\n"
    given += "net = nn.Linear(4, 3)\nx: NDArray[np.float32] = np.zeros((8, 4), np.float32)\n"
    script.write_text(head + given + "y, x2, y2 = np.zeros((8, 3), np.float32), x, x\n" + BLOCKS[0])
    command = [Path(sys.executable).with_name("pyright"), "--pythonpath", sys.executable, "-p", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def test_importing_halfeven_imports_nothing_heavy() -> None:
    script = (
        "import sys; bare = set(sys.modules); import halfeven\n"
        "dir(halfeven); new = set(sys.modules) - bare\n"
        "print(len(new), sorted({name.partition('.')[0] for name in new} - sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    count, names = done.stdout.split(maxsplit=1)
    assert names.strip() == "['halfeven']"
    assert int(count) < 20  # modules, Python's own included


def test_every_name_of_the_door_is_there_and_another_is_an_attribute_error() -> None:
    assert all(callable(getattr(he, name)) for name in he.__all__ if name != "__version__")
    assert set(he.__all__) <= set(dir(he))
    with pytest.raises(AttributeError, match="'halfeven' has no attribute 'covert'"):
        he.covert  # type: ignore[attr-defined]  # noqa: B018


def test_the_import_leaves_the_environment_but_for_what_switches_telemetry_off() -> None:
    from halfeven.models.telemetry import OFF

    script = "import os; was = dict(os.environ); import halfeven\nprint(sorted(set(os.environ) - set(was)))"
    clean = {name: value for name, value in os.environ.items() if name not in OFF}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env=clean,
    )
    assert done.stdout.strip() == str(sorted(OFF))
