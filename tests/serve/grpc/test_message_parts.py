"""A message's parts are counted in its bytes as protobuf would read them."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from halfeven.models.errors import BadRequest
from halfeven.serve.grpc import messages
from halfeven.serve.grpc.messages import FEW_BYTES, check_parts, message
from halfeven.serve.grpc.tensors import fields_of

REQUEST = message("ModelInferRequest")
KIND = REQUEST.DESCRIPTOR


def framed(number: int, content: bytes) -> bytes:
    """A field with a length of four bytes, as no writer would write it."""
    length = [len(content) >> shift & 0x7F | 0x80 for shift in (0, 7, 14)]
    return bytes([number << 3 | 2, *length, len(content) >> 21]) + content


def drawn(random: np.random.Generator, elements: int) -> bytes:
    count = int(random.integers(1, 5))
    inputs = [
        {
            "name": f"x{number}",
            "datatype": "FP32",
            "shape": [int(size) for size in random.integers(-3, 2**40, 4)],
            "parameters": {"a": {"string_param": "b"}, "c": {"double_param": 0.5}},
            "contents": {
                "fp32_contents": random.random(elements).tolist(),
                "int64_contents": random.integers(-(2**40), 2**40, elements).tolist(),
                "bytes_contents": [random.bytes(3) for _ in range(elements // 100)],
            },
        }
        for number in range(count)
    ]
    made = REQUEST(model_name="m", id="7", inputs=inputs, raw_input_contents=[random.bytes(4 * elements)])
    return made.SerializeToString()


def test_a_large_message_with_few_parts_is_let_through(random: np.random.Generator) -> None:
    data = drawn(random, 20_000)
    assert len(data) > FEW_BYTES
    check_parts(data, KIND)


MANY = {
    "inputs": b"\x2a\x00" * 40_000,
    "parameters": b"\x22\x00" * 40_000,
    "parameters of an input": framed(5, b"\x22\x00" * 40_000),
    "parameters of an output": framed(6, b"\x12\x00" * 40_000),
    "parameters of many inputs": framed(5, b"\x22\x00" * 2) * 20_000,
    "sizes": framed(5, framed(3, b"\x01" * 70_000)),
    "sizes one by one": framed(5, b"\x18\x01" * 40_000),
    "contents": framed(5, framed(5, b"\x42\x00" * 40_000)),
    "fields that nobody knows": b"\x78\x00" * 40_000,
}


@pytest.mark.parametrize("data", MANY.values(), ids=MANY)
def test_very_many_parts_are_refused(data: bytes) -> None:
    REQUEST.FromString(data)
    with pytest.raises(BadRequest, match="more than 30000 tensors, sizes, parameters"):
        check_parts(data, KIND, most=30_000)


@pytest.mark.slow
def test_what_protobuf_reads_is_read_and_what_is_broken_ends_in_one_error(
    random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "FEW_BYTES", 0)
    refused = 0
    for _ in range(2_000):
        data = bytearray(drawn(random, 5))
        for at in random.integers(0, len(data), int(random.integers(0, 3))):
            data[at] = random.integers(256)
        broken = bytes(data[: random.integers(len(data) // 2, len(data) + 1)])
        try:
            check_parts(broken, KIND)
        except DecodeError as error:
            refused += 1
            if "group" not in str(error):
                with pytest.raises(DecodeError):
                    REQUEST.FromString(broken)
    assert 200 < refused < 2_000


def test_a_negative_size_of_a_shape_is_refused_in_words_of_grpc() -> None:
    asked = REQUEST(model_name="m", inputs=[{"name": "x", "datatype": "FP32", "shape": [-1, 4]}])
    with pytest.raises(
        BadRequest, match=r"input 'x' came with the shape \[-1, 4\]: expected sizes of 0 or more"
    ):
        fields_of(asked)
