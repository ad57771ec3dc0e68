"""Operations are counted from shapes: the same on every machine, and about right."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.live.forms import module_operations
from halfeven.exporters.onnx.precision.file_graph import file_operations
from halfeven.exporters.onnx.reading.normalise import normalise
from halfeven.exporters.policy.operations import (
    FOURIER,
    PER_ELEMENT,
    PER_NODE,
    Counted,
    Meter,
    Operations,
    multiply_adds,
)
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.exporters.torch.program_graph import program_operations
from halfeven.models.program import runnable
from torch import nn

from tests.corpus import captured, fresh
from tests.exporters.onnx.onnx_files import parsed


@pytest.mark.parametrize(
    ("op", "operands", "result", "expected"),
    [
        ("linear", [(8, 64), (10, 64), (10,)], (8, 10), 8 * 64 * 10),
        ("addmm", [(10,), (8, 64), (64, 10)], (8, 10), 8 * 64 * 10),
        ("MatMul", [(2, 3, 8, 64), (64, 10)], (2, 3, 8, 10), 6 * 8 * 64 * 10),
        ("bmm", [(6, 8, 64), (6, 64, 10)], (6, 8, 10), 6 * 8 * 64 * 10),
        ("Conv", [(2, 4, 9, 9), (16, 4, 3, 3), (16,)], (2, 16, 7, 7), 2 * 16 * 49 * 4 * 9),
        ("ConvTranspose", [(2, 4, 7, 7), (4, 16, 3, 3)], (2, 16, 9, 9), 2 * 4 * 49 * 16 * 9),
        ("scaled_dot_product_attention", [(2, 4, 5, 8)] * 3, (2, 4, 5, 8), 2 * (2 * 4 * 5 * 5 * 8)),
        (
            "LSTM",
            [(6, 2, 8), (1, 64, 8), (1, 64, 16), (1, 128)],
            (6, 1, 2, 16),
            12 * (64 * 8 + 64 * 16 + 128),
        ),
        ("STFT", [(2, 400, 1), (), (100,)], (2, 7, 51, 2), 2 * 7 * 51 * 2 * 51 * FOURIER),
        ("DFT", [(2, 64, 1)], (2, 33, 2), 2 * 33 * 2 * 33 * FOURIER),
        ("relu", [(8, 64)], (8, 64), 0),
    ],
)
def test_a_product_counts_its_multiply_adds(
    op: str, operands: list[tuple[int, ...]], result: tuple[int, ...], expected: int
) -> None:
    assert multiply_adds(op, operands, result) == expected


def test_an_estimate_grows_with_the_inputs_but_for_its_nodes() -> None:
    counted = Counted()
    counted.add("linear", [(2, 64), (10, 64)], [(2, 10)])
    counted.add("relu", [(2, 10)], [(2, 10)])
    operations = counted.estimate(inputs=2 * 64)
    varying = 2 * 64 * 10 + PER_ELEMENT * 40
    assert operations.of({"x": np.zeros((2, 64))}) == 2 * PER_NODE + varying
    assert operations.of({"x": np.zeros((200, 64))}) == 2 * PER_NODE + 100 * varying


def test_a_meter_adds_up_what_is_run_through_it() -> None:
    meter = Meter(Operations(fixed=5, varying=3, inputs=2))
    answers = meter.on(lambda inputs: {"y": inputs["x"]})
    assert meter.spent() == 0
    for rows in (2, 4):
        assert answers({"x": np.ones(rows)})["y"].shape == (rows,)
    assert meter.spent() == (5 + 3) + (5 + 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zoo mlp", "zoo cnn28", "zoo bert"])
def test_a_program_and_its_file_have_about_the_same_operations(name: str, tmp_path: Path) -> None:
    whole, inputs = captured(name), fresh(name, 8, seed=5)
    arrays = {key: tensor.numpy() for key, tensor in inputs.items()}
    write_onnx(whole.program, whole.spec, tmp_path / "m.onnx", {})
    program = normalise(onnx.load(tmp_path / "m.onnx"), tmp_path / "m.onnx")
    one = program_operations(runnable(whole.program), list(inputs.values())).of(arrays)
    other = file_operations(program, arrays).of(arrays)
    assert 1 / 4 < one / other < 4, (one, other)


def test_a_loop_counts_every_turn() -> None:
    text = """g (float[4] x, int64 n) => (float[4] y) {
        t = Constant<value = bool {1}>()
        y = Loop(n, t, x) <body = b (int64 i, bool c, float[4] a) => (bool d, float[4] e) {
            d = Identity(c) e = Sin(a) }>
    }"""
    program = normalise(parsed(text, {}), Path("m.onnx"))
    x = np.ones(4, np.float32)
    few, many = (
        file_operations(program, {"x": x, "n": np.array(rounds, np.int64)}).of(
            {"x": x, "n": np.array(rounds, np.int64)}
        )
        for rounds in (2, 10)
    )
    assert many - few >= 8 * PER_NODE


def test_a_module_is_counted_as_it_runs() -> None:
    layer, x = nn.Linear(64, 10), torch.ones(8, 64)
    operations = module_operations(lambda: layer(x), {"x": x.numpy()})
    assert operations.of({"x": x.numpy()}) >= 8 * 64 * 10 + PER_ELEMENT * 80 + PER_NODE
