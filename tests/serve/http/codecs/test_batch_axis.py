"""A tensor whose batch is not its first axis: as the model has it on the wire, the batch first inside."""

import io
import json
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadRequest
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.http.codecs.infer import InferCodec
from halfeven.serve.http.codecs.numpy_files import NPZ_TYPE, write_npz
from halfeven.serve.http.codecs.predict import read_body_of, read_predict, write_answer
from halfeven.serve.http.limits.memory_budget import unlimited

from tests.serve.http.codecs.infer_requests import asked, read_by_client

ROWS = TensorSpec("x", "FP32", (Dim(), Dim(4, 4)))
STATE = TensorSpec("h", "FP32", (Dim(), Dim(2, 2), Dim(3, 3)), batch_axis=1)  # callers: [2, batch, 3]
LAST = TensorSpec("x", "FP32", (Dim(), Dim(5, 5)), batch_axis=1)  # callers: [5, batch]
BOTH = ModelSpec("m", (ROWS, STATE), (STATE,), 8)


def codec(*inputs: TensorSpec, rows: int = 8) -> InferCodec:
    return InferCodec(ModelSpec("m", inputs, inputs, rows))


def message(rows: int, *state: int) -> bytes:
    def entry(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        return {"name": name, "shape": shape, "datatype": "FP32", "data": [0.0] * int(np.prod(shape))}

    return json.dumps({"inputs": [entry("x", (rows, 4)), entry("h", state)]}).encode()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_are_read_from_the_batch_axis_and_written_back_to_it(rows: int, binary: bool) -> None:
    columns = np.random.default_rng().standard_normal((5, rows), np.float32)
    subject = codec(LAST)
    for _ in range(2):  # the second time what the headers say is remembered
        body, head = asked(columns, "FP32", binary)
        request = subject.read(body, head)
        assert request.rows == rows
        np.testing.assert_array_equal(request.arrays[0], columns.T)
        assert request.arrays[0].flags.c_contiguous
        response = subject.write(request, request.arrays, "1", {})
        np.testing.assert_array_equal(read_by_client(*response).as_numpy("x"), columns)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (message(3, 2, 2, 3), ["input 'h'", "axis 1", "is 2", "'x' has 3"]),
        (message(3, 3, 2, 3), ["Expected [2,-1,3], got [3,2,3]", "axis 1 is the batch"]),
        (message(3, 2, 0, 3), ["Expected [2,-1,3], got [2,0,3]"]),
        (message(3, 2, 3), ["Expected [2,-1,3], got [2,3]"]),
        (message(3, 2, 129, 3), ["batch-size must be <= 128", "'h' has 129 rows on axis 1"]),
    ],
    ids=["another batch", "the batch first", "no rows", "no batch axis", "too many rows"],
)
def test_a_wrong_size_is_refused_with_the_axes_that_the_caller_knows(body: bytes, words: list[str]) -> None:
    with pytest.raises(BadRequest) as refused:
        InferCodec(BOTH).read(body)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_raw_body_is_one_row_on_the_batch_axis() -> None:
    state = np.arange(6, dtype=np.float32)
    (array,) = codec(STATE).read(state.tobytes(), "0").arrays
    np.testing.assert_array_equal(array, state.reshape(1, 2, 3))


def test_classes_are_ranked_row_by_row() -> None:
    request = codec(LAST).read(
        json.dumps(
            {
                "inputs": [{"name": "x", "shape": [5, 2], "datatype": "FP32", "data": list(range(10))}],
                "outputs": [{"name": "x", "parameters": {"classification": 1}}],
            }
        ).encode()
    )
    scores = np.array([[0, 9, 0, 0, 0], [0, 0, 0, 7, 0]], np.float32)
    (entry,) = json.loads(codec(LAST).write(request, [scores], "1", {}).body)["outputs"]
    assert (entry["shape"], entry["data"]) == ([2, 1], ["9.000000:1", "7.000000:3"])


def test_instances_are_rows_and_numpy_files_are_whole_tensors() -> None:
    random = np.random.default_rng()
    x, h = random.standard_normal((3, 4), np.float32), random.standard_normal((2, 3, 3), np.float32)
    instances = [{"x": x[row].tolist(), "h": h[:, row].tolist()} for row in range(3)]
    read = read_predict(BOTH, json.dumps({"instances": instances}).encode(), unlimited())
    file = read_body_of(BOTH, "", write_npz({"x": x, "h": h}), 2**20, unlimited())
    for request in (read, file):
        np.testing.assert_array_equal(request.arrays[1], h.transpose(1, 0, 2))
    (answer,) = np.load(io.BytesIO(write_answer(BOTH, [file.arrays[1]], NPZ_TYPE))).values()
    np.testing.assert_array_equal(answer, h)
    rows = json.loads(write_answer(BOTH, [file.arrays[1]], "application/json"))["predictions"]
    np.testing.assert_array_equal(np.array(rows, np.float32), h.transpose(1, 0, 2))


@pytest.mark.parametrize("shape", [(3, 2, 3), (2, 0, 3), (2, 3), ()])
def test_a_numpy_file_with_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    body = write_npz({"x": np.zeros((3, 4), np.float32), "h": np.zeros(shape, np.float32)})
    with pytest.raises(BadRequest, match=r"'h' .*expected shape \[2,-1,3\].*axis 1 is the batch"):
        read_body_of(BOTH, "", body, 2**20, unlimited())
