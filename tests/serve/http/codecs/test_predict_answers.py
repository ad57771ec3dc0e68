"""The answer has the form that Accept asks for, where it can have that form."""

import base64
import io
import json
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from halfeven.models.errors import BadRequest
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.http.codecs import json_numbers, predict
from halfeven.serve.http.codecs.json_numbers import PIECE
from halfeven.serve.http.codecs.predict import answer_type, is_quick_to_write, write_answer
from PIL import Image

from tests.specs import tensor

JSON, PNG = "application/json", "image/png"
NPY, NPZ = "application/x-npy", "application/x-npz"


dumps = orjson.dumps
X = tensor("x", "FP32", -1, 2)
PAINTED = tensor("painted", "FP32", -1, 3, 4, 5, kind="image")
SCORES = tensor("scores", "FP32", -1, 2)
NUMBERS = ModelSpec("numbers", (X,), (SCORES,), 8)
PICTURE = ModelSpec("picture", (X,), (PAINTED,), 8)
BOTH = ModelSpec("both", (X,), (SCORES, PAINTED), 8)


@pytest.mark.parametrize(
    ("spec", "rows", "accept", "kind"),
    [
        (NUMBERS, 1, "", JSON), (NUMBERS, 1, "*/*", JSON), (NUMBERS, 1, PNG, JSON), (NUMBERS, 1, "text/html", JSON),
        (NUMBERS, 1, f"{NPZ};q=0", JSON), (NUMBERS, 3, NPY, NPY), (NUMBERS, 3, NPZ, NPZ), (BOTH, 3, NPZ, NPZ),
        (PICTURE, 1, "", PNG), (PICTURE, 1, "*/*", PNG), (PICTURE, 1, "image/*", PNG), (PICTURE, 1, JSON, JSON),
        (PICTURE, 1, "text/html", JSON), (PICTURE, 2, "*/*", JSON), (PICTURE, 2, PNG, JSON),
        (BOTH, 1, "*/*", JSON), (BOTH, 1, PNG, PNG),
        (PICTURE, 1, f"{PNG};q=0.1, {JSON};q=0.9", JSON), (PICTURE, 1, f"{JSON};q=0, */*", PNG),
        (NUMBERS, 1, f"text/html, {NPZ};q=0.8, */*;q=0.1", NPZ), (NUMBERS, 1, " IMAGE/PNG , Application/X-NPY", JSON),
        (NUMBERS, 1, f"{NPY};q=much, {NPZ}", NPZ), (NUMBERS, 1, ",;,;q=", JSON),
    ],
)  # fmt: skip
def test_the_first_type_that_the_answer_can_have_is_taken(
    spec: ModelSpec, rows: int, accept: str, kind: str
) -> None:
    assert answer_type(spec, rows, accept) == kind


def test_one_array_cannot_hold_two_outputs() -> None:
    with pytest.raises(
        BadRequest, match="'both' has 2 outputs, an npy file has one array: expected Accept: "
    ):
        answer_type(BOTH, 1, NPY)


@pytest.fixture
def outputs() -> list[np.ndarray]:
    random = np.random.default_rng()
    return [random.standard_normal((2, 2), np.float32), random.random((2, 3, 4, 5), np.float32)]


def pixels(values: np.ndarray) -> np.ndarray:
    return np.rint(values.astype(np.float64) * 255).astype(np.uint8).transpose(1, 2, 0)


def opened(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    return np.asarray(image)


def test_one_row_of_a_picture_is_a_png_file(outputs: list[np.ndarray]) -> None:
    one = [outputs[0][:1], outputs[1][:1]]
    np.testing.assert_array_equal(opened(write_answer(PICTURE, one[1:], PNG)), pixels(one[1][0]))
    np.testing.assert_array_equal(opened(write_answer(BOTH, one, PNG)), pixels(one[1][0]))
    alone = ModelSpec("alone", (X,), (tensor("p", "UINT8", -1, -1, kind="image"),), 0)
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    np.testing.assert_array_equal(opened(write_answer(alone, [grey], PNG)), grey)


def test_in_json_every_picture_is_base64(outputs: list[np.ndarray]) -> None:
    answer = json.loads(write_answer(BOTH, outputs, JSON))["predictions"]
    for row, one in enumerate(answer):
        assert one["scores"] == pytest.approx(outputs[0][row].tolist(), rel=1e-7)
        np.testing.assert_array_equal(
            opened(base64.b64decode(one["painted"]["b64"])), pixels(outputs[1][row])
        )
    alone = json.loads(write_answer(PICTURE, outputs[1:], JSON))["predictions"]
    assert alone == [one["painted"] for one in answer]


def test_numbers_come_back_as_numpy_files(outputs: list[np.ndarray]) -> None:
    np.testing.assert_array_equal(np.load(io.BytesIO(write_answer(NUMBERS, outputs[:1], NPY))), outputs[0])
    came = np.load(io.BytesIO(write_answer(BOTH, outputs, NPZ)))
    assert list(came) == ["scores", "painted"]
    np.testing.assert_array_equal(came["painted"], outputs[1])


def test_pictures_and_long_answers_are_not_written_on_the_event_loop(outputs: list[np.ndarray]) -> None:
    assert is_quick_to_write(NUMBERS, outputs[:1]) and not is_quick_to_write(BOTH, outputs)
    assert not is_quick_to_write(NUMBERS, [np.zeros((2**19, 2), np.float32)])


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(
    "shape", [(2, 3, PIECE), (2 * PIECE + 1,), (1, PIECE + 1), (PIECE + 1, 1), (1, 9, 64, 512), (PIECE, 3)]
)
def test_a_long_answer_in_pieces_is_what_orjson_writes_at_once(
    shape: tuple[int, ...], outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No piece has more numbers than are written in some milliseconds: orjson keeps the interpreter's lock."""
    arrays = [np.random.default_rng().standard_normal(shape).astype(np.float32) for _ in range(outputs)]
    arrays[0][..., -1] = np.nan
    names = ["y", "z"][:outputs]
    spec = ModelSpec("net", (X,), tuple(tensor(name, "FP32", *shape) for name in names), shape[0])
    rows = [dict(zip(names, row, strict=True)) for row in zip(*arrays, strict=True)]
    whole = dumps({"predictions": arrays[0] if outputs == 1 else rows}, option=orjson.OPT_SERIALIZE_NUMPY)
    sizes = list[int]()

    def noting(value: object, option: int) -> bytes:
        sizes.append(numbers_in(value))
        return dumps(value, option=option)

    for module in (json_numbers, predict):
        patched = SimpleNamespace(**{**vars(orjson), "dumps": noting})
        monkeypatch.setattr(module, "orjson", patched)
    assert write_answer(spec, arrays, JSON) == whole
    assert max(sizes) <= PIECE + outputs * max(shape[-1], 1)


def numbers_in(value: object) -> int:
    if isinstance(value, np.ndarray):
        return value.size
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(numbers_in, inner))
