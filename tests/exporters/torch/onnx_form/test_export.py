"""The ONNX form: the spec's names and symbols, nothing optimised away, the same answers at other sizes."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from halfeven.exporters.onnx.stored import half_storage
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.rewrite import rewrite
from halfeven.exporters.torch.onnx_form import export as onnx_form
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.exporters.torch.onnx_form.ops import written_out
from halfeven.models.engines.onnx_engine import OnnxEngine
from halfeven.models.errors import ExportFailed
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from halfeven.models.spec.spec import Dim
from torch import Tensor, nn
from torch.export import ExportedProgram

from tests.corpus.case import net
from tests.nets import NETS, captured_net
from tests.programs import Original, original

CPU = torch.device("cpu")
FLOAT, FLOAT16, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64


def half_of(model: Original, level: str = "O1") -> ExportedProgram:
    plan = make_plan(runnable(model.program), Precision(level))
    return rewrite(model.program, plan, model.spec, model.example).program


def written(model: Original, path: Path, program: ExportedProgram | None = None) -> onnx.ModelProto:
    write_onnx(program or model.program, model.spec, path, {"precision": "fp16"})
    return onnx.load(path)


def answers(path: Path, *tensors: Tensor) -> list[np.ndarray]:
    return OnnxEngine(path, "fp32", CPU).run([[tensor.numpy()] for tensor in tensors])


def made(forward: Callable[..., object]) -> nn.Module:
    return net(lambda self, x: forward(x))


class Attention(nn.Module):
    """Scaled dot-product attention with a bias made from a mask."""

    def __init__(self, bias: Callable[[Tensor], Tensor], scale: float | None = None) -> None:
        super().__init__()
        self.bias, self.scale = bias, scale

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        bias = self.bias(mask[:, None, None, :])
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias, scale=self.scale)


def dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 11])
@pytest.mark.parametrize("name", sorted(NETS.keys() - {"in place"}))
def test_the_original_answers_as_the_program_does_at_other_batch_sizes(
    name: str, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = _file(name, tmp_path_factory)
    tensors = list(NETS[name].inputs(rows).values())
    for expected, came in zip(captured_net(name).run(*tensors), answers(path, *tensors), strict=True):
        tolerance = 2e-3 if name == "island" else 1e-5  # the user's own rounding to half
        np.testing.assert_allclose(came, expected.numpy(), rtol=tolerance, atol=tolerance)


_FILES: dict[str, Path] = {}


def _file(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if name not in _FILES:
        _FILES[name] = tmp_path_factory.mktemp("onnx") / "original.onnx"
        written(captured_net(name), _FILES[name])
    return _FILES[name]


@pytest.mark.slow(seconds=6)
def test_names_order_datatypes_and_free_dimensions_are_the_specs(tmp_path: Path) -> None:
    free = {1: Dim(1, None, "length")}
    model = original(NETS["encoder"].build(), NETS["encoder"].inputs(8), free)
    graph = written(model, tmp_path / "half.onnx", half_of(model)).graph
    assert [value.name for value in graph.input] == ["tokens", "mask"]
    assert [dims(value) for value in graph.input] == [["batch", "length"]] * 2
    assert [value.type.tensor_type.elem_type for value in graph.input] == [INT64, INT64]
    assert [(value.name, dims(value)) for value in graph.output] == [("y0", ["batch", 16])]
    assert graph.output[0].type.tensor_type.elem_type == FLOAT
    tokens, mask = torch.randint(0, 32, (4, 9)), torch.ones(4, 9, dtype=torch.int64)
    expected = model.run(tokens, mask)[0].numpy()
    np.testing.assert_allclose(
        answers(tmp_path / "half.onnx", tokens, mask)[0], expected, rtol=2e-2, atol=2e-2
    )


def test_replacing_operations_shows_no_warning_of_torch() -> None:
    """A FutureWarning for each copy of a program, which `halfeven convert` then showed."""
    model = captured_net("residual")
    program = half_of(model)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        written_out(program)
    assert [str(one.message) for one in shown] == []


def test_free_dimensions_without_a_name_get_one(tmp_path: Path) -> None:
    model = original(made(lambda x: (x * 2, x.sum(1))), {"x": torch.randn(8, 5, 3)}, {1: Dim()})
    graph = written(model, tmp_path / "original.onnx").graph
    assert [dims(value) for value in graph.input] == [["batch", "x_1", 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level"), [("digits", "O1"), ("digits", "O3"), ("residual", "O2"), ("encoder", "O1")]
)
def test_the_half_is_half_where_the_program_is_and_answers_as_it_does(
    name: str, level: str, tmp_path: Path
) -> None:
    model = captured_net(name)
    program = half_of(model, level)
    graph = written(model, tmp_path / "half.onnx", program).graph
    stored = {tensor.data_type for tensor in graph.initializer if np.prod(tensor.dims) > 16}
    assert FLOAT16 in stored and (level != "O3" or FLOAT not in stored)
    tensors = list(NETS[name].inputs(5).values())
    with torch.inference_mode():
        expected = runnable(program)(*tensors)[0].numpy()
    scale = np.abs(expected).max()
    assert np.abs(answers(tmp_path / "half.onnx", *tensors)[0] - expected).max() <= 8 * 2.0**-11 * scale


def test_a_tiny_addend_and_a_factor_near_one_survive(tmp_path: Path) -> None:
    """torch.onnx's default optimiser deletes a tiny addend and a factor near one."""
    model = original(made(lambda x: (1.0 / (x + 1e-8), x * (1.0 + 1e-6))), {"x": torch.rand(8, 4)})
    written(model, tmp_path / "original.onnx")
    zeros, big = answers(tmp_path / "original.onnx", torch.zeros(2, 4))[0], torch.full((2, 4), 2.0**20)
    np.testing.assert_allclose(zeros, 1e8, rtol=1e-5)
    assert np.array_equal(answers(tmp_path / "original.onnx", big)[1], (big * (1.0 + 1e-6)).numpy())
    assert (big * (1.0 + 1e-6) != big).all(), "this test could not fail"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bias", "scale", "level"),
    [
        pytest.param(
            lambda mask: torch.where(mask == 0, -torch.inf, 0.0), None, "O0", marks=pytest.mark.slow
        ),
        (lambda mask: torch.where(mask == 0, -torch.inf, 0.0), 0.3, "O1"),
        pytest.param(lambda mask: (1.0 - mask.float()) * -3.4e38, None, "O1", marks=pytest.mark.slow),
        pytest.param(lambda mask: mask.bool(), None, "O0", marks=pytest.mark.slow),
        (lambda mask: mask.bool(), None, "O1"),
    ],
    ids=["infinite", "infinite and scaled in half", "sentinel in half", "boolean", "boolean in half"],
)
def test_attention_with_a_bias_and_a_free_batch_is_torchs_masked_whole_rows_included(
    bias: Callable[[Tensor], Tensor], scale: float | None, level: str, tmp_path: Path
) -> None:
    samples = {"x": torch.randn(8, 5, 8), "mask": torch.ones(8, 5, dtype=torch.int64)}
    model = original(Attention(bias, scale), samples, {1: Dim()})
    program = half_of(model, level)
    written(model, tmp_path / "half.onnx", program)
    x, mask = torch.randn(6, 7, 8), torch.randint(0, 2, (6, 7))
    mask[0], mask[1] = 0, 1
    with torch.inference_mode():
        expected = runnable(program)(x, mask)[0].numpy()
    assert not np.isnan(expected).any()
    tolerance = 1e-5 if level == "O0" else 4e-3
    np.testing.assert_allclose(
        answers(tmp_path / "half.onnx", x, mask)[0], expected, rtol=tolerance, atol=tolerance
    )


class Normed(nn.Module):
    """Layers and batch norms in turn, their statistics and weights drawn; ``between`` runs before each norm."""

    def __init__(self, *parts: nn.Module, between: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.parts, self._between = nn.ModuleList(parts), between
        for part in parts:
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                assert part.running_var is not None and part.running_mean is not None
                nn.init.uniform_(part.running_var, 0.1, 4.0)
                nn.init.normal_(part.running_mean)
                if part.affine:
                    nn.init.normal_(part.weight)
                    nn.init.normal_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(self._between(x) if isinstance(part, nn.modules.batchnorm._BatchNorm) else x)
        return x


IMAGES, ROWS = torch.Size((8, 6, 9, 9)), torch.Size((8, 6))
FOLDED: dict[str, tuple[Callable[[], nn.Module], torch.Size]] = {
    "convolutions": (
        lambda: Normed(
            nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 4, 3, stride=2, padding=1, groups=4), nn.BatchNorm2d(4),
        ),
        IMAGES,
    ),
    "transposed": (lambda: Normed(nn.ConvTranspose2d(6, 4, 3, stride=2), nn.BatchNorm2d(4)), IMAGES),
    "linear": (lambda: Normed(nn.Linear(6, 5), nn.BatchNorm1d(5)), ROWS),
    "without weights of its own": (lambda: Normed(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4, affine=False)), IMAGES),
}  # fmt: skip
NOT_FOLDED: dict[str, tuple[Callable[[], nn.Module], torch.Size]] = {
    "no layer before it": (lambda: Normed(nn.Conv2d(6, 6, 1), nn.ReLU(), nn.BatchNorm2d(6)), IMAGES),
    "another reader": (
        lambda: Normed(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), between=lambda y: y + y.mean()),
        IMAGES,
    ),
    "grouped and transposed": (
        lambda: Normed(nn.ConvTranspose2d(6, 4, 3, groups=2), nn.BatchNorm2d(4)),
        IMAGES,
    ),
}


def normed(build: Callable[[], nn.Module], shape: torch.Size, path: Path) -> tuple[onnx.ModelProto, float]:
    """The half file, and the ratio of its root mean square error to the half program's, both against FP32."""
    model = original(build(), {"x": torch.randn(shape)})
    program = half_of(model)
    half = written(model, path, program)
    x = torch.randn(64, *shape[1:])
    with torch.inference_mode():
        exact, storage = (runnable(one)(x)[0].float().numpy() for one in (model.program, program))
    file = half_storage(onnx.load(path), model.spec)({"x": x.numpy()})["y0"].astype(np.float32)
    return half, float(np.sqrt(np.square(file - exact).mean() / np.square(storage - exact).mean()))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDED)
def test_a_batch_norm_after_a_half_layer_is_folded_and_errs_about_as_much_as_the_half_program(
    name: str, tmp_path: Path
) -> None:
    half, error = normed(*FOLDED[name], tmp_path / "half.onnx")
    ops = [node.op_type for node in half.graph.node]
    assert "BatchNormalization" not in ops and ops.count("Cast") == 2
    assert error < 4.0  # 0.9 to 2.2 in 50 draws: the weights are rounded twice


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_FOLDED)
def test_a_batch_norm_that_cannot_be_folded_is_an_fp32_island(name: str, tmp_path: Path) -> None:
    graph = normed(*NOT_FOLDED[name], tmp_path / "half.onnx")[0].graph
    made = {name: node for node in graph.node for name in node.output}
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    (norm,) = [node for node in graph.node if node.op_type == "BatchNormalization"]
    assert made[norm.input[0]].op_type == "Cast" and types[norm.output[0]] == FLOAT


@pytest.mark.slow
def test_a_batch_norm_that_the_plan_keeps_in_fp32_is_not_folded(tmp_path: Path) -> None:
    model = original(FOLDED["transposed"][0](), {"x": torch.randn(IMAGES)})
    plan = make_plan(runnable(model.program), Precision(keep=("batch_norm",)))
    half = rewrite(model.program, plan, model.spec, model.example).program
    (norm,) = [
        n
        for n in written(model, tmp_path / "half.onnx", half).graph.node
        if n.op_type == "BatchNormalization"
    ]
    assert norm


@pytest.mark.slow
def test_weights_that_a_folded_norm_would_take_out_of_halfs_range_stay(tmp_path: Path) -> None:
    net = FOLDED["convolutions"][0]()
    for norm, scale in zip(
        (part for part in net.modules() if isinstance(part, nn.BatchNorm2d)), (1e7, 1e-5), strict=True
    ):
        nn.init.constant_(norm.weight, scale)
    model = original(net, {"x": torch.randn(IMAGES)})
    ops = [node.op_type for node in written(model, tmp_path / "half.onnx", half_of(model)).graph.node]
    assert ops.count("BatchNormalization") == 2


def test_an_inner_value_that_is_called_as_an_output_makes_room(tmp_path: Path) -> None:
    model = original(made(lambda x: torch.relu(x * 2) + 1), {"x": torch.randn(8, 4)})
    inner = {name for node in written(model, tmp_path / "a.onnx").graph.node for name in node.output} - {"y0"}
    assert len(inner) >= 2
    for name in sorted(inner)[:1]:
        spec = model.spec
        renamed = type(spec)(
            spec.name, spec.inputs, (type(spec.outputs[0])(name, "FP32", spec.outputs[0].shape),)
        )
        graph = written(Original(model.program, renamed, model.example), tmp_path / "b.onnx").graph
        assert [value.name for value in graph.output] == [name]
        x = torch.randn(3, 4)
        np.testing.assert_allclose(
            answers(tmp_path / "b.onnx", x)[0], (torch.relu(x * 2) + 1).numpy(), rtol=1e-6
        )


def test_an_output_may_be_an_input_or_another_output_or_a_weight(tmp_path: Path) -> None:
    constant = torch.randn(4)
    model = original(
        made(lambda x: (x, x * 2, (y := x * 3), y, constant.expand(x.shape[0], -1))), {"x": torch.randn(8, 4)}
    )
    graph = written(model, tmp_path / "original.onnx").graph
    assert [value.name for value in graph.output] == ["y0", "y1", "y2", "y3", "y4"]
    x = torch.randn(3, 4)
    came = answers(tmp_path / "original.onnx", x)
    for factor, array in zip((1, 2, 3, 3), came[:4], strict=True):
        np.testing.assert_allclose(array, (x * factor).numpy(), rtol=1e-6)
    assert np.array_equal(came[4], constant.expand(3, -1).numpy())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "stacked"])
def test_a_file_is_self_contained_and_plain(name: str, tmp_path: Path) -> None:
    """No local functions, no sequence ops, no data elsewhere, no weight that nothing reads, its facts in it."""
    model = captured_net(name)
    made = written(model, tmp_path / "half.onnx", half_of(model))
    assert [path.name for path in tmp_path.iterdir()] == ["half.onnx"]
    assert len(made.functions) == 0
    assert not [node.op_type for node in made.graph.node if "Sequence" in node.op_type]
    assert {node.domain for node in made.graph.node} <= {"", "ai.onnx"}
    assert not [t.name for t in made.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    read = {name for node in made.graph.node for name in node.input} | {
        value.name for value in made.graph.output
    }
    assert {tensor.name for tensor in made.graph.initializer} <= read
    assert {prop.key: prop.value for prop in made.metadata_props}["halfeven.precision"] == "fp16"


def test_large_weights_stand_beside_the_file_and_are_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights stand beside the file above protobuf's limit of 2 GiB, which is lowered here."""
    model = captured_net("mlp")
    written(model, tmp_path / "plain.onnx")
    monkeypatch.setattr(onnx_form, "SELF_CONTAINED_BELOW", 64)
    written(model, tmp_path / "large.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"plain.onnx", "large.onnx", "large.onnx.data"}
    kept = onnx.load(tmp_path / "large.onnx", load_external_data=False).graph.initializer
    assert [t.data_location for t in kept if np.prod(t.dims) > 64] == [onnx.TensorProto.EXTERNAL]
    x = torch.randn(5, 8)
    plain, large = (answers(tmp_path / f"{name}.onnx", x)[0] for name in ("plain", "large"))
    assert np.array_equal(plain, large)


def test_nothing_is_left_of_a_file_that_is_not_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, full_check: bool) -> None:
        raise ValueError(f"{Path(path).name} is not valid")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    monkeypatch.setattr(onnx_form, "SELF_CONTAINED_BELOW", 64)
    with pytest.raises(ExportFailed, match=r"original.onnx is not valid.*--form torch"):
        written(captured_net("mlp"), tmp_path / "original.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_inner_free_dimensions_have_the_names_of_the_inputs(tmp_path: Path) -> None:
    free = {1: Dim(1, None, "length")}
    model = original(NETS["encoder"].build(), NETS["encoder"].inputs(8), free)
    graph = written(model, tmp_path / "original.onnx").graph
    names = {dim for value in graph.value_info for dim in dims(value) if str(dim).isidentifier()}
    assert names == {"batch", "length"}


def test_no_path_of_the_machine_that_wrote_it_is_in_the_file(tmp_path: Path) -> None:
    written(captured_net("digits"), tmp_path / "original.onnx")
    assert b".py" not in (tmp_path / "original.onnx").read_bytes()


@pytest.mark.slow
def test_what_cannot_be_written_is_told_with_the_way_out(tmp_path: Path) -> None:
    model = original(made(lambda x: torch.special.bessel_j0(x)), {"x": torch.randn(8, 4)})
    with pytest.raises(ExportFailed, match=r"'net'.*--form torch"):
        written(model, tmp_path / "original.onnx")
    assert not (tmp_path / "original.onnx").exists()


@pytest.mark.slow
def test_a_float64_and_an_integer_output_keep_their_datatypes(tmp_path: Path) -> None:
    model = original(made(lambda x: (x.double().cumsum(1), x.argmax(1), x > 0)), {"x": torch.randn(8, 4)})
    written(model, tmp_path / "half.onnx", half_of(model))
    x = torch.randn(3, 4)
    came = answers(tmp_path / "half.onnx", x)
    assert [array.dtype for array in came] == [np.float64, np.int64, np.bool_]
    assert np.array_equal(came[1], x.argmax(1).numpy()) and np.array_equal(came[2], (x > 0).numpy())


class Gated(nn.Module):
    """An LSTM, whose weights torch.onnx cuts into gates by sizes that it looks up in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x)[0]


@pytest.mark.slow
def test_weights_are_cut_when_the_file_is_written_and_not_at_every_call(tmp_path: Path) -> None:
    model = original(Gated(), {"x": torch.randn(8, 5, 4)})
    file = written(model, tmp_path / "m.onnx")
    constants = {tensor.name for tensor in file.graph.initializer}
    assert [node for node in file.graph.node if node.input and set(node.input) <= constants] == []
    stored = sum(np.prod(tensor.dims) for tensor in file.graph.initializer if tensor.data_type == FLOAT)
    # The cut weights are not stored beside the whole ones.
    assert stored <= 1.1 * sum(weight.numel() for weight in Gated().parameters()) + 64
    x = torch.randn(3, 5, 4)
    assert np.allclose(answers(tmp_path / "m.onnx", x)[0], model.run(x)[0].numpy(), atol=1e-6)


def test_a_split_leaves_no_sequence_behind(tmp_path: Path) -> None:
    model = original(
        made(lambda x: torch.cat([part.tanh() for part in x.split(2, 1)], 1)), {"x": torch.randn(8, 4)}
    )
    ops = {node.op_type for node in written(model, tmp_path / "m.onnx").graph.node}
    assert "Tanh" in ops and not any("Sequence" in op for op in ops)


def test_an_output_that_has_the_name_of_an_input_has_another_one_in_the_file(tmp_path: Path) -> None:
    model = original(made(lambda x: (x.tanh(), x.relu())), {"x": torch.randn(8, 4)})
    first, second = model.spec.outputs
    spec = replace(model.spec, outputs=(replace(first, name="x"), replace(second, name="x_output")))
    write_onnx(model.program, spec, tmp_path / "m.onnx", {})
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert [value.name for value in (*graph.input, *graph.output)] == ["x", "x_output_output", "x_output"]
    x = torch.randn(3, 4)
    for came, expected in zip(answers(tmp_path / "m.onnx", x), (x.tanh(), x.relu()), strict=True):
        assert np.allclose(came, expected.numpy(), atol=1e-6)


def halves(x: Tensor) -> Tensor:
    first, second = torch.cat([x, 2.0 * x]).split(x.shape[0])
    return first - second.tanh()


def chunks(x: Tensor) -> Tensor:
    first, second = torch.cat([x, 2.0 * x]).chunk(2, dim=-2)
    return first - second.tanh()


def uneven_parts(x: Tensor) -> Tensor:
    rows = x.shape[0]
    first, _, last = torch.cat([x, 2.0 * x, x[:1], 3.0 * x]).split([2 * rows, 1, rows])
    return first[:rows] - last.tanh()


@pytest.mark.slow
@pytest.mark.parametrize("forward", [halves, chunks, uneven_parts])
def test_a_split_into_parts_as_long_as_the_batch_is_written_without_a_sequence(
    forward: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    x = torch.randn(8, 4)
    model = original(made(forward), {"x": x})
    ops = {node.op_type for node in written(model, tmp_path / "m.onnx").graph.node}
    assert not any("Sequence" in op for op in ops)
    assert np.allclose(answers(tmp_path / "m.onnx", x[:5])[0], forward(x[:5]).numpy(), atol=1e-6)


def test_a_tied_table_is_not_stored_a_second_time_turned(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4096, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x) @ self.table.weight.t()

    model = original(Tied(), {"x": torch.randint(0, 4096, (8, 3))})
    file = written(model, tmp_path / "m.onnx")
    assert sum(np.prod(tensor.dims) for tensor in file.graph.initializer) < 1.5 * 4096 * 16


@pytest.mark.slow
def test_an_inverse_spectrogram_whose_places_torch_counts_in_int32_is_written(tmp_path: Path) -> None:
    """ONNX takes places of INT64 alone."""

    class Denoised(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            window = torch.hann_window(32)
            found = torch.stft(x, 32, 8, window=window, return_complex=True)
            return torch.istft(found * 0.5, 32, 8, window=window, length=256)

    model = original(Denoised(), {"x": torch.randn(4, 256)})
    written(model, tmp_path / "net.onnx")
    x = torch.randn(3, 256)
    expected = model.run(x)[0].numpy()
    np.testing.assert_allclose(answers(tmp_path / "net.onnx", x)[0], expected, atol=1e-4)
