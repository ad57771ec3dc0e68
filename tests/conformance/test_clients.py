"""The checks of tritonclient's HTTP examples (§ the scripts of `test_examples.py`), written anew to run everywhere."""

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.conformance.conftest import Serving
from tests.conformance.hosted import ANIMALS

FIRST = np.arange(16, dtype=np.int32)[None]
SECOND = np.full((1, 16), -1, np.int32)
QUERY = {"test_1": 1, "test_2": 2}
UNKNOWN = "Request for unknown model"


@pytest.fixture
def client(serving: Serving) -> Any:
    with triton.InferenceServerClient(serving.address) as client:
        yield client


def mixed_inputs(module: Any = triton, datatype: str = "INT32") -> list[Any]:
    """INPUT0 as JSON, INPUT1 binary."""
    kind = np.int8 if datatype == "INT8" else np.int32
    return [
        module.InferInput(name, [1, 16], datatype).set_data_from_numpy(array.astype(kind), binary_data=binary)
        for name, array, binary in (("INPUT0", FIRST, False), ("INPUT1", SECOND, True))
    ]


def mixed_outputs(module: Any = triton) -> list[Any]:
    return [
        module.InferRequestedOutput("OUTPUT0", binary_data=True),
        module.InferRequestedOutput("OUTPUT1", binary_data=False),
    ]


def is_right(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), FIRST + SECOND)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), FIRST - SECOND)


@pytest.mark.parametrize("model", ["simple", "simple_int8"])
@pytest.mark.parametrize("outputs", [mixed_outputs(), None], ids=["named", "all"])
def test_infer_with_json_and_binary_tensors_in_one_request(client: Any, model: str, outputs: Any) -> None:
    inputs = mixed_inputs(datatype="INT8" if model == "simple_int8" else "INT32")
    is_right(client.infer(model, inputs, outputs=outputs, query_params=QUERY, headers={"test": "1"}))


def test_aio_infer(serving: Serving) -> None:
    async def infer() -> None:
        async with triton_aio.InferenceServerClient(serving.address) as client:
            inputs = mixed_inputs(triton_aio)
            is_right(await client.infer("simple", inputs, outputs=mixed_outputs(triton_aio)))
            is_right(await client.infer("simple", inputs, query_params=QUERY))
            with pytest.raises(InferenceServerException) as refused:
                await client.infer("wrong_model_name", inputs)
            assert str(refused.value.message()).startswith(UNKNOWN)

    asyncio.run(infer())


def test_async_infer_answers_many_at_once_each_with_its_own(serving: Serving) -> None:
    with triton.InferenceServerClient(serving.address, concurrency=4) as client:
        waiting = []
        for number in range(12):
            rows = [FIRST + number, SECOND]
            inputs = [
                triton.InferInput(f"INPUT{i}", [1, 16], "INT32").set_data_from_numpy(row)
                for i, row in enumerate(rows)
            ]
            waiting.append(client.async_infer("simple", inputs))
        for number, request in enumerate(waiting):
            np.testing.assert_array_equal(request.get_result().as_numpy("OUTPUT0"), FIRST + number + SECOND)


def test_one_models_statistics_are_one_entry_that_counts(client: Any) -> None:
    def entry() -> Any:
        (entry,) = client.get_inference_statistics("simple")["model_stats"]
        return entry

    before = entry()
    client.infer("simple", mixed_inputs())
    after = entry()
    for count in ("inference_count", "execution_count"):
        assert after[count] == before[count] + 1
    phases = after["inference_stats"]
    assert phases["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
    counts = {phases[name]["count"] for name in ("compute_input", "compute_infer", "compute_output")}
    assert counts == {phases["compute_infer"]["count"]}, "perf_analyzer aborts where these three differ"


def test_input_and_output_objects_can_be_used_again(client: Any) -> None:
    inputs, outputs = mixed_inputs(), mixed_outputs()
    for _ in range(2):
        is_right(client.infer("simple", inputs, outputs=outputs))
    inputs[0].set_data_from_numpy(FIRST * 2, binary_data=True)
    outputs[0] = triton.InferRequestedOutput("OUTPUT0", binary_data=False)
    result = client.infer("simple", inputs, outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), FIRST * 2 + SECOND)


def test_three_inputs_come_back_as_three_outputs(client: Any) -> None:
    arrays = [np.random.default_rng(i).standard_normal((2, 3 + i), np.float32) for i in range(3)]
    inputs = [
        triton.InferInput(f"INPUT{i}", array.shape, "FP32").set_data_from_numpy(array, binary_data=i != 1)
        for i, array in enumerate(arrays)
    ]
    result = client.infer("onnx_zero_3_float32", inputs[::-1])
    for index, array in enumerate(arrays):
        np.testing.assert_array_equal(result.as_numpy(f"OUTPUT{index}"), array)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("count", "expected"), [(1, 1), (3, 3), (99, 6)])
def test_classification_gives_the_best_classes_with_their_labels(
    client: Any, count: int, expected: int, binary: bool
) -> None:
    scores = np.random.default_rng(count).permuted(np.tile(np.arange(6, dtype=np.float32), (2, 1)), axis=1)
    given = triton.InferInput("INPUT0", [2, 6], "FP32").set_data_from_numpy(scores)
    wanted = triton.InferRequestedOutput("OUTPUT0", binary_data=binary, class_count=count)
    answer = client.infer("ranked", [given], outputs=[wanted]).as_numpy("OUTPUT0")
    assert answer.shape == (2, expected)
    for row, texts in zip(scores, answer, strict=True):
        best = np.argsort(-row)[:expected]
        came = [text.decode() if isinstance(text, bytes) else text for text in texts]
        assert came == [f"{2 * row[i]:f}:{i}:{ANIMALS[i]}" for i in best]


@pytest.mark.slow
def test_a_thousand_requests_leave_no_memory_behind(serving: Serving, client: Any) -> None:
    def a_thousand() -> None:
        for _ in range(1000):
            client.infer("simple", mixed_inputs(), outputs=mixed_outputs())

    assert serving.leaked_bytes(a_thousand) < 2**19
