"""Sabotaged engines and planted faults in programs are named within one node; halves and other honest pairs agree."""

import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.differing import elsewhere
from halfeven.exporters.differing.diff import differences
from halfeven.exporters.differing.onnx_side import OnnxSide
from halfeven.exporters.differing.program_side import ProgramSide
from halfeven.exporters.question import Answers
from halfeven.exporters.torch.autocast.bit_equality import half_by_rules
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.exporters.torch.program_graph import exact_answers
from halfeven.models.capture.capture import normalise
from halfeven.models.engines.arrays import to_torch
from halfeven.models.errors import BadSamples, BadSetting
from halfeven.models.program import runnable, with_graph
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.conversions import samples_of
from tests.corpus import CORPUS, built, captured, fresh
from tests.exporters.sabotaged_engines import AROUND, IN_PARTS, engine_of, model_of, module_of
from tests.programs import described, exported

pytestmark = pytest.mark.slow  # captures and conversions

# Node of A at which each fault is. Faults around a model are those of its outputs, or of an input.
BIRTH = {
    "wrong epsilon": "batch_norm", "transposed weight": "linear", "flipped kernels": "conv2d",
    "stale weights": "linear", "missing bias": "linear", "quantised weights": "linear",
    "sums rounded to half": "linear", "dropout left on": "scaled_dot_product_attention",
    "statistics of the batch": "batch_norm", "dropped residual": "conv2d_1", "fused overflow": "mul",
    "computed in bf16": "linear", "another activation": "gelu", "gelu by tanh": "gelu",
    "softmax over another axis": "softmax", "scores 1 % off": "softmax",
    "reversed sequence": "tensors_0", "mask one off": "tensors_1", "ids through FP16": "tensors_0",
}  # fmt: skip
OTHER_MODEL = {"sums rounded to half": "gelu of negatives"}  # each partial sum is a node there: few features
TYPES = {"fused overflow": "fp16"}  # all others say that they compute in FP32


def original_side(name: str) -> ProgramSide:
    model, _ = model_of(name)
    return ProgramSide(model.program, model.spec)


def as_it_is(name: str, module: nn.Module) -> ProgramSide:
    """The module captured as it is, in training where it is in training."""
    model, samples = model_of(name)
    inputs = {key: torch.from_numpy(array[:4].copy()) for key, array in samples.arrays.items()}
    shapes = (tuple({0: Dim.AUTO} for _ in inputs),)

    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module
            self.training = module.training

        def forward(self, *tensors: Tensor) -> Any:
            return self.net(**dict(zip(inputs, tensors, strict=True)))

    with torch.no_grad():
        program = torch.export.export(ByName(), tuple(inputs.values()), dynamic_shapes=shapes)
    return ProgramSide(normalise(program), model.spec)


def rows_of(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    np.savez(folder / "x.npz", **arrays)  # type: ignore[arg-type]
    return folder / "x.npz"


def is_within_one_node(a: ProgramSide, named: str, born: str) -> bool:
    inputs = {node.name: node.inputs for node in a.nodes}
    return named == born or born in inputs[named] or named in inputs[born]


@pytest.mark.filterwarnings("ignore")  # torch warns of modules in training
@pytest.mark.parametrize("fault", IN_PARTS)
def test_the_faulty_part_of_an_engine_is_named(tmp_path: Path, fault: str) -> None:
    name, sabotage = IN_PARTS[fault]
    name = OTHER_MODEL.get(fault, name)
    module = module_of(name)
    sabotage(module)
    a, b = original_side(name), as_it_is(name, module)
    facts = differences(a, b, rows_of(tmp_path, model_of(name)[1].arrays), TYPES.get(fault, "fp32"))
    assert not facts["equal"] and is_within_one_node(a, facts["first"]["tensor"], BIRTH[fault]), facts


@pytest.mark.parametrize("fault", AROUND)
def test_the_faulty_input_or_output_of_an_engine_is_named(tmp_path: Path, fault: str) -> None:
    """The first wrong tensor is the input of an engine whose inner tensors can be seen, else the output."""
    name, sabotage = AROUND[fault]
    a = original_side(name)
    engine = sabotage(a.tensors if fault in BIRTH else engine_of(name, module_of(name)))
    facts = differences(a, engine, rows_of(tmp_path, model_of(name)[1].arrays))
    expected = [BIRTH[fault]] if fault in BIRTH else [*a.outputs.values()]
    assert not facts["equal"] and facts["first"]["tensor"] in expected, facts


@cache
def half_of(name: str) -> ExportedProgram:
    model = captured(name)
    return half_by_rules(model.program, model.spec, model.example, "cpu").program


def scaled(program: ExportedProgram, weight: str, factor: float) -> ExportedProgram:
    state = dict(program.state_dict)
    changed = (state[weight].detach() * factor).to(state[weight].dtype)
    is_parameter = isinstance(state[weight], nn.Parameter)
    state[weight] = nn.Parameter(changed, requires_grad=False) if is_parameter else changed
    return with_graph(program, program.graph_module, state)


# Model, weight, the node that reads it. 2 % in a half, half a tenth of a percent in an original.
PLANTED = [
    ("zoo bert", "blocks.0.attention.query.weight", "linear", "half"),
    ("zoo bert", "blocks.1.wide.weight", "linear_10", "half"),
    ("zoo mlp", "classify.weight", "linear_1", "half"),
    ("zoo vit", "blocks.1.self_attn.in_proj_weight", "linear_4", "half"),
    ("zoo recommender", "mix.2.weight", "linear_1", "half"),
    ("cosine head", "cone", "add", "half"),
    ("zoo bert", "norm.weight", "layer_norm", "original"),
    ("zoo bert", "blocks.0.narrow.weight", "linear_5", "original"),
    ("zoo vit", "places", "add", "original"),
    ("residual", "norm.running_var", "batch_norm", "original"),
    ("lstm", "loop.weight_hh_l1", "lstm", "original"),
    ("zoo mlp", "hidden.weight", "linear", "original"),
]


@pytest.mark.parametrize(("name", "weight", "node", "side"), PLANTED)
def test_a_planted_difference_is_named_also_behind_nodes_of_half(
    tmp_path: Path, name: str, weight: str, node: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = captured(name)
    a = ProgramSide(model.program, model.spec)
    program, factor = (half_of(name), 1.02) if side == "half" else (model.program, 1.0005)
    b = replace(a, program=scaled(program, weight, factor))
    facts = differences(a, b, rows_of(tmp_path, samples_of(name, 8, seed=5).arrays), out=tmp_path / "node")
    assert not facts["equal"] and is_within_one_node(a, facts["first"]["tensor"], node), facts
    monkeypatch.chdir(tmp_path / "node")
    with redirect_stdout(StringIO()) as shown:
        runpy.run_path("node.py", run_name="__main__")
    assert shown.getvalue().strip()


def captured_again(name: str) -> ProgramSide:
    spec, case = captured(name).spec, CORPUS[name]
    again = exported(built(name), fresh(name, 8, seed=0), case.free, case.max_batch_size)
    return ProgramSide(normalise(again), spec)


def decomposed(name: str) -> ProgramSide:
    model = captured(name)
    return ProgramSide(model.program.run_decompositions(), model.spec)


def file_of(name: str, folder: Path) -> OnnxSide:
    model = captured(name)
    write_onnx(model.program, model.spec, folder / "net.onnx", {})
    return OnnxSide(folder / "net.onnx")


def in_double(name: str) -> Answers:
    return exact_answers(runnable(captured(name).program), captured(name).spec)


HALVES = ("zoo bert", "zoo mlp", "zoo vit", "zoo recommender", "residual", "cosine head", "lstm")
Other = Callable[[str, Path], ProgramSide | OnnxSide | Answers]
HONEST: dict[str, tuple[str, Other]] = {
    **{
        f"half of {name}": (name, lambda name, _: ProgramSide(half_of(name), captured(name).spec))
        for name in HALVES
    },
    "captured again": ("zoo bert", lambda name, _: captured_again(name)),
    "in-place captured again": ("residual", lambda name, _: captured_again(name)),
    "decomposed": ("zoo mlp", lambda name, _: decomposed(name)),
    "attention decomposed": ("zoo vit", lambda name, _: decomposed(name)),
    "in ONNX Runtime": ("zoo bert", file_of),
    "indices in ONNX Runtime": ("zoo recommender", file_of),
    "in FP64": ("zoo vit", lambda name, _: in_double(name)),
}


@pytest.mark.parametrize(("name", "other"), HONEST.values(), ids=HONEST)
def test_an_honest_pair_has_no_difference(tmp_path: Path, name: str, other: Other) -> None:
    model = captured(name)
    rows = rows_of(tmp_path, samples_of(name, 8, seed=5).arrays)
    facts = differences(ProgramSide(model.program, model.spec), other(name, tmp_path), rows)
    assert facts["equal"] and facts["tensors"], facts


def test_a_program_that_is_not_batched_takes_a_scalar(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> tuple[Tensor]:
            return (x * by,)

    program = torch.export.export(Scaled(), (torch.ones(4), torch.tensor(2.0)))
    net = described(program, {"x": torch.ones(3, 4), "by": torch.ones(3)}, None, max_batch_size=0)
    side = ProgramSide(net.program, net.spec)
    rows = rows_of(tmp_path, {"x": np.ones((3, 4), np.float32), "by": np.ones(3, np.float32)})
    assert differences(side, side, rows)["equal"]


def test_another_python_runs_the_same_file(tmp_path: Path) -> None:
    """A program under another Python: tests/serve/cli/test_difference_commands.py."""
    rows, side = rows_of(tmp_path, samples_of("zoo mlp", 8, seed=5).arrays), file_of("zoo mlp", tmp_path)
    facts = differences(side, replace(side, python=Path(sys.executable)), rows)
    assert facts["equal"] and facts["tensors"] >= 3, facts
    with pytest.raises(BadSetting, match="no-python cannot be started"):
        differences(side, replace(side, python=tmp_path / "no-python"), rows)


def test_the_script_of_another_python_runs_where_zip_is_not_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Python 3.9, which evaluates no `str | Path` either."""
    monkeypatch.setattr(elsewhere, "zip", lambda *each: zip(*each, strict=False), raising=False)
    file, given = file_of("zoo mlp", tmp_path).path, tmp_path / "given.npz"
    elsewhere._write(given, samples_of("zoo mlp", 2, seed=5).arrays)
    assert elsewhere._of_file(str(file), elsewhere._read(given))
    assert all(isinstance(word, str) for word in elsewhere._write.__annotations__.values())


class Masked(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.masked_fill(x > 1, float("-inf")).nan_to_num(float("nan"), neginf=-2.0),)


class InBfloat16(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return ((x.bfloat16() * 3).float(),)


@pytest.mark.parametrize("module", [Masked(), InBfloat16()], ids=["infinity and NaN", "bfloat16"])
def test_a_reproduction_runs_and_gives_what_a_has(
    tmp_path: Path, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.linspace(-2, 2, 8)
    net = described(torch.export.export(module, (x,)), {"x": x[None]}, None, max_batch_size=0)
    a, rows = ProgramSide(net.program, net.spec), rows_of(tmp_path, {"x": x[None].numpy()})
    made = a.tensors({"x": x.numpy()})
    monkeypatch.chdir(tmp_path)
    for tensor, array in made.items():
        if tensor in a.inputs.values():
            continue
        facts = differences(
            a,
            lambda _, tensor=tensor, array=array: {tensor: ~array if array.dtype == bool else -array},
            rows,
            out=tmp_path / tensor,
        )
        assert facts["first"]["tensor"] == tensor
        monkeypatch.chdir(tmp_path / tensor)
        with redirect_stdout(StringIO()) as shown:
            runpy.run_path("node.py", run_name="__main__")
        assert shown.getvalue().strip() == str(to_torch(array))


def test_complex_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (torch.fft.ifft(torch.fft.fft(x)).abs(),)

    net = described(
        torch.export.export(Spectrum(), (torch.ones(64),)), {"x": torch.ones(2, 64)}, None, max_batch_size=0
    )
    a, random = ProgramSide(net.program, net.spec), np.random.default_rng()
    x = random.standard_normal((6, 64)).astype(np.float32) + np.linspace(0, 50, 64, dtype=np.float32)
    spectrum = next(name for name, array in a.tensors({"x": x[0]}).items() if array.dtype.kind == "c")

    def engine(change: Callable[[np.ndarray], np.ndarray]) -> Answers:
        """The spectrum changed, and all behind it computed from what came of it."""

        def answer(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            changed = change(a.tensors(inputs)[spectrum]).astype(np.complex64)
            return a.tensors(inputs, {spectrum: changed}) | {spectrum: changed}

        return answer

    def noisy(c: np.ndarray) -> np.ndarray:
        return c * (1 + 1e-7 * random.standard_normal(c.shape))

    rows, place = rows_of(tmp_path, {"x": x}), np.arange(64)
    assert differences(a, engine(noisy), rows)["equal"]
    for wrong in (
        lambda c: np.where((place > 5) & (place < 12), np.complex64(99j), c),
        lambda c: np.where(place == 40, -c, c),  # small beside the first
        lambda c: c.real,
        lambda c: np.where(place == 3, np.complex64(complex(1, np.nan)), c),
    ):
        assert differences(a, engine(wrong), rows)["first"]["tensor"] == spectrum
    with pytest.raises(BadSamples, match="nothing is compared"):
        differences(a, engine(noisy), rows_of(tmp_path, {"x": 0 * x}))
