"""Pixels and numbers: what the picture entry means for every shape that a picture can have."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadFolder
from halfeven.models.pictures.pixels import Picture
from halfeven.models.spec.spec import Dim, TensorSpec

MEAN, STD = [0.491, 0.482, 0.447], [0.247, 0.243, 0.262]
COLOURS = {"color": "RGB", "scale": 1 / 255, "mean": MEAN, "std": STD}


def tensor(shape: Sequence[int | str], datatype: str = "FP32", **entry: Any) -> TensorSpec:
    dims = tuple(Dim.parse(size) for size in shape)
    return TensorSpec("image", datatype, dims, picture=entry or None)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng().integers(0, 256, (6, 5, 3), np.uint8)


def numbers_of(pixels: np.ndarray) -> np.ndarray:
    """The numbers of pixels with the channels last, in FP64: (pixel · scale − mean) / std."""
    return (pixels / 255 - np.array(MEAN)) / np.array(STD)


@pytest.mark.parametrize(
    ("shape", "batched", "laid"),
    [
        ([-1, 3, 6, 5], True, (2, 0, 1)),
        ([-1, 6, 5, 3], True, (0, 1, 2)),
        ([-1, -1, 6, 5], True, (2, 0, 1)),
        ([3, 6, 5], False, (2, 0, 1)),
    ],
)
def test_channels_lie_first_wherever_that_fits_and_else_last(
    shape: list[int], batched: bool, laid: tuple[int, int, int], pixels: np.ndarray
) -> None:
    row = Picture.of(tensor(shape, **COLOURS), batched).row(pixels)
    np.testing.assert_array_equal(row, numbers_of(pixels).transpose(laid).astype(np.float32))
    assert row.dtype == np.float32 and row.flags.c_contiguous


def test_three_rows_of_pixels_are_not_taken_for_three_channels() -> None:
    assert Picture.of(tensor([-1, 3, 3, 3], **COLOURS), True).channel_axis == -3
    assert Picture.of(tensor([-1, 4, 4, 3], **COLOURS), True).channel_axis == -1


@pytest.mark.parametrize(
    ("shape", "batched", "row"),
    [
        ([-1, 1, 6, 5], True, (1, 6, 5)),
        ([-1, 6, 5, 1], True, (6, 5, 1)),
        ([-1, 6, 5], True, (6, 5)),
        ([1, 1, 6, 5], False, (1, 1, 6, 5)),
    ],
)
def test_a_grey_picture_has_one_channel_or_no_axis_of_them(
    shape: list[int], batched: bool, row: tuple[int, ...], pixels: np.ndarray
) -> None:
    picture = Picture.of(tensor(shape, color="L", scale=0.0625), batched)
    grey = pixels[..., :1]
    assert picture.row(grey).shape == row
    np.testing.assert_array_equal(picture.row(grey).ravel(), grey.ravel() * np.float32(0.0625))


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
@pytest.mark.parametrize("shape", [[-1, 3, 6, 5], [-1, 6, 5, 3]])
def test_an_outputs_numbers_become_the_pixels_they_were_made_from(
    shape: list[int], datatype: str, pixels: np.ndarray
) -> None:
    picture = Picture.of(tensor(shape, datatype, **COLOURS), True)
    coarse = pixels // 4 * 4 if datatype in ("FP16", "BF16") else pixels
    back = picture.pixels(picture.row(coarse)).astype(int)
    assert back.shape == pixels.shape
    assert abs(back - coarse).max() <= (1 if datatype in ("FP16", "BF16") else 0)


def test_numbers_beyond_the_pixels_are_cut_off_and_nan_is_black() -> None:
    picture = Picture.of(tensor([-1, 1, 1, 5], color="L", scale=1 / 255), True)
    row = np.array([[[-1, 2, np.nan, np.inf, -np.inf]]], np.float32)
    assert picture.pixels(row).ravel().tolist() == [0, 255, 0, 255, 0]


@pytest.mark.parametrize(
    ("shape", "datatype", "numbers", "pixels"),
    [
        ([-1, 1, 1, 3], "FP32", [0, 0.5, 1], [0, 128, 255]),
        ([-1, 1, 3], "BOOL", [False, True, True], [0, 255, 255]),
        ([-1, 1, 3], "INT64", [-1, 7, 300], [0, 7, 255]),
        ([-1, 1, 1, 3], "UINT8", [0, 7, 255], [0, 7, 255]),
    ],
)
def test_an_image_output_without_an_entry_is_0_to_1_and_integers_are_pixels(
    shape: list[int], datatype: str, numbers: list[Any], pixels: list[int]
) -> None:
    output = tensor(shape, datatype)
    row = np.array(numbers).astype(output.type.numpy).reshape([abs(size) for size in shape[1:]])
    assert Picture.of(output, True).pixels(row).ravel().tolist() == pixels


@pytest.mark.parametrize(
    ("shape", "entry", "fault"),
    [
        ([-1, 4], COLOURS, r"\[-1,4\] has no place for 3 channels: expected \[-1, 3, height, width\]"),
        ([-1, 4, 6, 5], COLOURS, "no place for 3 channels"),
        ([-1, 2, 3, 6, 5], COLOURS, "no place for 3 channels"),
        ([-1, 3, 6, 5], {"color": "RGBA"}, "picture.color = 'RGBA': expected one of L, RGB"),
        ([-1, 3, 6, 5], {"size": [6, 4]}, r"picture.size = \[6, 4\]: expected \[6, 5\], as the shape says"),
        ([-1, 3, 6, 5], {"size": [6]}, r"expected \[height, width\]"),
        ([-1, 3, 6, 5], {"size": [6, True]}, r"expected \[height, width\]"),
        ([-1, 3, "1..4", 5], {"size": [6, 5]}, r"expected \[1..4, 5\]"),
        ([-1, 3, 6, 5], {"scale": 0.0}, "picture.scale = 0.0"),
        ([-1, 3, 6, 5], {"mean": [0.1, 0.2]}, r"picture.mean = \[0.1, 0.2\]: .* per channel, 3 of them"),
        ([-1, 3, 6, 5], {"mean": [float("nan")]}, "finite numbers"),
        ([-1, 3, 6, 5], {"std": [1, 0, 1]}, "picture.std .* positive numbers"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_by_its_key(
    shape: list[Any], entry: dict[str, Any], fault: str
) -> None:
    with pytest.raises(BadFolder, match=fault):
        Picture.of(tensor(shape, **entry), True)


def test_a_uint8_tensor_has_the_pixels_as_they_are(pixels: np.ndarray) -> None:
    picture = Picture.of(tensor([-1, 6, 5, 3], "UINT8", color="RGB"), True)
    np.testing.assert_array_equal(picture.row(pixels), pixels)
    with pytest.raises(BadFolder, match="leave scale, mean and std out"):
        Picture.of(tensor([-1, 6, 5, 3], "UINT8", color="RGB", scale=0.5), True)
    with pytest.raises(BadFolder, match="expected datatype UINT8 or a floating point one, got INT64"):
        Picture.of(tensor([-1, 6, 5, 3], "INT64", color="RGB"), True)
