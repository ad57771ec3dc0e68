"""Narrow values are answered as if the wide numbers had been sent, bit for bit, by every kind of engine."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.engines import wire_widening
from halfeven.models.engines.cpu.setup import NO_SPINNING
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.onnx_engine import OnnxEngine
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.engines.wire_widening import Widening, widened
from halfeven.models.spec.datatypes import Wire
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from torch import Tensor, nn

from tests.programs import Original, original

PICTURE = {"color": "RGB", "scale": 1 / 255, "mean": [0.491, 0.482, 0.447], "std": [0.247, 0.243, 0.262]}
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
SMALL = {
    "UINT8": np.uint8,
    "INT8": np.int8,
    "INT16": np.int16,
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(image).flatten(1), ids * 2


@pytest.fixture(scope="module")
def net() -> Original:
    return original(Net(), {"image": torch.randn(8, 3, 6, 6), "ids": torch.arange(8)[:, None]})


def wired(net: Original, image: Wire | None, picture: dict[str, Any] | None = None) -> ModelSpec:
    """The net with a wire datatype of its image; ids come as INT32."""
    first, second = net.spec.inputs
    inputs = (
        TensorSpec(first.name, first.datatype, first.shape, wire=image, picture=picture),
        TensorSpec(second.name, second.datatype, second.shape, wire=Wire("INT32")),
    )
    return ModelSpec("net", inputs, net.spec.outputs, 64)


def engine_of(form: str, net: Original, device: str, tmp_path: Path) -> Engine:
    if form == "torch":
        return TorchEngine(net.program, "fp32", torch.device(device))
    write_onnx(net.program, net.spec, tmp_path / "original.onnx", {})
    return OnnxEngine(tmp_path / "original.onnx", "fp32", torch.device(device))


def drawn(datatype: str, rows: int) -> np.ndarray:
    values = np.random.default_rng().integers(-128, 128, (rows, 3, 6, 6))
    return (values + 128 if datatype == "UINT8" else values).astype(SMALL[datatype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["torch", "onnx"])
@pytest.mark.parametrize(
    ("wire", "picture"),
    [
        (Wire("UINT8", 1 / 255, -0.5), None),
        (Wire("UINT8"), PICTURE),
        (Wire("INT8", 0.1, 0.3), None),
        (Wire("INT16", -3.7e-4), None),
        (Wire("FP16", 1.1), None),
        (Wire("BF16"), None),
    ],
)
def test_small_numbers_get_the_answer_of_the_wide_ones_to_the_bit(
    wire: Wire, picture: dict[str, Any] | None, form: str, device: str, net: Original, tmp_path: Path
) -> None:
    spec = wired(net, wire, picture)
    engine = engine_of(form, net, device, tmp_path)
    parts = [drawn(wire.datatype, 3), drawn(wire.datatype, 2)]
    ids = [np.array([[1], [2], [3]], np.int32), np.array([[4], [5]], np.int32)]
    wide = [Widening.of(spec.inputs[0], True).numpy(part) for part in parts]
    wanted = engine.run([wide, [part.astype(np.int64) for part in ids]])
    engine = widened(engine, spec)
    for answer, expected in zip(engine.run([parts, ids]), wanted, strict=True):
        assert answer.dtype == expected.dtype
        np.testing.assert_array_equal(answer, expected)
    # Samples are in the model's datatype, also once the engine is active.
    for answer, expected in zip(engine.run([wide, [i.astype(np.int64) for i in ids]]), wanted, strict=True):
        np.testing.assert_array_equal(answer, expected)
    engine.close()


def test_the_wide_numbers_are_value_times_scale_plus_offset_in_fp32() -> None:
    tensor = TensorSpec("x", "FP32", (Dim(), Dim(256, 256)), wire=Wire("UINT8", 0.1, 0.3))
    pixels = np.arange(256, dtype=np.uint8)[None]
    wanted = pixels.astype(np.float32) * np.float32(0.1) + np.float32(0.3)
    np.testing.assert_array_equal(Widening.of(tensor, True).numpy(pixels), wanted)


@pytest.mark.parametrize(
    ("datatype", "steps"), [("FP16", np.float32), ("BF16", np.float32), ("FP64", np.float64)]
)
def test_a_half_models_numbers_are_made_in_fp32_and_rounded_once_on_both_sides(
    datatype: str, steps: Any
) -> None:
    tensor = TensorSpec("x", datatype, (Dim(), Dim(256, 256)), wire=Wire("INT8", 0.0123, 7.7))
    small = np.arange(-128, 128, dtype=np.int8)[None]
    widening = Widening.of(tensor, True)
    wanted = (small.astype(steps) * steps(0.0123) + steps(7.7)).astype(tensor.type.numpy)
    np.testing.assert_array_equal(widening.numpy(small), wanted)
    by_torch = widening.torch()(torch.from_numpy(small))
    assert by_torch.dtype == tensor.type.torch
    np.testing.assert_array_equal(by_torch.double().numpy(), wanted.astype(np.float64))


@pytest.mark.parametrize("shape", [(3, 6, 6), (6, 6, 3)])
def test_the_pixels_of_a_picture_go_through_its_own_scale_mean_and_deviation(shape: tuple[int, ...]) -> None:
    dims = (Dim(), *(Dim(size, size) for size in shape))
    tensor = TensorSpec("image", "FP32", dims, picture=PICTURE, wire=Wire("UINT8"))
    pixels = np.random.default_rng().integers(0, 256, (2, *shape), np.uint8)
    last = pixels if shape[-1] == 3 else pixels.transpose(0, 2, 3, 1)
    wanted = (last / 255 - np.array(PICTURE["mean"])) / np.array(PICTURE["std"])
    wide = Widening.of(tensor, True).numpy(pixels)
    came = wide if shape[-1] == 3 else wide.transpose(0, 2, 3, 1)
    np.testing.assert_allclose(came, wanted, rtol=0, atol=1e-6)


def test_an_engine_without_wire_datatypes_is_left_alone(net: Original) -> None:
    engine = TorchEngine(net.program, "fp32", torch.device("cpu"))
    assert widened(engine, net.spec) is engine
    before = engine._module
    widened(engine, net.spec)
    assert engine._module is before


@dataclass(eq=False)
class Behind(Engine):
    """An ONNX engine on a CPU, of which a test says what it allows and whether its batches are brief."""

    form: str = "onnx"
    precision: str = "fp32"
    device: str = "cpu"
    brief: bool = True
    possible: Set[str] = frozenset({NO_SPINNING})
    assemble_ns: int = 7

    def run(self, parts: Any) -> list[np.ndarray]:
        return [part[0] for part in parts]


@pytest.mark.parametrize("brief", [True, False])
@pytest.mark.parametrize("with_conversion", [True, False])
def test_a_conversion_on_the_host_hides_nothing_that_the_engine_behind_tells(
    brief: bool, with_conversion: bool, net: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_widening, "is_brief", lambda run: bool(run()) and with_conversion)
    engine = widened(Behind(brief=brief), wired(net, Wire("UINT8")))
    assert engine.possible == {NO_SPINNING}
    engine.warm_up([[drawn("UINT8", 1)], [np.array([[1]], np.int32)]])
    assert engine.brief is (brief and with_conversion)
    engine.run([[drawn("UINT8", 1)], [np.array([[1]], np.int32)]])
    assert engine.assemble_ns > 7, "the conversion, and what the engine behind needed"
