"""A file exported for one row takes many where its graph allows it, with the answers to one at a time; else it
stays."""

# ruff: noqa: E501  (graphs in their own lines)

import warnings
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.inputs.synthetic import generate
from halfeven.exporters.onnx.conversion import read_freed
from halfeven.exporters.onnx.reading.graph import assembled
from halfeven.exporters.onnx.runtime import answers_alone_differ, runtime_answers
from halfeven.exporters.torch.onnx_form.decompositions import looked_up_once
from halfeven.models.folder.package import ModelFolder, Precision
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from onnx import ModelProto
from torch import Tensor, nn

from tests.exporters.onnx.free_rows import Attention, Convolutional
from tests.exporters.onnx.onnx_files import convert_file, errors_u, parsed, saved

FREED = "its batch was made free"


def whole_numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# Each says 1 for the batch in another place. `w` is [6, 6].
CONSTANTS = {
    "nothing": ("(float[1,6] y) { y = MatMul(x, w) }", {}),
    "a Reshape that names every size": (
        "(float[1,6] y) { h = Reshape(x, shape) y = Reshape(h, flat) }",
        {"shape": whole_numbers(1, 2, 3), "flat": whole_numbers(1, 6)},
    ),
    "a Reshape that leaves another size open": (
        "(float[1,6] y) { h = Reshape(x, shape) t = Transpose<perm=[1,0,2]>(h) f = Reshape(t, heads) u = Transpose<perm=[1,0,2]>(f) y = Reshape(u, flat) }",
        {"shape": whole_numbers(1, 2, -1), "heads": whole_numbers(2, 1, -1), "flat": whole_numbers(1, -1)},
    ),
    "rows merged with steps": (
        "(float[1,2,6] y) { h = Reshape(x, steps) m = MatMul(h, v) y = Reshape(m, apart) }",
        {"steps": whole_numbers(2, 3), "apart": whole_numbers(1, 2, 6), "v": np.ones((3, 6), np.float32)},
    ),
    "heads of an attention, steps in front": (
        "(float[1,6] y) { s = Reshape(x, steps) t = Transpose<perm=[1,0,2]>(s) h = Reshape(t, heads) a = Transpose<perm=[1,0,2]>(h) b = Softmax(a) c = Transpose<perm=[1,0,2]>(b) f = Reshape(c, features) p = MatMul(f, v) o = Reshape(p, apart) u = Transpose<perm=[1,0,2]>(o) y = Reshape(u, flat) }",
        {
            "steps": whole_numbers(1, 3, 2), "heads": whole_numbers(3, 2, 1), "features": whole_numbers(3, 2),
            "apart": whole_numbers(3, 1, 2), "flat": whole_numbers(1, 6), "v": np.ones((2, 2), np.float32),
        },
    ),
    "the only row, cut out": (
        "(float[1,4] y) { y = Slice(x, starts, ends) }",
        {"starts": whole_numbers(0, 2), "ends": whole_numbers(1, 9)},
    ),
    "a constant joined to each row": (
        "(float[1,2,6] y) { h = Reshape(x, one) c = Concat<axis=1>(token, h) y = Relu(c) }",
        {"one": whole_numbers(1, 1, 6), "token": np.ones((1, 1, 6), np.float32)},
    ),
    "the sizes of a Resize": (
        "(float[1,1,4,6] y) { h = Reshape(x, image) y = Resize<mode=\"nearest\">(h, , , sizes) }",
        {"image": whole_numbers(1, 1, 2, 3), "sizes": whole_numbers(1, 1, 4, 6)},
    ),
    "the initial state of a recurrent layer": (
        "(float[1,2] y) { s = Reshape(x, steps) t = Transpose<perm=[1,0,2]>(s) a, b = GRU<hidden_size=2>(t, gw, gr, , , state) y = Squeeze(b, first) }",
        {
            "steps": whole_numbers(1, 3, 2), "first": whole_numbers(0), "state": np.full((1, 1, 2), 0.5, np.float32),
            "gw": np.ones((1, 6, 2), np.float32), "gr": np.ones((1, 6, 2), np.float32),
        },
    ),
}  # fmt: skip

STAYS = {
    "rows that see each other": ("(float[1,6] y) { y = Softmax<axis=0>(x) }", {}, "depends on the other rows"),
    "an axis of one taken away": (
        "(float[1,6] y) { h = Squeeze(x, first) m = MatMul(h, w) y = Unsqueeze(m, first) }",
        {"first": whole_numbers(0)},
        "does not run with more than one row",
    ),
    "one answer for all": ("(float[1] y) { h = ReduceMax<keepdims=0>(x) y = Reshape(h, one) }", {"one": whole_numbers(1)}, "no row for each row"),
    "an output that is turned": (
        "(float[6,1] y) { y = Transpose<perm=[1,0]>(x) }",
        {},
        "output 'y' has the batch on axis 1: write batch_axis = 1",
    ),
}  # fmt: skip


def file(graph: str, more: dict[str, np.ndarray]) -> ModelProto:
    weights = {"w": np.random.default_rng().standard_normal((6, 6)).astype(np.float32), **more}
    used = {
        name: array
        for name, array in weights.items()
        if name in graph.replace("(", " ").replace(")", " ").replace(",", " ").split()
    }
    return parsed(f"g (float[1,6] x) => {graph}", used)


def folder_of(path: Path, model: ModelProto) -> ModelFolder:
    """A model folder whose model.toml says that the first axis is the batch."""
    out = model.graph.output[0].type.tensor_type.shape.dim
    y = TensorSpec("y", "FP32", (Dim(), *(Dim(d.dim_value, d.dim_value) for d in out[1:])))
    if [d.dim_value for d in out] == [6, 1]:
        y = TensorSpec("y", "FP32", (Dim(), Dim(1, 1)))
    return saved(path, model, ModelSpec("one", (TensorSpec("x", "FP32", (Dim(), Dim(6, 6))),), (y,), 8))


@pytest.mark.parametrize("graph", CONSTANTS)
def test_what_says_one_for_the_batch_is_rewritten_and_every_row_answered_as_alone(
    graph: str, tmp_path: Path
) -> None:
    model = file(*CONSTANTS[graph])
    folder = folder_of(tmp_path, model)
    program, spec, notes = read_freed(tmp_path / "model.onnx", folder, generate(folder.spec, 8))
    assert spec.max_batch_size == 8 and FREED in notes[-1], notes
    rows = np.random.default_rng().standard_normal((7, 6), np.float32)
    together = runtime_answers(assembled(program.model, program.weights))({"x": rows})["y"]
    alone = [runtime_answers(model)({"x": rows[row : row + 1]})["y"] for row in range(7)]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graph", STAYS)
def test_a_batch_that_cannot_be_made_free_stays_one_and_the_notes_say_why(graph: str, tmp_path: Path) -> None:
    text, more, reason = STAYS[graph]
    folder = folder_of(tmp_path, file(text, more))
    program, spec, notes = read_freed(tmp_path / "model.onnx", folder, generate(folder.spec, 8))
    assert spec.max_batch_size == 1 and program.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert notes[-1].startswith("its batch was not made free") and reason in notes[-1], notes


def test_a_single_sample_shows_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, file(*CONSTANTS["nothing"]))
    _, spec, notes = read_freed(tmp_path / "model.onnx", folder, generate(folder.spec, 1))
    assert spec.max_batch_size == 1 and "give two or more" in notes[-1]


def test_a_max_batch_size_of_one_asks_for_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, file(*CONSTANTS["nothing"]))
    one = ModelFolder(
        folder.folder, "model.onnx", (), None, None, folder.spec.with_max_batch_size(1), Precision()
    )
    _, _, notes = read_freed(tmp_path / "model.onnx", one, generate(one.spec, 8))
    assert notes == []


@pytest.mark.slow
def test_the_half_of_a_freed_file_is_planned_and_equal_on_batches(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, file(*CONSTANTS["rows merged with steps"]))
    converted = convert_file(folder, generate(folder.spec, 24), folder.precision)
    assert converted.half_nodes > 0 and any(FREED in note for note in converted.notes)
    assert errors_u(converted, dict(generate(folder.spec, 5, seed=1).arrays))["y"] <= 4


class Recogniser(nn.Module):
    """Convolution, a bidirectional LSTM over columns, a linear layer over rows merged with columns."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.score = (
            nn.Conv2d(3, 8, 3, (8, 1), 1),
            nn.LSTM(8, 8, bidirectional=True),
            nn.Linear(16, 6),
        )

    def forward(self, x: Tensor) -> Tensor:
        columns, _ = self.text(self.image(x).squeeze(2).permute(2, 0, 1))
        steps, rows, width = columns.shape
        return self.score(columns.view(steps * rows, width)).view(steps, rows, -1).permute(1, 0, 2)


NETS = {"convolutional": (Convolutional, (3, 8, 8)), "recogniser": (Recogniser, (3, 8, 12)), "attention": (Attention, (3, 6, 4))}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_nets_that_torch_exported_for_one_row_are_freed(net: str, tmp_path: Path) -> None:
    made, shape = NETS[net][0]().eval(), NETS[net][1]
    example = torch.randn(1, *shape)
    with warnings.catch_warnings(), looked_up_once():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            made, (example,), input_names=["x"], output_names=["y"], dynamo=True, verbose=False
        )
    assert program is not None
    onnx.save(program.model_proto, tmp_path / "model.onnx")
    out = made(example).shape[1:]
    x, y = (
        TensorSpec(name, "FP32", (Dim(), *(Dim(n, n) for n in sizes)))
        for name, sizes in (("x", shape), ("y", out))
    )
    folder = ModelFolder(tmp_path, "model.onnx", (), None, None, ModelSpec(net, (x,), (y,), 8), Precision())
    rows = np.random.default_rng().standard_normal((8, *shape), np.float32)
    program, spec, notes = read_freed(tmp_path / "model.onnx", folder, Samples({"x": rows}))
    assert spec.max_batch_size == 8 and FREED in notes[-1], notes
    together = runtime_answers(assembled(program.model, program.weights))({"x": rows})["y"]
    with torch.inference_mode():
        alone = torch.cat([made(torch.from_numpy(rows[row : row + 1])) for row in range(8)]).numpy()
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-4 * np.abs(alone).max())


@pytest.mark.parametrize(("steps", "is_same"), [(1, True), (4, False)])
@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_an_output_in_half_may_differ_among_other_rows_by_one_step(
    half: type, steps: int, is_same: bool
) -> None:
    x, y = (TensorSpec(name, "FP32", (Dim(), Dim(6, 6))) for name in "xy")
    samples = Samples({"x": np.random.default_rng().uniform(1.1, 1.9, (8, 6)).astype(np.float32)})

    def answers(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        bits = inputs["x"].astype(half).view(np.uint16)
        return {"y": (bits + np.uint16(steps if len(bits) > 1 else 0)).view(half)}

    spec = ModelSpec("m", (x,), (y,), 8)
    assert (answers_alone_differ(spec, samples, answers) is None) == is_same
