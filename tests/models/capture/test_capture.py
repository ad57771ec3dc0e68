"""Capture: what comes out is the module; what the operator's code may do wrong is told and contained."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.capture.capture import Captured, capture
from halfeven.models.capture.child import Flat, Refused
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import BadFolder, CaptureFailed, HalfevenError, OutOfMemory, OutOfTime
from halfeven.models.folder.package import read_folder
from halfeven.models.order.one_order import MEMORY_SETTING, SECONDS_SETTING, OrderBounds, one_order
from halfeven.models.spec.spec import Dim
from torch import nn

from tests.model_folders import LINEAR, samples_of, tensor, write_folder
from tests.models.archive.crafting import Touches

CPU = torch.device("cpu")
SEQUENCE = {
    "inputs": [tensor("x", "FP32", [-1, -1, 4])],
    "outputs": [tensor("y", "FP32", [-1, -1, 3])],
}


def net(body: str, init: str = "", arguments: str = "x", top: str = "") -> str:
    """A model.py: a Linear(4, 3) as ``self.linear``, ``body`` as its forward."""
    return f"""
import os, pathlib, subprocess, sys, torch
from torch import nn
{top}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(4, 3)
        {init}

    def forward(self, {arguments}):
        {body}

def build():
    return Net()
"""


SLEEPER = "pathlib.Path('pid').write_text(str(subprocess.Popen(['sleep', '600']).pid))"
POSITIONS = net(
    "return self.linear(x) + self.positions[: x.shape[1]]",
    "self.positions = nn.Parameter(torch.randn(16, 3))",
)
SIBLINGS = {
    "errors.py": "SCALE = 2.0\n",
    "spec.py": "from errors import SCALE\n",
    "store.py": "SHIFT = 0.5\n",
    "queue.py": "raise RuntimeError('torch took mine for the one of Python')\n",
    "failures.py": "MINE = True\n",
    "models/net.py": "def change(x, scale, shift):\n    return x * scale + shift\n",
    "width.txt": "3",
}
WITH_SIBLINGS = net(
    "return change(self.linear(x), SCALE, SHIFT)",
    top="""
from errors import SCALE
from spec import SCALE as same
from store import SHIFT
from models.net import change
assert pathlib.Path(__file__).name == "model.py" and pathlib.Path(__file__).is_file()
assert pathlib.Path.cwd() == pathlib.Path(__file__).parent
assert int(open("width.txt").read()) == 3
assert __name__ == "model" and sys.modules["model"].__file__ == __file__
import failures, models
assert failures.MINE and pathlib.Path(models.__path__[0]).parent == pathlib.Path.cwd()
assert not any(name.startswith(("halfeven.exporters", "halfeven.serve")) for name in sys.modules)
""",
)

REPOSITORY = {"repository/models/net.py": "from torch import nn\ndef make():\n    return nn.Linear(4, 3)\n"}
MISFIT = {"linear.weight": torch.zeros(3, 4), "odd": torch.zeros(1)}
STATE = {"linear.weight": torch.randn(3, 4), "linear.bias": torch.randn(3)}
HALF_STATE = {name: weight.half() for name, weight in STATE.items()}

# name → keyword arguments of write_folder, with "code", "shapes" (of one sample) and "limits"
CASES: dict[str, dict[str, Any]] = {
    "plain": {"code": LINEAR.replace("def build():", "def build():\n    print('loud ' * 10**6, flush=True)")},
    "by-name": {
        "code": net(
            "return {'second': x + z, 'unused': x, 'first': self.linear(x) - z[:, :3]}", arguments="z, x"
        ),
        "inputs": [tensor("x", "FP32", [-1, 4]), tensor("z", "FP32", [-1, 4])],
        "outputs": [tensor("first", "FP32", [-1, 3]), tensor("second", "FP32", [-1, 4])],
        "shapes": {"x": (4,), "z": (4,)},
    },
    "in-order": {
        "code": net("return self.linear(x[0]), x[0] - x[1]", arguments="*x"),
        "inputs": [tensor("a", "FP32", [-1, 4]), tensor("x", "FP32", [-1, 4])],
        "outputs": [tensor("first", "FP32", [-1, 3]), tensor("second", "FP32", [-1, 4])],
        "shapes": {"a": (4,), "x": (4,)},
        "weights": STATE,
    },
    "siblings": {"code": WITH_SIBLINGS, "files": SIBLINGS},
    **{
        name: {"code": "from models.net import make as build\n", "path": ["repository"], "files": REPOSITORY | door}
        for name, door in (("no-door", {}), ("own-door", {"repository/models/__init__.py": ""}))
    },
    "raises": {"code": net("raise ValueError('of mine')")},
    "raises-deep": {"code": net("return self.linear(x.reshape(-1, 5))  # does not fit")},
    "raises-at-once": {"code": f"import pathlib, subprocess\n{SLEEPER}\n1 / 0\n"},
    "hangs": {
        "code": net("return x", top=f"print('so far')\nsys.stdout.flush()\n{SLEEPER}\nimport time; time.sleep(600)"),
        "bounds": OrderBounds(seconds=12.0),
    },
    "eats": {
        "code": net("return self.linear(x)", "self.all = [torch.ones(2**26) for _ in range(10**4)]"),
        "bounds": OrderBounds(memory_bytes=2 * 2**30),
    },
    "exits": {"code": "import sys\nsys.exit(3)\n"},
    "exits-at-once": {"code": "import os\nprint('my last words', flush=True)\nos._exit(0)\n"},
    "no-function": {"code": "def make(): ...\n"},
    "misfit": {"code": net("return self.linear(x)"), "weights": MISFIT},
    "half-pth": {"code": net("return self.linear(x)"), "weights": "state.pth", "state": HALF_STATE},
    "pickle": {"code": net("return self.linear(x)"), "weights": "state.pth", "state": Touches(Path("canary"))},
    "masked": {
        "code": net(
            "m = self.t.generate_square_subsequent_mask(x.shape[1]); return self.linear(self.t(x, x, tgt_mask=m))",
            "self.t = nn.Transformer(4, 2, 1, 1, 8, batch_first=True)",
        ),
        **SEQUENCE,
        "shapes": {"x": (5, 4)},
    },
    "mean": {"code": net("return self.linear(x - x.mean(0))")},
    "pairs": {
        "code": net("return self.linear(x) @ self.linear(x).T"),
        "outputs": [tensor("y", "FP32", [-1, -1])],
    },
    "baked": {"code": net("return self.linear(x) + torch.zeros(len(x.tolist()), 1)")},
    "branches": {"code": net("return self.linear(x) if x.sum() > 0 else self.linear(-x)")},
    "free": {"code": POSITIONS, **SEQUENCE, "shapes": {"x": (5, 4)}},
    "bounded": {
        "code": POSITIONS,
        **SEQUENCE,
        "inputs": [tensor("x", "FP32", [-1, "2..8", 4])],
        "shapes": {"x": (5, 4)},
    },
    "too-free": {
        "code": POSITIONS,
        **SEQUENCE,
        "inputs": [tensor("x", "FP32", [-1, "1..512", 4])],
        "shapes": {"x": (5, 4)},
    },
    "equal": {
        "code": net("return self.linear(x) + z.sum(-1, keepdim=True)", arguments="x, z"),
        "inputs": [tensor("x", "FP32", [-1, "length", 4]), tensor("z", "FP32", [-1, -1, 4])],
        "outputs": SEQUENCE["outputs"],
        "shapes": {"x": (5, 4), "z": (5, 4)},
    },
    "other-type": {"code": net("return self.linear(x).double()")},
    "other-size": {
        "code": net("return self.linear(x)"),
        "inputs": SEQUENCE["inputs"],
        "outputs": [tensor("y", "FP32", [-1, 5, 3])],
        "shapes": {"x": (5, 4)},
    },
    "unbatched": {
        "code": net("return self.linear(x), x.nonzero()"),
        "max_batch_size": 0,
        "inputs": [tensor("x", "FP32", [4])],
        "outputs": [tensor("y", "FP32", [3]), tensor("at", "INT64", [-1, 1])],
    },
    "not-rows": {"code": net("return self.linear(x).sum(0)"), "outputs": [tensor("y", "FP32", [-1])]},
}  # fmt: skip


class Captures:
    """Every case is captured once, when a test first asks for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ended: dict[str, Captured | HalfevenError] = {}

    def _end(self, name: str) -> Captured | HalfevenError:
        if name not in self._ended:
            try:
                self._ended[name] = self._run(name)
            except HalfevenError as error:
                self._ended[name] = error
        return self._ended[name]

    def _run(self, name: str) -> Captured:
        case = dict(CASES[name])
        code, shapes, bounds = (
            case.pop("code"),
            case.pop("shapes", {"x": (4,)}),
            case.pop("bounds", OrderBounds()),
        )
        (self.root / name).mkdir()
        if "state" in case:
            torch.save(case.pop("state"), self.root / name / "state.pth")
        folder = read_folder(write_folder(self.root / name, code, **case))
        with one_order(bounds):
            return capture(folder, samples_of(shapes))

    def captured(self, name: str) -> Captured:
        ended = self._end(name)
        assert isinstance(ended, Captured), ended
        return ended

    def failed(self, name: str, error: type[HalfevenError] = CaptureFailed) -> str:
        ended = self._end(name)
        assert isinstance(ended, error), ended
        return str(ended)

    def module(self, name: str) -> nn.Module:
        """The case's module, built here, with its weights if they are safetensors."""
        namespace: dict[str, Any] = {"__name__": "model"}
        exec((self.root / name / "model.py").read_text(), namespace)
        module: nn.Module = namespace["build"]()
        return module.eval()


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captures]:
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # as with most users
        yield Captures(tmp_path_factory.mktemp("captures"))


def answers(captured: Captured, *arrays: np.ndarray) -> list[np.ndarray]:
    return TorchEngine(captured.program, "fp32", CPU).run([[array] for array in arrays])


def check_against(module: nn.Module, captured: Captured, *shapes: Sequence[int]) -> None:
    tensors = [torch.randn(*shape) for shape in shapes]
    with torch.inference_mode():
        expected = module(*tensors)
    came = answers(captured, *[t.numpy() for t in tensors])
    np.testing.assert_allclose(came[0], expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_the_program_is_the_module_at_every_batch_size(rows: int, captures: Captures) -> None:
    captured = captures.captured("plain")
    assert captured.spec.max_batch_size == 64 and captured.notes == ()
    check_against(captures.module("plain"), captured, (rows, 4))


@pytest.mark.slow
def test_no_byte_code_is_written_beside_the_operators_code(captures: Captures) -> None:
    """The folder may be the source of a version, and a version never changes."""
    captures.captured("plain")
    assert list((captures.root / "plain").rglob("*.pyc")) == []


@pytest.mark.slow
def test_inputs_go_by_name_and_outputs_of_a_dictionary_come_in_the_specs_order(captures: Captures) -> None:
    x, z = samples_of({"x": (4,), "z": (4,)}, count=5).values()
    first, second = answers(captures.captured("by-name"), x, z)
    linear = captures.module("by-name").linear
    assert isinstance(linear, nn.Linear)
    np.testing.assert_allclose(second, x + z, rtol=1e-6)
    with torch.inference_mode():
        np.testing.assert_allclose(
            first, linear(torch.from_numpy(x)).numpy() - z[:, :3], rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
def test_inputs_go_in_order_where_forward_has_no_such_names(captures: Captures) -> None:
    a, x = samples_of({"a": (4,), "x": (4,)}, count=3).values()
    np.testing.assert_allclose(answers(captures.captured("in-order"), a, x)[1], a - x, rtol=1e-6)


@pytest.mark.slow
def test_a_folder_finds_its_own_files_whatever_they_are_called(captures: Captures) -> None:
    captured = captures.captured("siblings")
    x = samples_of({"x": (4,)}, count=2)["x"]
    plain = answers(captures.captured("unbatched"), x[0])[0]
    np.testing.assert_allclose(answers(captured, x)[0][0], plain * 2.0 + 0.5, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no-door", "own-door"])
def test_a_repository_keeps_its_own_models_package(name: str, captures: Captures) -> None:
    """The child sees the repository's ``models``, never ours. (Beside the wheel: tests/test_house.py.)"""
    assert captures.captured(name).program.state_dict.keys() == {"weight", "bias"}


@pytest.mark.slow
def test_code_that_raises_is_told_with_file_and_line(captures: Captures) -> None:
    message = captures.failed("raises")
    file = captures.root / "raises/model.py"
    line = file.read_text().splitlines().index("        raise ValueError('of mine')") + 1
    assert "ValueError: of mine" in message and f"{file}:{line}, in forward" in message


@pytest.mark.slow
def test_an_error_deep_inside_torch_still_shows_the_users_own_line(captures: Captures) -> None:
    message = captures.failed("raises-deep")
    assert "shape '[-1, 5]' is invalid" in message
    assert "# does not fit" in message and "model.py" in message
    assert len(message) < 2500


@pytest.mark.slow
def test_code_that_hangs_is_stopped_and_what_it_started_too(captures: Captures) -> None:
    message = captures.failed("hangs", OutOfTime)
    assert "the order has taken 12 s" in message and SECONDS_SETTING in message and "so far" in message
    assert not _alive(captures.root / "hangs/pid")


@pytest.mark.slow
def test_what_the_code_started_does_not_outlive_a_failure(captures: Captures) -> None:
    assert "ZeroDivisionError" in captures.failed("raises-at-once")
    assert not _alive(captures.root / "raises-at-once/pid")


@pytest.mark.slow
def test_code_that_eats_memory_is_told_the_limit(captures: Captures) -> None:
    message = captures.failed("eats", OutOfMemory)
    assert "more than 2,048 MiB of memory" in message and MEMORY_SETTING in message and "model.py" in message


@pytest.mark.slow
def test_a_transformer_of_torch_with_a_mask_of_its_own_is_captured(captures: Captures) -> None:
    captured = captures.captured("masked")
    check_against(captures.module("masked"), captured, (3, 7, 4))


@pytest.mark.slow
def test_code_that_ends_the_process_is_told_so(captures: Captures) -> None:
    assert "SystemExit: 3" in captures.failed("exits")
    message = captures.failed("exits-at-once")
    assert "ended its process (exit status 0)" in message and "my last words" in message


@pytest.mark.slow
def test_a_source_that_names_no_function_is_told(captures: Captures) -> None:
    assert "model.py has no function 'build'" in captures.failed("no-function")


def test_weights_that_do_not_fit_are_told_by_name(captures: Captures) -> None:
    message = captures.failed("misfit")
    assert "weights.safetensors does not fit the module" in message
    assert "linear.bias" in message and "odd" in message


@pytest.mark.slow
def test_the_programs_weights_are_those_of_the_file(captures: Captures) -> None:
    state = captures.captured("in-order").program.state_dict
    assert {name: t.tolist() for name, t in state.items()} == {name: t.tolist() for name, t in STATE.items()}


@pytest.mark.slow
def test_half_weights_are_widened_and_that_is_said(captures: Captures) -> None:
    captured = captures.captured("half-pth")
    for name, expected in HALF_STATE.items():
        assert torch.equal(captured.program.state_dict[name], expected.float())
    assert captured.notes == ("2 half-precision tensors of state.pth were widened to FP32",)


def test_a_state_dict_with_code_in_it_is_refused_and_not_opened(captures: Captures) -> None:
    assert "code and is not opened" in captures.failed("pickle")
    assert not list(captures.root.rglob("canary"))


@pytest.mark.slow
def test_a_model_whose_rows_depend_on_each_other_gets_batches_of_one_and_a_note(captures: Captures) -> None:
    captured = captures.captured("mean")
    assert captured.spec.max_batch_size == 1
    assert len(captured.notes) == 1 and "max_batch_size was set to 1" in captured.notes[0]


@pytest.mark.slow
def test_a_model_that_pairs_every_row_with_every_row_is_refused_as_a_batched_one(captures: Captures) -> None:
    message = captures.failed("pairs")
    assert "'y' has shape [4, 4] for a batch of 4 and [1, 1] for one row" in message
    assert "set max_batch_size = 0" in message


@pytest.mark.slow
def test_a_batch_size_that_was_baked_in_is_refused_in_torchs_words(captures: Captures) -> None:
    assert "specialized it to be a constant (3)" in captures.failed("baked")
    message = captures.failed("branches")
    assert "Could not guard on data-dependent expression" in message and "if x.sum() > 0" in message


@pytest.mark.slow
def test_a_free_dimension_gets_the_range_that_the_program_takes(captures: Captures) -> None:
    captured = captures.captured("free")
    assert captured.spec.inputs[0].shape[1] == Dim(1, 16)
    for length in (1, 2, 16):
        check_against(captures.module("free"), captured, (2, length, 4))


@pytest.mark.slow
def test_bounds_in_model_toml_are_kept_where_the_program_takes_them(captures: Captures) -> None:
    assert captures.captured("bounded").spec.inputs[0].shape[1] == Dim(2, 8)
    message = captures.failed("too-free", BadFolder)
    assert "input 'x'" in message and "1..512" in message and "1..16" in message


@pytest.mark.slow
def test_dimensions_that_must_be_equal_get_one_name(captures: Captures) -> None:
    spec = captures.captured("equal").spec
    assert [t.shape[1] for t in spec.inputs] == [Dim(name="length"), Dim(name="length")]


@pytest.mark.slow
def test_outputs_that_are_not_what_model_toml_says_are_told(captures: Captures) -> None:
    message = captures.failed("other-type", BadFolder)
    assert "output 'y'" in message and "FP32" in message and "FP64" in message
    assert "[-1,5,3]" in captures.failed("other-size", BadFolder)
    assert "its first axis must be the batch" in captures.failed("not-rows")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((torch.zeros(1), None), "output 'z' must be a tensor, forward gave NoneType"),
        ([torch.zeros(1), 2.0], "output 'z' must be a tensor, forward gave float"),
        (torch.zeros(1), "forward gave 1 outputs, model.toml names 2: ['y', 'z']"),
        ({"y": torch.zeros(1), "x": torch.zeros(1)}, "outputs ['x', 'y'], but model.toml names ['z']"),
        (
            (torch.zeros(1), (torch.zeros(1),) * 2),
            "gave 3 outputs (each tensor inside of a tuple, list or dict",
        ),
        ({"y": torch.zeros(1), "z": (torch.zeros(1),)}, "outputs ['y', 'z.0'], but model.toml names ['z']"),
    ],
)
def test_what_forward_gives_must_be_the_tensors_that_model_toml_names(answer: Any, words: str) -> None:
    flat = Flat(nn.Identity(), {"inputs": [{"name": "input"}], "outputs": ["y", "z"]})
    with pytest.raises(Refused) as caught:
        flat.in_order(answer)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("names", "answer"),
    [
        (["out", "h", "c"], lambda a, b, c: (a, (b, c))),
        (["out", "h", "c"], lambda a, b, c: [a, {"state": [b, c]}]),
        (["logits", "state.0", "state.1"], lambda a, b, c: {"state": (b, c), "logits": a, "loss": None}),
        (["state.1", "logits"], lambda a, b, c: {"logits": b, "state": [c, a]}),
        (["heads.boxes.x", "heads.score"], lambda a, b, c: {"heads": {"score": b, "boxes": {"x": a}}}),
    ],
)
def test_nested_outputs_are_taken_apart(names: list[str], answer: Callable[..., Any]) -> None:
    flat = Flat(nn.Identity(), {"inputs": [{"name": "input"}], "outputs": names})
    tensors = torch.ones(1), torch.ones(2), torch.ones(3)
    assert flat.in_order(answer(*tensors)) == tensors[: len(names)]


@pytest.mark.slow
def test_a_model_without_a_batch_takes_exact_shapes_and_may_give_free_ones(captures: Captures) -> None:
    captured = captures.captured("unbatched")
    assert not captured.spec.batched
    at = answers(captured, np.array([0, 1, 0, 2], np.float32))[1]
    assert at.tolist() == [[1], [3]]


def test_a_capture_leaves_nothing_but_the_folder_as_it_was(captures: Captures) -> None:
    captures.captured("plain")
    left = {path.name for path in (captures.root / "plain").iterdir()} - {"__pycache__"}
    assert left == {"model.py", "model.toml"}


def _alive(pid_file: Path) -> bool:
    """True if the process still runs 10 s later; one that is still to be waited for (a zombie) does not.

    A process that was killed ends only when the machine next gives it a core.
    """
    for _ in range(1000):
        try:
            stat = Path(f"/proc/{pid_file.read_text()}/stat").read_text()
        except FileNotFoundError:
            return False
        if stat.rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.01)
    return True
