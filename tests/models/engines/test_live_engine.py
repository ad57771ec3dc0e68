"""The live engine: the operator's own module under autocast, its islands, and its imports beside the server's."""

import importlib
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines import live_source
from halfeven.models.engines.live_engine import LiveEngine, LiveModule, live_json, live_module, raise_islands
from halfeven.models.engines.live_source import LiveSource
from halfeven.models.errors import BadFolder, CaptureFailed, DamagedFile, EngineFailed
from halfeven.models.folder.package import read_folder
from halfeven.models.spec.spec import ModelSpec
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

from tests.model_folders import tensor, write_folder

CPU = torch.device("cpu")

LOOP = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x)
        for _ in range(int((x.sum(1) > -1e9).sum() > 0) + 1):  # as often as the values say
            hidden = torch.tanh(hidden)
        return self.last(hidden)

def build():
    torch.manual_seed(3)
    return Net()
"""


def live(folder: Path, roots: tuple[Path, ...] = ()) -> LiveModule:
    """The module of a model folder, as it is."""
    source = LiveSource(folder, "model.py:build", roots)
    return LiveModule(source.build(), source, read_folder(folder).spec)


def ask(engine: LiveEngine, x: np.ndarray) -> np.ndarray:
    return engine.run([[x]])[0]


def fresh(rows: int = 5) -> np.ndarray:
    return np.random.default_rng().standard_normal((rows, 4)).astype(np.float32)


def saying(word: str) -> str:
    """A model whose answer is what a sibling of that name says, there at once and again when asked."""
    return f"""
import torch
from torch import nn
import {word}

class Net(nn.Module):
    def forward(self, x):
        from {word} import NUMBER
        import {word}.more as again
        return x[:, :3] * 0 + {word}.NUMBER + NUMBER + again.NUMBER

def build():
    return Net()
"""


# The form.


def test_a_module_that_torch_export_refuses_is_served_as_it_is_written(tmp_path: Path) -> None:
    module = live(write_folder(tmp_path / "net", LOOP))
    x = fresh()
    expected = module.module(torch.from_numpy(x.copy()))[0]
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(LiveSource(tmp_path / "net", "model.py:build").build(), (torch.randn(2, 4),))
    np.testing.assert_array_equal(ask(LiveEngine(module, "fp32", CPU), x), expected.detach().numpy())


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_half_answers_bit_for_bit_as_the_module_under_live_autocast(
    precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    module = live(write_folder(tmp_path / "net", LOOP))
    x = fresh()
    with torch.inference_mode(), torch.autocast("cpu", dtype=dtype):
        expected = module.module(torch.from_numpy(x.copy()))[0]
    assert expected.dtype == dtype
    answer = ask(LiveEngine(module, precision, CPU), x)
    assert answer.dtype == np.float32
    np.testing.assert_array_equal(answer, expected.float().numpy())
    assert np.abs(answer - ask(LiveEngine(module, "fp32", CPU), x)).max() > 0


@pytest.mark.gpu
def test_on_cuda_a_half_is_cudas_autocast_with_islands_on_the_same_device(tmp_path: Path) -> None:
    cuda = torch.device("cuda:0")
    module, x = live(write_folder(tmp_path / "net", LOUD)), fresh() * 3
    engine = LiveEngine(module, "fp16", cuda)
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        expected = module.module(torch.from_numpy(x.copy()).to(cuda))[0]
    np.testing.assert_array_equal(ask(engine, x), expected.float().cpu().numpy())
    engine.close()
    original = ask(LiveEngine(module, "fp32", cuda), x)
    cured = ask(LiveEngine(module, "fp16", cuda, ["loud"]), x)
    assert np.abs(cured - original).max() <= 4 * 2**-11 * np.abs(original).max()


def test_the_region_is_entered_in_the_thread_that_runs(tmp_path: Path) -> None:
    engine, x, answers = LiveEngine(live(write_folder(tmp_path / "net", LOOP)), "fp16", CPU), fresh(), []
    thread = threading.Thread(target=lambda: answers.append(ask(engine, x)))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(answers[0], ask(engine, x))
    assert not torch.is_autocast_enabled("cpu")


def test_answers_are_in_fresh_memory_also_where_a_module_keeps_its_own(tmp_path: Path) -> None:
    keeping = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.answer = torch.zeros(2, 3)

    def forward(self, x):
        return self.answer.copy_(x[:, :3])

def build():
    return Net()
"""
    engine = LiveEngine(live(write_folder(tmp_path / "net", keeping)), "fp32", CPU)
    one, other = fresh(2), fresh(2)
    first = ask(engine, one)
    ask(engine, other)
    np.testing.assert_array_equal(first, one[:, :3])


def test_an_answer_of_another_datatype_than_promised_is_refused_by_name(tmp_path: Path) -> None:
    double = LOOP.replace("return self.last(hidden)", "return self.last(hidden).double()")
    engine = LiveEngine(live(write_folder(tmp_path / "net", double)), "fp16", CPU)
    with pytest.raises(EngineFailed, match=r"output 'y'.*model\.toml says FP32, the model gives float64"):
        ask(engine, fresh())


@pytest.mark.parametrize("code", ["raise ValueError('no rows today')", "raise SystemExit(3)"])
def test_what_forward_raises_is_told_with_its_line(code: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", LOOP.replace("return self.last(hidden)", code))
    with pytest.raises(EngineFailed, match=r"\(model\.py, line 14, in forward\)") as caught:
        ask(LiveEngine(live(folder), "fp16", CPU), fresh())
    assert ("no rows today" if "ValueError" in code else "SystemExit") in str(caught.value)
    assert str(tmp_path) not in str(caught.value)  # callers are told no path of the server's


# Islands.


class Nested(nn.Module):
    """A module that notes the dtypes in which its arguments come."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, pair: tuple[Tensor, list[Tensor]], *, more: dict[str, Tensor]) -> Tensor:
        tensors = [pair[0], *pair[1], *more.values()]
        self.seen = [tensor.dtype for tensor in tensors]
        return self.linear(tensors[0])


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Nested()

    def forward(self, x: Tensor) -> Tensor:
        half = x.half()
        return self.inner((half, [half.bfloat16()]), more={"double": x.double(), "count": x.long()})


def test_disabling_autocast_alone_leaves_half_inputs_half() -> None:
    holder = Holder()
    with (
        torch.autocast("cpu", dtype=torch.float16),
        torch.autocast("cpu", enabled=False),
        pytest.raises(RuntimeError, match="same dtype"),
    ):
        holder(torch.randn(2, 4))
    assert holder.inner.seen[0] == torch.float16


def test_an_island_really_upcasts_every_half_tensor_among_its_arguments_and_nothing_else() -> None:
    holder = Holder()
    sink = raise_islands(holder, ["inner"], "cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        answer = holder(torch.randn(2, 4))
    assert holder.inner.seen == [torch.float32, torch.float32, torch.float64, torch.int64]
    assert answer.dtype == torch.float32
    sink()
    with torch.autocast("cpu", dtype=torch.float16):
        assert holder(torch.randn(2, 4)).dtype == torch.float16
    assert holder.inner.seen[0] == torch.float16 and "forward" not in vars(holder.inner)


LOUD = """
import torch
from torch import nn

class Loud(nn.Module):
    def forward(self, hidden):
        return (hidden * 300).pow(2).mean(-1, keepdim=True).sqrt() / 300

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.loud, self.last = nn.Linear(4, 8), Loud(), nn.Linear(1, 3)

    def forward(self, x):
        return self.last(self.loud(self.first(x)))

def build():
    torch.manual_seed(3)
    return Net()
"""


def test_an_overflow_is_cured_by_an_island_and_comes_back_when_the_engine_is_closed(tmp_path: Path) -> None:
    module, x = live(write_folder(tmp_path / "net", LOUD)), fresh() * 3
    assert not np.isfinite(ask(LiveEngine(module, "fp16", CPU), x)).all()
    cured = LiveEngine(module, "fp16", CPU, ["loud"])
    half = ask(cured, x)
    cured.close()
    original = ask(LiveEngine(module, "fp32", CPU), x)
    assert np.abs(half - original).max() <= 4 * 2**-11 * np.abs(original).max()
    assert not np.isfinite(ask(LiveEngine(module, "fp16", CPU), x)).all()


# Custom autograd functions: the true semantics of torch.amp.custom_fwd and custom_bwd.


def seen_by(device_type: str = "cpu", **how: Any) -> tuple[type[torch.autograd.Function], SimpleNamespace]:
    """A function that notes dtype and autocast state in forward and backward."""
    seen = SimpleNamespace()

    class Noting(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device_type, **how)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.forward = (x.dtype, torch.is_autocast_enabled("cpu"))
            return x * 2

        @staticmethod
        @custom_bwd(device_type=device_type)
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            seen.backward = torch.is_autocast_enabled("cpu")
            return grads[0] * 2

    return Noting, seen


@pytest.mark.parametrize(
    ("how", "forward", "backward"),
    [
        ({}, (torch.float16, True), True),
        ({"cast_inputs": torch.float32}, (torch.float32, False), False),
    ],
)
def test_custom_fwd_with_cast_inputs_is_an_island_and_custom_bwd_enters_what_forward_had(
    how: dict[str, Any], forward: tuple[torch.dtype, bool], backward: bool
) -> None:
    function, seen = seen_by(**how)
    x = torch.randn(3, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        answer: Any = function.apply(x)
    answer.float().sum().backward()  # outside of the region
    assert seen.forward == forward and seen.backward is backward


def test_custom_fwd_does_nothing_outside_a_region_or_in_one_of_another_device() -> None:
    function, seen = seen_by(cast_inputs=torch.float32)
    function.apply(torch.randn(3, dtype=torch.float16))
    assert seen.forward == (torch.float16, False)
    function, seen = seen_by("cuda", cast_inputs=torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        function.apply(torch.randn(3, dtype=torch.float16))
    assert seen.forward == (torch.float16, True)


CUSTOM = """
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd

class Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        return (x * 300).pow(2).sqrt() / 300

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        raise NotImplementedError

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(Square.apply(self.first(x)))

def build():
    torch.manual_seed(3)
    return Net()
"""


def test_a_custom_function_with_cast_inputs_keeps_its_range_in_the_live_form(tmp_path: Path) -> None:
    x = fresh() * 3
    module = live(write_folder(tmp_path / "net", CUSTOM))
    original, half = (ask(LiveEngine(module, precision, CPU), x) for precision in ("fp32", "fp16"))
    assert 0 < np.abs(half - original).max() <= 4 * 2**-11 * np.abs(original).max()
    without = CUSTOM.replace(", cast_inputs=torch.float32", "")
    bare = live(write_folder(tmp_path / "bare", without))
    assert not np.isfinite(ask(LiveEngine(bare, "fp16", CPU), x)).all()


# Imports.


def test_live_models_with_equal_file_names_do_not_mix_not_even_in_late_imports(tmp_path: Path) -> None:
    engines = {}
    for number in (1, 2):
        files = {"parts/__init__.py": f"NUMBER = {number}\n", "parts/more.py": f"NUMBER = {number * 100}\n"}
        folder = write_folder(tmp_path / f"net{number}", saying("parts"), files=files)
        engines[number] = LiveEngine(live(folder), "fp32", CPU)
    for number, engine in engines.items():
        np.testing.assert_array_equal(ask(engine, fresh(2)), np.full((2, 3), 102.0 * number, np.float32))
    assert "parts" not in sys.modules and "model" not in sys.modules


def test_nothing_of_python_torch_or_ours_is_shadowed_and_the_path_is_as_it_was(tmp_path: Path) -> None:
    mine = "import sys\nsys.path.insert(0, '/nowhere')\nimport json, errors, torch\n" + LOOP
    files = {"json.py": "raise 1", "errors.py": "WHOSE = 'the folder'\n", "torch.py": "raise 1"}
    path = sys.path[:]
    module = live(write_folder(tmp_path / "net", mine, files=files))
    assert sys.path == path
    its = sys.modules[type(module.module).__module__]
    assert its.json is json and its.torch is torch and its.errors.WHOSE == "the folder"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("errors")
    assert not (tmp_path / "net" / "__pycache__").exists()


def test_import_roots_packages_and_relative_imports_are_found_as_on_a_path(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    (root / "layers" / "deep").mkdir(parents=True)
    (root / "safetensors").mkdir()  # a mere folder does not stand before an installed package
    (root / "layers" / "__init__.py").write_text("from .deep.block import Block\n")
    (root / "layers" / "deep" / "block.py").write_text(
        "from safetensors.torch import save_file\nfrom torch import nn\nfrom .. import names\nfrom . import size\n"
        "class Block(nn.Linear):\n    def __init__(self):\n        super().__init__(4, size.SIZE)\n"
    )
    (root / "layers" / "deep" / "size.py").write_text("SIZE = 3\n")
    (root / "layers" / "names.py").write_text("from layers.deep.size import SIZE\n")
    code = "import layers.deep.block as block\nfrom layers import Block\n\ndef build():\n    return block.Block()\n"
    module = live(write_folder(root / "net", code), (root,))
    assert ask(LiveEngine(module, "fp32", CPU), fresh(2)).shape == (2, 3)
    imported = {Path(file).name for file in module.source.text()}
    assert imported == {"model.py", "__init__.py", "block.py", "size.py", "names.py"}


def test_a_module_is_built_from_the_text_that_is_there_now_also_in_an_import_root(tmp_path: Path) -> None:
    beside = tmp_path / "beside.py"
    folder = write_folder(tmp_path / "net", "import beside\n\ndef build():\n    return beside.Made()\n")
    for width in (3, 5):
        beside.write_text(
            f"from torch import nn\n\nclass Made(nn.Linear):\n"
            f"    def __init__(self):\n        super().__init__(4, {width})\n"
        )
        built: Any = LiveSource(folder, "model.py:build", (tmp_path,)).build()
        assert built.out_features == width


def test_what_a_models_code_sets_for_the_process_is_set_back(tmp_path: Path) -> None:
    sets = LOOP.replace(
        "    torch.manual_seed(3)\n",
        "    torch.set_default_dtype(torch.float64)\n    torch.backends.cuda.matmul.allow_tf32 = True\n"
        "    torch.manual_seed(3)\n",
    )
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    LiveSource(write_folder(tmp_path / "net", sets), "model.py:build").build()
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    assert torch.get_default_dtype() == torch.float32 and not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("def build():\n    return 3\n", BadFolder, "must give a torch.nn.Module, it gave int"),
        ("def make():\n    return 3\n", BadFolder, "has no function 'build'"),
        ("import not_there_at_all\n", CaptureFailed, "not_there_at_all"),
        ("def build():\n    raise SystemExit(4)\n", CaptureFailed, "in build"),
        ("def build():\n    open('vocabulary.txt')\n", CaptureFailed, "open files beside __file__"),
    ],
)
def test_code_that_does_not_build_is_told_with_its_reason(
    code: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        live(write_folder(tmp_path / "net", code))


# The folder that was proven is the folder that runs.


def proven(folder: Path, roots: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Path, ModelSpec]:
    """``live.json`` and weights of a folder, as a version holds them."""
    module = live(folder, roots)
    weights = folder.parent / f"{folder.name}.safetensors"
    save_file(module.module.state_dict(), weights)
    return live_json(module.source, module.source.text(), [], ""), weights, module.spec


@pytest.mark.parametrize("change", ["changed", "gone", "new", "changed beside it"])
def test_a_folder_whose_text_is_not_what_was_proven_is_refused_by_the_files_name(
    change: str, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    beside = tmp_path / "shared" / "beside.py"
    beside.write_text("SIZE = 8\n")
    code = LOOP.replace("import torch\n", "import torch\nimport beside\n", 1)
    folder = write_folder(tmp_path / "net", code, files={"vocabulary.json": "[1]"})
    wanted, weights, spec = proven(folder, (tmp_path / "shared",))
    live_module(wanted, weights, spec)
    (folder / "notes.md").write_text("nobody runs these")
    (folder / "model.toml").write_text("# nor this")
    live_module(wanted, weights, spec)
    file = {"new": folder / "torchless.py", "gone": folder / "vocabulary.json"}.get(
        change, folder / "model.py"
    )
    file = beside if change == "changed beside it" else file
    if change == "gone":
        file.unlink()
    else:
        file.write_text("SIZE = 9\n")
    with pytest.raises(EngineFailed, match=rf"{file} (has changed|is gone|is new) since the live form"):
        live_module(wanted, weights, spec)


def test_a_file_that_comes_to_stand_before_a_proven_one_is_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for root in (one, other):
        root.mkdir()
    (other / "beside.py").write_text("SIZE = 8\n")
    folder = write_folder(
        tmp_path / "net", LOOP.replace("import torch\n", "import torch\nimport beside\n", 1)
    )
    wanted, weights, spec = proven(folder, (one, other))
    (one / "beside.py").write_text("SIZE = 9\n")
    (other / "beside.py").touch()
    live_source._known.clear()  # as in another process
    with pytest.raises(EngineFailed, match=r"one/beside\.py is imported, which it was not"):
        live_module(wanted, weights, spec)


def test_the_stored_weights_are_the_ones_that_run_and_must_fit(tmp_path: Path) -> None:
    wanted, weights, spec = proven(write_folder(tmp_path / "net", LOOP))
    module = live_module(wanted, weights, spec)
    state = {name: tensor + 1 for name, tensor in module.module.state_dict().items()}
    save_file(state, weights)
    again = live_module(wanted, weights, spec)
    torch.testing.assert_close(again.module.state_dict()["first.bias"], state["first.bias"], rtol=0, atol=0)
    save_file({"first.bias": torch.zeros(8)}, weights)
    with pytest.raises(DamagedFile, match="does not fit the module"):
        live_module(wanted, weights, spec)


@pytest.mark.slow
def test_a_transformers_folder_is_built_from_local_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    folder = write_folder(
        tmp_path / "bert",
        inputs=[tensor("input_ids", "INT64", [-1, -1])],
        outputs=[tensor("last_hidden_state", "FP32", [-1, -1, 16])],
    )
    spec = read_folder(folder).spec
    (folder / "model.py").unlink()
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    source = LiveSource(folder, "hf:.")
    engine = LiveEngine(LiveModule(source.build(), source, spec), "fp32", CPU)
    ids = np.random.default_rng().integers(0, 32, (2, 7))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).last_hidden_state
    np.testing.assert_allclose(engine.run([[ids]])[0], expected.numpy(), rtol=1e-4, atol=1e-5)
