"""Models that were made for one row, or have the batch on another axis: from the folder to HTTP, eight rows at once.

At O0, so that the whole serves: rows in a batch and rows alone must then differ by what FP32 sums in another order.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from halfeven.exporters.convert import Options, convert
from halfeven.models.store import Store

from tests.recurrent import recurrent_folder, requests
from tests.serve.test_server import get, serving

FP32_NOISE = 1e-5  # as a share of the largest value of an output


def infer(address: str, name: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    asked = [triton.InferInput(key, list(array.shape), "FP32") for key, array in inputs.items()]
    for tensor, array in zip(asked, inputs.values(), strict=True):
        tensor.set_data_from_numpy(np.ascontiguousarray(array))
    answer = triton.InferenceServerClient(address).infer(name, asked)
    return {entry["name"]: answer.as_numpy(entry["name"]) for entry in answer.get_response()["outputs"]}


def check_eight_rows_at_once(store: Store, inputs: Mapping[str, np.ndarray], axes: Mapping[str, int]) -> None:
    """``axes``: of each tensor's batch, inputs and outputs; the other tensors have it first."""
    (name,) = store.names()
    with serving(store) as (address, _):
        together = infer(address, name, inputs)
        alone = [
            infer(address, name, {k: a.take([row], axes.get(k, 0)) for k, a in inputs.items()})
            for row in range(8)
        ]
        _, _, said = get(address, f"/v2/models/{name}/stats")
    for key, answer in together.items():
        expected = np.concatenate([row[key] for row in alone], axes.get(key, 0))
        np.testing.assert_allclose(answer, expected, rtol=0, atol=FP32_NOISE * np.abs(expected).max())
        assert np.ptp(expected, axes.get(key, 0)).max() > 0  # rows are told apart
    batches = {
        batch["batch_size"]: batch["compute_infer"]["count"]
        for batch in said["model_stats"][0]["batch_stats"]
    }
    assert batches == {1: 8, 8: 1}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_a_recurrent_model_with_its_state_on_axis_1_answers_a_batch_as_one_at_a_time(
    form: str, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    folder = recurrent_folder(tmp_path / "gru", form=form, precision={"level": "O0"})
    assert convert(folder, store, Options(forms=(form,))).asked_passed
    check_eight_rows_at_once(store, requests(8), {"h": 1, "hn": 1})
