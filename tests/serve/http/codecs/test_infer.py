"""The codec against a stranger's: tritonclient makes the requests and reads the answers, with no network."""

import json
from dataclasses import astuple
from time import thread_time
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from halfeven.models.errors import BadRequest, EngineFailed
from halfeven.models.spec.datatypes import DATATYPES
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.batching.interface import NO_TERMS
from halfeven.serve.http.codecs.infer import InferCodec, InferRequest
from halfeven.serve.http.codecs.json_numbers import MANY, PIECE
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.serve.http.codecs.infer_requests import asked, read_by_client
from tests.specs import tensor

PARAMETERS = {"halfeven_precision": "fp16", "halfeven_digest": "0123456789ab"}
FREE = Dim(0, None)


def model(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (), rows: int = 8) -> InferCodec:
    return InferCodec(ModelSpec("m", inputs, outputs or inputs, rows))


X = tensor("x", "FP32", -1, 4)
CODEC = model(X)


def body_of(data: Any = None, **changes: Any) -> bytes:
    """A JSON request for x; ``given`` are the input's parameters, ``...`` leaves a field out."""
    entry = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4] if data is None else data}
    more = {key: changes.pop(key) for key in ("id", "parameters", "outputs") if key in changes}
    if "given" in changes:
        entry["parameters"] = changes.pop("given")
    entry = {key: value for key, value in {**entry, **changes}.items() if value is not ...}
    return json.dumps({"inputs": [entry], **more}).encode()


# The arrays that hypothesis draws: any numpy array of any datatype, zero-size and non-finite ones too.
NAMES = [name for name in DATATYPES if name != "BF16"]
ARRAYS = st.sampled_from(NAMES).flatmap(
    lambda name: st.tuples(
        st.just(name),
        hnp.arrays(DATATYPES[name].numpy, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)),
    )
)


@pytest.mark.slow
@given(ARRAYS, st.booleans(), st.booleans())
def test_any_array_comes_back_as_it_went_in_binary_and_json(
    drawn: tuple[str, np.ndarray], binary_in: bool, binary_out: bool
) -> None:
    name, array = drawn
    codec = model(TensorSpec("x", name, (FREE,) * array.ndim), rows=0)
    outputs = [triton.InferRequestedOutput("x", binary_data=binary_out)]
    request = codec.read(*asked(array, name, binary_in, outputs))
    np.testing.assert_array_equal(request.arrays[0], array)
    assert request.arrays[0].dtype == array.dtype
    response = codec.write(request, request.arrays, "3", PARAMETERS)
    np.testing.assert_array_equal(read_by_client(*response).as_numpy("x"), array)
    assert (response.header_length is not None) == (binary_out and array.size > 0)


@pytest.mark.slow
@given(hnp.arrays(np.uint16, hnp.array_shapes(max_dims=2)), st.booleans())
def test_bfloat16_goes_both_ways_binary_and_as_exact_json_numbers(bits: np.ndarray, binary_out: bool) -> None:
    array = bits.view(DATATYPES["BF16"].numpy)
    codec = model(TensorSpec("x", "BF16", (FREE,) * array.ndim), rows=0)
    outputs = [triton.InferRequestedOutput("x", binary_data=binary_out)]
    request = codec.read(*asked(array, "BF16", True, outputs))
    np.testing.assert_array_equal(request.arrays[0].astype(np.float32), array.astype(np.float32))
    response = codec.write(request, request.arrays, "3", PARAMETERS)
    if binary_out:
        back = read_by_client(*response).as_numpy("x").astype(np.float32)
    else:
        back = np.array(json.loads(response.body)["outputs"][0]["data"], np.float32).reshape(array.shape)
    np.testing.assert_array_equal(back, array.astype(np.float32))


def test_binary_inputs_are_read_only_views_of_the_body() -> None:
    array = np.random.default_rng().standard_normal((7, 4), np.float32)
    body, head = asked(array, "FP32", True)
    for _ in range(2):  # the second time by the remembered header
        (view,) = CODEC.read(body, head).arrays
        assert np.shares_memory(view, np.frombuffer(body, np.uint8)) and not view.flags.writeable
        np.testing.assert_array_equal(view, array)


def test_a_remembered_header_is_not_taken_for_a_body_of_another_length() -> None:
    body, head = asked(np.ones((1, 4), np.float32), "FP32", True)
    assert CODEC.read(body, head).rows == 1
    with pytest.raises(BadRequest, match="expecting 1 additional bytes for model 'm'"):
        CODEC.read(body[:-1], head)
    with pytest.raises(BadRequest, match="unexpected additional input data for model 'm'"):
        CODEC.read(body + b"!", head)
    np.testing.assert_array_equal(CODEC.read(body, head).arrays[0], np.ones((1, 4)))


def test_the_memory_of_headers_is_bounded() -> None:
    codec = model(tensor("x", "FP32", -1, -1), rows=1000)
    for rows in range(1, 700):
        codec.read(*asked(np.ones((rows, 1), np.float32), "FP32", True))
    assert len(codec._plans) <= 256


def test_ids_are_echoed_and_never_remembered_for_another_request() -> None:
    array = np.ones((1, 4), np.float32)
    for id in ("first", "second", "first"):
        request = CODEC.read(*asked(array, "FP32", True, id=id))
        response = CODEC.write(request, [array], "3", PARAMETERS)
        assert read_by_client(*response).get_response()["id"] == id


def test_json_answers_are_flat_and_compact_with_triton_s_key_order() -> None:
    request = CODEC.read(body_of([[1, 2, 3, 4]], id="me"))
    text = CODEC.write(request, [request.arrays[0] * 2], "3", PARAMETERS).body
    assert b'"data":[2.0,4.0,6.0,8.0]' in text
    assert list(json.loads(text)) == ["id", "model_name", "model_version", "parameters", "outputs"]


def test_mixed_json_and_binary_inputs_arrive_in_the_spec_s_order() -> None:
    codec = model(tensor("a", "INT32", -1, 2), tensor("b", "FP32", -1, 2), tensor("c", "FP16", -1, 2))
    arrays = {
        "c": np.array([[1, 2]], np.float16),
        "a": np.array([[3, 4]], np.int32),
        "b": np.array([[5, 6]], np.float32),
    }
    tensors = []
    for name, array in arrays.items():  # an order that is not the spec's
        given = triton.InferInput(name, [1, 2], {"a": "INT32", "b": "FP32", "c": "FP16"}[name])
        tensors.append(given.set_data_from_numpy(array, binary_data=name != "a"))
    body, head = triton.InferenceServerClient.generate_request_body(tensors)
    request = codec.read(body, str(head))
    for array, name in zip(request.arrays, "abc", strict=True):
        np.testing.assert_array_equal(array, arrays[name])


def test_a_remembered_answer_s_header_is_of_its_version_precision_and_shape() -> None:
    codec = model(tensor("x", "FP32", -1, -1))
    for _ in range(2):
        for version, precision, shape in (
            ("3", "fp16", (1, 4)),
            ("3", "fp32", (1, 4)),
            ("4", "fp16", (1, 4)),
            ("4", "fp16", (2, 2)),
        ):
            array = np.random.default_rng().standard_normal(shape).astype(np.float32)
            request = codec.read(*asked(array, "FP32", True))
            response = codec.write(request, [array], version, {"halfeven_precision": precision})
            result = read_by_client(*response)
            np.testing.assert_array_equal(result.as_numpy("x"), array)
            said = result.get_response()
            assert (said["model_version"], said["parameters"]) == (version, {"halfeven_precision": precision})
    request = codec.read(*asked(np.ones((1, 4), np.float32), "FP32", True))
    with pytest.raises(EngineFailed, match="output 'x' as float64"):
        codec.write(request, [np.ones((1, 4))], "3", {"halfeven_precision": "fp16"})


def test_the_memory_of_answers_headers_is_bounded() -> None:
    codec = model(tensor("x", "FP32", -1, -1), rows=1000)
    for rows in range(1, 700):
        array = np.ones((rows, 1), np.float32)
        codec.write(codec.read(*asked(array, "FP32", True)), [array], "3", PARAMETERS)
    assert 0 < len(codec._heads) <= 256


def test_an_output_s_own_binary_data_overrides_the_request_s() -> None:
    codec = model(X, outputs=(X, tensor("y", "FP32", -1, 4)))
    outputs = [{"name": "y", "parameters": {"binary_data": False}}, {"name": "x"}]
    request = codec.read(body_of(parameters={"binary_data_output": True}, outputs=outputs))
    assert [(asked.index, asked.binary) for asked in request.outputs] == [(1, False), (0, True)]
    assert all(asked.binary for asked in codec.read(body_of(parameters={"binary_data_output": True})).outputs)
    assert not any(asked.binary for asked in codec.read(body_of()).outputs)


def test_numbers_that_are_not_finite_are_written_as_tokens_and_counted() -> None:
    request = CODEC.read(body_of())
    odd = np.array([[np.nan, np.inf, -np.inf, 1.5]], np.float32)
    response = CODEC.write(request, [odd], "3", PARAMETERS)
    assert b"[NaN,Infinity,-Infinity,1.5]" in response.body
    assert json.loads(response.body)["parameters"] == {**PARAMETERS, "nonfinite_count": 3}
    assert (
        "nonfinite_count"
        not in json.loads(CODEC.write(request, [np.zeros((1, 4), np.float32)], "3", PARAMETERS).body)[
            "parameters"
        ]
    )


@pytest.mark.parametrize(
    ("nan_as", "written"),
    [("null", b"[null,null,null,1.5]"), ("string", b'["NaN","Infinity","-Infinity",1.5]')],
)
def test_numbers_that_are_not_finite_are_written_as_asked_and_counted(nan_as: str, written: bytes) -> None:
    request = CODEC.read(body_of(parameters={"nan_as": nan_as}))
    odd = np.array([[np.nan, np.inf, -np.inf, 1.5]], np.float32)
    body = CODEC.write(request, [odd], "3", PARAMETERS).body
    assert written in body and json.loads(body)["parameters"]["nonfinite_count"] == 3


@pytest.mark.parametrize("width", [PIECE, PIECE + 1, 3 * PIECE])
def test_a_long_answer_in_pieces_is_the_same_list_with_its_odd_numbers_counted(width: int) -> None:
    codec = model(X, outputs=(tensor("y", "FP32", -1, width),))
    array = np.random.default_rng().standard_normal((1, width)).astype(np.float32)
    odd = np.random.default_rng().choice(width, 7, replace=False)
    array[0, odd[:3]], array[0, odd[3:]] = np.nan, -np.inf
    message = json.loads(codec.write(codec.read(body_of()), [array], "3", PARAMETERS).body)
    np.testing.assert_array_equal(np.array(message["outputs"][0]["data"], np.float32), array[0])
    assert message["parameters"]["nonfinite_count"] == 7


def test_of_a_large_answer_the_outputs_in_json_and_ranked_ones_are_slow_to_write() -> None:
    codec = model(X, outputs=(tensor("a", "FP32", -1, 4), tensor("b", "FP32", -1, 2 * MANY)))
    answers = [np.ones((1, 4), np.float32), np.ones((1, 2 * MANY), np.float32)]
    for small, large, quick in (
        (True, True, True),
        (False, True, True),
        (True, False, False),
        (True, None, True),
    ):
        outputs = [triton.InferRequestedOutput("a", binary_data=small)]
        outputs += [] if large is None else [triton.InferRequestedOutput("b", binary_data=large)]
        request = codec.read(*asked(np.ones((1, 4), np.float32), "FP32", True, outputs))
        assert codec.is_quick_to_write(request, answers) == quick
    ranked = triton.InferRequestedOutput("b", binary_data=True, class_count=3)
    request = codec.read(*asked(np.ones((1, 4), np.float32), "FP32", True, [ranked]))
    assert not codec.is_quick_to_write(request, answers)


def test_terms_are_read_with_the_request_and_remembered_with_its_header() -> None:
    given = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
    body, head = triton.InferenceServerClient.generate_request_body([given], priority=1, timeout=250)
    for _ in range(2):
        assert astuple(CODEC.read(body, str(head)).terms) == (1, 250_000, False, None)
    assert CODEC.read(*asked(np.ones((1, 4), np.float32), "FP32", True)).terms is NO_TERMS
    assert CODEC.read(*asked(np.ones((1, 4), np.float32), "FP32", True, id="me")).terms.key == "me"


def test_numbers_that_are_not_finite_are_read_from_tokens() -> None:
    (array,) = CODEC.read(body_of([float("nan"), float("inf"), float("-inf"), 1])).arrays
    np.testing.assert_array_equal(array, [[np.nan, np.inf, -np.inf, 1]])


def test_a_word_null_in_a_name_does_not_disturb_the_numbers() -> None:
    codec = model(X, outputs=(tensor("null", "FP32", -1, 4),))
    text = codec.write(codec.read(body_of(id="null")), [np.ones((1, 4), np.float32)], "3", PARAMETERS).body
    assert json.loads(text)["outputs"][0]["data"] == [1, 1, 1, 1]
    assert json.loads(text)["parameters"] == PARAMETERS


def test_a_raw_request_is_one_tensor_and_is_answered_in_binary() -> None:
    codec = model(tensor("x", "FP32", -1, -1))
    array = np.random.default_rng().standard_normal(9).astype(np.float32)
    request = codec.read(array.tobytes(), "0")
    np.testing.assert_array_equal(request.arrays[0], array[None])
    assert request.rows == 1 and request.outputs[0].binary


def test_data_nested_deeper_by_axes_of_one_is_flattened() -> None:
    codec = model(tensor("x", "INT64", -1, -1))
    for depth in (50, 100):
        data: Any = 7
        for _ in range(depth):
            data = [data]
        (array,) = codec.read(body_of(data, shape=[1, 1], datatype="INT64")).arrays
        np.testing.assert_array_equal(array, [[7]])


def test_an_answer_of_the_wrong_datatype_is_a_fault_of_ours_and_named() -> None:
    with pytest.raises(EngineFailed, match="output 'x' as float64"):
        CODEC.write(CODEC.read(body_of()), [np.zeros((1, 4))], "3", PARAMETERS)


@pytest.mark.parametrize(
    ("datatype", "bad"),
    [
        ("UINT8", 300),
        ("UINT8", -1),
        ("INT8", -129),
        ("INT64", 1.5),
        ("INT64", 1.0),
        ("INT64", 2**63),
        ("INT32", True),
        ("INT32", "1"),
        ("INT32", 2**80),
        ("UINT64", 2**64),
        ("BOOL", 1),
        ("BOOL", "true"),
        ("FP16", 70000),
        ("BF16", 3.4e38 * 1.01),
        ("FP64", None),
    ],
)
def test_a_number_that_the_datatype_does_not_hold_is_named_with_its_place(datatype: str, bad: Any) -> None:
    good = [False] if datatype == "BOOL" else [1]
    data = [good * 2, [*good, bad], good * 2]
    codec = model(tensor("x", datatype, -1, 2))
    with pytest.raises(BadRequest, match=rf"input 'x' of model 'm': data\[1\]\[1\]: expected .*{datatype}"):
        codec.read(body_of(data, shape=[3, 2], datatype=datatype))


def test_integers_at_the_edges_of_their_datatype_are_exact() -> None:
    for name in ("UINT8", "INT16", "UINT32", "INT64", "UINT64"):
        limits = np.iinfo(DATATYPES[name].numpy)
        codec = model(tensor("x", name, -1))
        data = [int(limits.min), int(limits.max)]
        assert codec.read(body_of(data, shape=[2], datatype=name)).arrays[0].tolist() == data


@pytest.mark.parametrize("head", ["-1", "+2", "", "99999999999999999999", " 5", "0x10", "1e3", "٣"])
def test_a_header_length_that_is_no_number_of_bytes_is_refused(head: str) -> None:
    with pytest.raises(BadRequest, match="Inference-Header-Content-Length must be a number"):
        CODEC.read(body_of(), head)


def test_a_header_length_beyond_the_body_is_refused_with_the_range() -> None:
    body = body_of()
    with pytest.raises(BadRequest, match=rf"should be in range \(0, {len(body)}\), got: 999999999999"):
        CODEC.read(body, "999999999999")


@pytest.mark.parametrize("moved", [-40, 16], ids=["cuts the JSON", "takes in a tensor"])
def test_a_header_length_that_is_not_the_json_s_is_refused(moved: int) -> None:
    body, head = asked(np.ones((1, 4), np.float32), "FP32", True)
    assert head is not None
    with pytest.raises(BadRequest, match="JSON"):
        CODEC.read(body, str(int(head) + moved))


def test_a_byte_count_that_is_not_the_shape_s_is_refused() -> None:
    body, head = asked(np.ones((1, 4), np.float32), "FP32", True)
    with pytest.raises(
        BadRequest, match=r"input byte size mismatch for input 'x' for model 'm'\. Expected 16, got 17"
    ):
        CODEC.read(body.replace(b"16", b"17") + b"!", head)


def test_inputs_disagreeing_in_batch_or_in_a_named_dimension_are_refused() -> None:
    codec = model(tensor("a", "FP32", -1, "n"), tensor("b", "FP32", -1, "n"))

    def request(a: list[int], b: list[int]) -> InferRequest:
        inputs = [
            {"name": name, "shape": shape, "datatype": "FP32", "data": [0] * int(np.prod(shape))}
            for name, shape in (("a", a), ("b", b))
        ]
        return codec.read(json.dumps({"inputs": inputs}).encode())

    assert request([2, 3], [2, 3]).rows == 2
    with pytest.raises(
        BadRequest, match=r"input 'b' for model 'm': axis 0 \(\(batch\)\) is 1, but input 'a' has 2"
    ):
        request([2, 3], [1, 3])
    with pytest.raises(
        BadRequest, match=r"input 'b' for model 'm': axis 1 \(n\) is 4, but input 'a' has 3 there"
    ):
        request([2, 3], [2, 4])


RAW = {
    "two inputs": (
        model(X, tensor("z", "FP32", -1)),
        16,
        r"Raw request must only have 1 input \(found 1\) .* got 2 inputs",
    ),
    "two free sizes": (
        model(tensor("x", "FP32", -1, -1, -1)),
        16,
        "can not be deduced because there are more than one",
    ),
    "another size": (CODEC, 20, "input byte size mismatch for input 'x' for model 'm'. Expected 16, got 20"),
    "a part of a row": (model(tensor("x", "FP32", -1, -1, 2)), 20, "Expected 16, got 20"),
    "beyond the bounds": (
        model(tensor("x", "FP32", -1, "1..3")),
        16,
        r"expected shape \[-1,1..3\], got \[1,4\]",
    ),
    "nothing": (CODEC, 0, "Expected 16, got 0"),
}


@pytest.mark.parametrize("case", RAW)
def test_a_raw_request_that_cannot_be_deduced_is_refused(case: str) -> None:
    codec, size, fault = RAW[case]
    with pytest.raises(BadRequest, match=fault):
        codec.read(bytes(size), "0")


def test_a_shape_without_elements_whose_other_sizes_numpy_does_not_hold_is_refused() -> None:
    codec = model(tensor("x", "FP32", -1, "0..", "0.."))
    with pytest.raises(BadRequest, match="byte size overflow for input 'x'"):
        codec.read(body_of([], shape=[1, 0, 2**62]))


def test_a_shape_of_very_many_sizes_is_refused_at_once() -> None:
    """The product of all sizes once took ten seconds of the processor."""
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2**20] * 200_000, "data": []}]})
    began_s = thread_time()
    with pytest.raises(BadRequest, match="exceed maximum size") as refused:
        CODEC.read(body.encode())
    assert thread_time() - began_s < 2
    assert len(str(refused.value)) < 1000
