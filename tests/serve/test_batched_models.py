"""Models that were made for one row, or have the batch on another axis: from the folder to HTTP, eight rows at once.

At O0, so that the original serves: rows in a batch and rows alone must then differ by what FP32 sums in another order.
"""

# ruff: noqa: E501  (graphs in their own lines)

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store

from tests.exporters.onnx.onnx_files import parsed
from tests.kept import kept_store
from tests.model_folders import samples_of, tensor, write_folder
from tests.recurrent import HIDDEN, STEPS, WIDTH, recurrent_folder, requests, state
from tests.serve.plain_request import get
from tests.serve.versions.traffic.conftest import serving

pytestmark = pytest.mark.usefixtures("plain_setup")
FP32_NOISE = 1e-5  # as a share of the largest value of an output
STATE_AXES = {"h": 1, "hn": 1}

# Two files that were made for one row: the flattening and the initial state say so.
CONVOLUTIONAL = "g (float[1,3,16,16] x) => (float[1,5] y) { c = Conv<pads=[1,1,1,1],strides=[2,2]>(x, w) r = Relu(c) f = Reshape(r, flat) y = MatMul(f, v) }"
RECURRENT = f"g (float[1,{STEPS},{WIDTH}] x, float[1,1,{HIDDEN}] h) => (float[1,{HIDDEN}] y, float[1,1,{HIDDEN}] hn) {{ t = Transpose<perm=[1,0,2]>(x) a, hn = GRU<hidden_size={HIDDEN}>(t, w, r, , , h) y = Reshape(hn, flat) }}"


def convolutional_folder(path: Path) -> Path:
    weights = {"w": (8, 3, 3, 3), "v": (8 * 8 * 8, 5)}
    drawn = {name: array[0] / 4 for name, array in samples_of(weights, 1).items()}
    return _folder(
        path,
        parsed(CONVOLUTIONAL, {**drawn, "flat": np.array([1, -1])}),
        inputs=[tensor("x", "FP32", [-1, 3, 16, 16])],
        outputs=[tensor("y", "FP32", [-1, 5])],
        samples=samples_of({"x": (3, 16, 16)}, 24),
    )


def fixed_recurrent_folder(path: Path) -> Path:
    weights = {"w": (1, 3 * HIDDEN, WIDTH), "r": (1, 3 * HIDDEN, HIDDEN)}
    drawn = {name: array[0] / 2 for name, array in samples_of(weights, 1).items()}
    return _folder(
        path,
        parsed(RECURRENT, {**drawn, "flat": np.array([1, HIDDEN])}),
        inputs=[tensor("x", "FP32", [-1, STEPS, WIDTH]), state("h", 1)],
        outputs=[tensor("y", "FP32", [-1, HIDDEN]), state("hn", 1)],
        samples=samples_of({"x": (STEPS, WIDTH), "h": (1, HIDDEN)}, 24),
    )


def _folder(path: Path, model: onnx.ModelProto, **settings: object) -> Path:
    write_folder(path, "", source="model.onnx", max_batch_size=8, precision={"level": "O0"}, **settings)  # type: ignore[arg-type]
    (path / "model.py").unlink()
    onnx.save(model, path / "model.onnx")
    return path


def infer(address: str, name: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    asked = [triton.InferInput(key, list(array.shape), "FP32") for key, array in inputs.items()]
    for one, array in zip(asked, inputs.values(), strict=True):
        one.set_data_from_numpy(np.ascontiguousarray(array))
    answer = triton.InferenceServerClient(address).infer(name, asked)
    found = {entry["name"]: answer.as_numpy(entry["name"]) for entry in answer.get_response()["outputs"]}
    return {key: array for key, array in found.items() if array is not None}


def _convert(where: Path) -> None:
    """A store for each model."""
    for form in ("torch", "onnx"):
        folder = recurrent_folder(where / form, form=form, precision={"level": "O0"})
        assert convert(folder, Store(where / "stores" / form), Options(forms=(form,))).asked_passed
    for made in (convolutional_folder(where / "convolutional"), fixed_recurrent_folder(where / "recurrent")):
        converted = convert(made, Store(where / "stores" / made.name))
        assert converted.asked_passed and "batch was made free" in converted.facts["notes"][-1]


def check_eight_rows_at_once(name: str, tmp_path: Path, inputs: Mapping[str, np.ndarray]) -> None:
    kept = kept_store(__file__, _convert) / "stores" / name
    store = Store(Path(shutil.copytree(kept, tmp_path / "store")))

    def row_of(row: int) -> dict[str, np.ndarray]:
        return {key: array.take([row], STATE_AXES.get(key, 0)) for key, array in inputs.items()}

    with serving(store) as (address, _):
        together = infer(address, name, inputs)
        alone = [infer(address, name, row_of(row)) for row in range(8)]
        _, _, counters = get(address, f"/v2/models/{name}/stats")
    for key, answer in together.items():
        axis = STATE_AXES.get(key, 0)
        expected = np.concatenate([row[key] for row in alone], axis)
        assert answer.shape == expected.shape and np.ptp(expected, axis).max() > 0  # rows are told apart
        np.testing.assert_allclose(answer, expected, rtol=0, atol=FP32_NOISE * np.abs(expected).max())
    batches = counters["model_stats"][0]["batch_stats"]
    assert {one["batch_size"]: one["compute_infer"]["count"] for one in batches} == {1: 8, 8: 1}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_a_module_with_its_state_on_axis_1_answers_a_batch_as_one_at_a_time(
    form: str, tmp_path: Path
) -> None:
    check_eight_rows_at_once(form, tmp_path, requests(8))


@pytest.mark.slow
def test_a_convolutional_file_made_for_one_row_answers_a_batch_as_one_at_a_time(tmp_path: Path) -> None:
    x = np.random.default_rng().standard_normal((8, 3, 16, 16), np.float32)
    check_eight_rows_at_once("convolutional", tmp_path, {"x": x})


@pytest.mark.slow
def test_a_recurrent_file_made_for_one_row_with_its_state_on_axis_1_does_too(tmp_path: Path) -> None:
    asked = requests(8)
    check_eight_rows_at_once("recurrent", tmp_path, {"x": asked["x"], "h": asked["h"][:1]})
