"""`halfeven.fp16` and the functions of other converters: they take what those take, and what they give is proven."""

import warnings
from pathlib import Path

import halfeven as he
import numpy as np
import onnx
import pytest
from halfeven import drop_in
from halfeven.models.errors import ParityRefused
from onnx import ModelProto, TensorProto

from tests.exporters.half_files.onnx_net import answers, samples, written

pytestmark = pytest.mark.slow  # a conversion each


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return written(tmp_path / "net.onnx")


def halves(model: ModelProto) -> set[str]:
    return {one.name for one in model.graph.initializer if one.data_type == TensorProto.FLOAT16}


def check_equal(model: ModelProto, net: Path) -> None:
    x = np.random.normal(size=(5, 16)).astype(np.float32)
    expected = answers(onnx.load(net), x)
    np.testing.assert_allclose(answers(model, x), expected, atol=4 * 2**-11 * np.abs(expected).max())
    onnx.checker.check_model(model, full_check=True)


def test_fp16_writes_the_file_and_says_what_was_found(net: Path, tmp_path: Path) -> None:
    x = np.random.normal(size=(24, 16)).astype(np.float32)
    made = he.fp16(net, tmp_path / "half.onnx", {"x": x})
    assert made.verdict == "equal" and made.file == tmp_path / "half.onnx"
    assert made.proof is not None and (made.proof / "parity.json").is_file() and "passed" in str(made)


def test_the_converter_of_onnxconverter_common(net: Path) -> None:
    with pytest.warns(UserWarning, match="ignores min_positive_val, keep_io_types; inputs and outputs keep"):
        made = drop_in.convert_float_to_float16(onnx.load(net), min_positive_val=1e-6)
    check_equal(made, net)
    assert len(halves(made)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = drop_in.convert_float_to_float16_model_path(
            str(net), keep_io_types=True, node_block_list=["first_product"]
        )
    check_equal(kept, net)
    assert len(halves(kept)) == 1
    model = onnx.load(net)
    model.graph.node[0].name = "/layers[0]/MatMul"
    kept = drop_in.convert_float_to_float16(
        model,
        keep_io_types=True,
        node_block_list=["/layers[0]/MatMul", "/layers[1]/MatMul"],
        op_block_list=["Resize"],
    )
    assert len(halves(kept)) == 1
    with pytest.raises(ParityRefused, match=r"no half of model\.onnx is proven equal"):
        drop_in.convert_float_to_float16(onnx.load(net), keep_io_types=True, op_block_list=["MatMul", "Relu"])


def test_the_automatic_converter_judges_by_its_feed(net: Path) -> None:
    feed = {"x": np.random.normal(size=(8, 16)).astype(np.float32)}
    with pytest.warns(UserWarning, match="ignores rtol"):
        made = drop_in.auto_convert_mixed_precision(onnx.load(net), feed, rtol=0.01, keep_io_types=True)
    check_equal(made, net)
    said = {each.key: each.value for each in made.metadata_props}["halfeven.verdict"]
    assert said.startswith("Equal on 4 of your samples")


def test_autocast_of_modelopt(net: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ignores data_max"):
        made = drop_in.convert_to_mixed_precision(
            str(net),
            nodes_to_exclude=["last_p.*t$"],
            calibration_data=str(samples(tmp_path / "x.npz")),
            keep_io_types=True,
            data_max=512,
        )
    check_equal(made, net)
    assert len(halves(made)) == 1
