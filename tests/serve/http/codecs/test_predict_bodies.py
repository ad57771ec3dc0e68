"""Every kind of body on ``:predict`` means the same arrays, and is told by its bytes."""

import base64
import io
import json
import struct
import zlib
from itertools import pairwise

import numpy as np
import pytest
from halfeven.models.errors import BadRequest, TooLarge
from halfeven.models.spec.datatypes import Wire
from halfeven.models.spec.spec import ModelSpec, TensorSpec
from halfeven.serve.http.codecs.predict import is_quick, read_body_of
from halfeven.serve.http.limits.memory_budget import unlimited
from PIL import Image
from safetensors.numpy import save

from tests.serve.http.bodies import npy, npz, png
from tests.specs import tensor

FORM = "multipart/form-data; boundary=xx"
CURL = "application/x-www-form-urlencoded"
SIZE = 4
ENTRY = {"size": [SIZE, SIZE], "color": "L", "scale": 1 / 16}
MIB = 2**20


Y = tensor("y", "FP32", -1)
SEEING = ModelSpec("seeing", (tensor("image", "FP32", -1, 1, SIZE, SIZE, picture=ENTRY),), (Y,), 4)
FREE = ModelSpec("free", (tensor("image", "FP32", -1, 1, "1..9", "1..9", picture={"color": "L"}),), (Y,), 4)
PAIR = ModelSpec("pair", tuple(tensor(n, "UINT8", -1, 4, 4, picture={"color": "L"}) for n in "ab"), (Y,), 4)
MIXED = ModelSpec("mixed", (*SEEING.inputs, tensor("ids", "INT64", -1, 2)), (Y,), 4)
PLAIN = ModelSpec("plain", (tensor("x", "FP32", -1, 3),), (Y,), 4)
ALONE = ModelSpec("alone", (tensor("image", "FP32", 1, SIZE, SIZE, picture=ENTRY),), (Y,), 0)


@pytest.fixture
def grey() -> np.ndarray:
    """Pixels [3, 4, 4]."""
    return np.random.default_rng().integers(0, 17, (3, SIZE, SIZE), np.uint8)


def png_of_rows(rows: bytes, interlaced: bool = False, chunks: int = 1) -> bytes:
    """A sound PNG of 4 x 4 grey pixels whose compressed data are ``rows``, in so many chunks."""
    packed, header = zlib.compress(rows), struct.pack(">IIBBBBB", SIZE, SIZE, 8, 0, 0, 0, interlaced)
    cuts = [len(packed) * i // chunks for i in range(chunks + 1)]
    parts = [(b"IDAT", packed[begin:end]) for begin, end in pairwise(cuts)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", header), *parts, (b"IEND", b""))
    )


def form(*parts: tuple[str, bytes]) -> bytes:
    head = 'Content-Disposition: form-data; name="%s"; filename="%s.png"'
    return (
        b"".join(b"--xx\r\n%s\r\n\r\n%s\r\n" % ((head % (n, n)).encode(), data) for n, data in parts)
        + b"--xx--\r\n"
    )


def read(spec: ModelSpec, body: bytes, content_type: str = CURL) -> list[np.ndarray]:
    return read_body_of(spec, content_type, body, MIB, unlimited()).arrays


def as_json(*pictures: bytes, key: str | None = None) -> bytes:
    files = [{"b64": base64.b64encode(data).decode()} for data in pictures]
    return json.dumps({"instances": [{key: file} for file in files] if key else files}).encode()


def test_pictures_are_the_same_rows_however_they_are_sent(grey: np.ndarray) -> None:
    wanted = (grey / 16).astype(np.float32)[:, None]
    pictures = [png(pixels) for pixels in grey]
    for body, kind in (
        (form(*(("file", data) for data in pictures)), FORM),
        (form(*zip("abc", pictures, strict=True)), FORM),
        (as_json(*pictures), CURL),
        (as_json(*pictures, key="image"), CURL),
        (npy(wanted), CURL),
        (npz(image=wanted), "application/x-npz"),
        (json.dumps({"instances": wanted.tolist()}).encode(), CURL),
    ):
        (array,) = read(SEEING, body, kind)
        np.testing.assert_array_equal(array, wanted)
        assert array.dtype == np.float32 and array.flags.c_contiguous
    np.testing.assert_array_equal(read(SEEING, pictures[0])[0], wanted[:1])


def test_on_a_smaller_wire_pictures_are_pixels(grey: np.ndarray) -> None:
    (image,) = SEEING.inputs
    small = TensorSpec(image.name, "FP32", image.shape, picture=ENTRY, wire=Wire("UINT8"))
    spec = ModelSpec("small", (small,), (Y,), 4).on_the_wire()
    (array,) = read(spec, form(*(("file", png(pixels)) for pixels in grey)), FORM)
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, grey[:, None])
    np.testing.assert_array_equal(read(spec, npy(grey[:, None]))[0], grey[:, None])
    with pytest.raises(BadRequest, match="expected datatype UINT8, got FP32"):
        read(spec, npy(grey[:, None].astype(np.float32)))


def test_a_model_that_is_not_batched_takes_one_picture(grey: np.ndarray) -> None:
    (array,) = read(ALONE, png(grey[0]))
    np.testing.assert_array_equal(array, (grey[:1] / 16).astype(np.float32))
    with pytest.raises(TooLarge, match="more than 1 parts"):
        read(ALONE, form(("f", png(grey[0])), ("f", png(grey[1]))), FORM)


def test_several_picture_inputs_are_told_apart_by_the_forms_fields(grey: np.ndarray) -> None:
    one, other, third = (png(pixels) for pixels in grey)
    a, b = read(PAIR, form(("b", one), ("a", other), ("b", third), ("a", one)), FORM)
    np.testing.assert_array_equal(a, grey[[1, 0]])
    np.testing.assert_array_equal(b, grey[[0, 2]])
    with pytest.raises(BadRequest, match=r"missing required input\(s\) \['b'\]"):
        read(PAIR, form(("a", one)), FORM)
    with pytest.raises(BadRequest, match=r"axis 0 \(batch\) is 1, but input 'a' has 2"):
        read(PAIR, form(("a", one), ("b", other), ("a", third)), FORM)


def test_pictures_of_any_size_keep_their_own_and_are_equal_in_one_request(grey: np.ndarray) -> None:
    (array,) = read(FREE, png(grey[0][:, :3]))
    np.testing.assert_array_equal(array[0, 0], grey[0][:, :3])
    with pytest.raises(BadRequest, match=r"must be equal: got \[1, 4, 4\] and \[1, 2, 4\]"):
        read(FREE, form(("f", png(grey[0])), ("f", png(grey[1][:2]))), FORM)
    with pytest.raises(BadRequest, match=r"expected shape \[-1,1,1..9,1..9\], got \[1,1,10,4\]"):
        read(FREE, png(np.zeros((10, 4), np.uint8)))


WHOLE = png(np.zeros((SIZE, SIZE), np.uint8))
BAD: dict[str, tuple[ModelSpec, bytes, str, str]] = {
    "a picture for numbers": (
        PLAIN,
        WHOLE,
        CURL,
        r"'plain' takes no pictures.*send numbers for 'x' \(FP32 \[-1,3\]\)",
    ),
    "a form for numbers": (PLAIN, form(("x", WHOLE)), FORM, "takes no pictures"),
    "an empty form": (SEEING, b"--xx--\r\n", FORM, "the form has no file"),
    "one of three": (
        SEEING,
        form(("a", WHOLE), ("b", WHOLE[:45]), ("c", WHOLE)),
        FORM,
        "^file 'b.png': the picture",
    ),
    "text in a form": (SEEING, form(("a", b"hello")), FORM, "^file 'a.png': expected a PNG or JPEG file"),
    "an unknown field": (PAIR, form(("c", WHOLE)), FORM, r"fields are \['c'\].*inputs \['a', 'b'\]"),
    "a picture alone of two": (PAIR, WHOLE, CURL, "does not say which of the inputs"),
    "pictures of a mixed model": (
        MIXED,
        form(("image", WHOLE)),
        FORM,
        "send an npz file, for not all are pictures",
    ),
    "one array of two": (
        PAIR,
        npy(np.zeros(3)),
        CURL,
        "an npy file has one array, model 'pair' has the inputs",
    ),
    "an array missing": (PAIR, npz(a=np.zeros((1, 4, 4), np.uint8)), CURL, r"missing .*\['b'\]"),
    "an array too many": (PLAIN, npz(x=np.zeros((1, 3), np.float32), z=np.zeros(1)), CURL, "got 2 inputs"),
    "FP64, numpy's own": (PLAIN, npy(np.zeros((1, 3))), CURL, "expected datatype FP32, got FP64"),
    "another shape": (
        PLAIN,
        npy(np.zeros((1, 4), np.float32)),
        CURL,
        r"expected shape \[-1,3\], got \[1,4\]",
    ),
    "said to be webp": (SEEING, b"RIFF", "image/webp", "said to be image/webp, but is neither PNG nor JPEG"),
    "said to be npy": (PLAIN, b"hello", "application/x-npy", r"begins with 68 65.*--data-binary @file"),
    "said to be npz, empty": (PLAIN, b"", "application/x-npz", "begins with nothing"),
    "empty": (PLAIN, b"", CURL, r"the body is empty: expected {\"instances\".*--data-binary @file"),
    "a webp": (
        SEEING,
        b"RIFF\0\0\0\0WEBP",
        CURL,
        "the body begins with 52 49 46 46 00 .*: expected .* a PNG",
    ),
    "safetensors": (
        PLAIN,
        save({"x": np.zeros((1, 3), np.float32)}),
        CURL,
        "the body begins with .*npz file",
    ),
    "no base64": (
        SEEING,
        b'{"instances": [{"b64": "?"}]}',
        CURL,
        r"instances\[0\]: the string under 'b64' is not",
    ),
    "no string": (SEEING, b'{"instances": [{"b64": 1}]}', CURL, r"instances\[0\]: expected {\"b64\""),
    "mixed instances": (
        SEEING,
        as_json(WHOLE)[:-2] + b", [1]]}",
        CURL,
        r"instances\[1\]: expected {\"b64\".* like the others, got a list of 1",
    ),
    "a bad picture in JSON": (
        SEEING,
        as_json(WHOLE, b"GIF"),
        CURL,
        r"instances\[1\]: expected a PNG or JPEG",
    ),
    "base64 for numbers": (PLAIN, as_json(WHOLE), CURL, r"instances\[0\]: expected the inputs \['x'\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_body_that_does_not_fit_is_refused_with_what_to_send(case: str) -> None:
    spec, body, content_type, fault = BAD[case]
    with pytest.raises(BadRequest, match=fault):
        read(spec, body, content_type)


def test_what_an_npz_unpacks_to_is_bounded() -> None:
    out = io.BytesIO()
    np.savez_compressed(out, x=np.zeros((MIB, 3), np.float32))
    with pytest.raises(TooLarge, match="unpacks to"):
        read(PLAIN, out.getvalue())


def test_only_short_json_and_npy_that_is_a_view_are_read_on_the_event_loop() -> None:
    assert is_quick(CURL, b'{"instances": [[1, 2, 3]]}') and is_quick("", npy(np.zeros(MIB)))
    for body, kind in (
        (WHOLE, CURL),
        (as_json(WHOLE), CURL),
        (npz(x=np.zeros(3)), CURL),
        (npy(np.zeros((300, 300), order="F")), CURL),
        (npy(np.zeros(MIB, ">f4")), CURL),
        (form(), FORM),
        (b" " * 70_000, CURL),
        (rb'{"instances": [{"\u0062\u0036\u0034": "iVBORw0K"}]}', CURL),
    ):
        assert not is_quick(kind, body)


# Adam7 has 23 bytes for 4 x 4 grey pixels: passes of 2, 2, 3, 6 and 10 bytes, the others are empty.
@pytest.mark.parametrize(
    ("interlaced", "whole", "broken_off"), [(False, 20, [5, 15]), (True, 23, [2, 4, 7, 13])]
)
def test_a_png_whose_data_end_after_a_row_is_refused_and_a_whole_one_is_taken(
    interlaced: bool, whole: int, broken_off: list[int]
) -> None:
    for chunks in (1, 3):
        assert read(SEEING, png_of_rows(bytes(whole), interlaced, chunks))[0].shape == (1, 1, SIZE, SIZE)
        for size in broken_off:
            for body in (
                png_of_rows(bytes(size), interlaced, chunks),
                as_json(png_of_rows(bytes(size), interlaced)),
            ):
                with pytest.raises(BadRequest, match="send the whole file"):
                    read(SEEING, body)


def test_a_png_of_every_kind_that_pillow_writes_is_whole() -> None:
    for height, width in ((1, 1), (3, 9), (300, 200)):
        pixels = np.random.default_rng().integers(0, 256, (height, width, 3), np.uint8)
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
            out = io.BytesIO()
            Image.fromarray(pixels).convert(mode).save(out, "PNG")
            assert read(SEEING, out.getvalue())[0].shape == (1, 1, SIZE, SIZE), mode
