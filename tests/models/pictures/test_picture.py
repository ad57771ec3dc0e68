"""PNG and JPEG bytes to rows: what is taken, what is done to it, and what is refused before it costs anything."""

import io
import struct
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadRequest, BadSamples, TooLarge
from halfeven.models.pictures import picture as module
from halfeven.models.pictures.picture import picture_row, png_of
from halfeven.models.pictures.pixels import Picture
from halfeven.models.spec.spec import Dim, TensorSpec
from PIL import Image

GREY, COLOUR = "L", "RGB"


def taking(color: str, height: int | None = None, width: int | None = None) -> Picture:
    """A picture input whose numbers are the pixels; free sizes unless given."""
    sizes = [Dim() if size is None else Dim(size, size) for size in (height, width)]
    channels = Dim(3, 3) if color == COLOUR else Dim(1, 1)
    return Picture.of(TensorSpec("x", "UINT8", (Dim(), channels, *sizes), picture={"color": color}), True)


def saved(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def colours(height: int = 12, width: int = 9) -> Image.Image:
    return Image.fromarray(np.random.default_rng().integers(0, 256, (height, width, 3), np.uint8))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int = 8, color: int = 2, data: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return module.PNG + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def test_the_pixels_of_a_png_arrive_unchanged() -> None:
    image = colours()
    row = picture_row(saved(image), taking(COLOUR))
    np.testing.assert_array_equal(row, np.asarray(image).transpose(2, 0, 1))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0, "quality": 100}])
def test_a_jpeg_is_what_pillow_decodes(options: dict[str, Any]) -> None:
    data = saved(colours(32, 24), "JPEG", **options)
    wanted = np.asarray(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(picture_row(data, taking(COLOUR)), wanted.transpose(2, 0, 1))


def test_colours_become_grey_by_luma_and_grey_becomes_colours() -> None:
    image = colours()
    np.testing.assert_array_equal(picture_row(saved(image), taking(GREY))[0], np.asarray(image.convert("L")))
    grey = image.convert("L")
    row = picture_row(saved(grey), taking(COLOUR))
    assert (row == np.asarray(grey)).all() and row.shape == (3, 12, 9)


@pytest.mark.parametrize("size", [(4, 3), (30, 40)])
def test_another_size_is_stretched_to_the_entrys_bilinear_and_antialiased(size: tuple[int, int]) -> None:
    image = colours(24, 18)
    wanted = np.asarray(image.resize((size[1], size[0]), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(picture_row(saved(image), taking(COLOUR, *size)), wanted.transpose(2, 0, 1))


def test_shrinking_averages_where_plain_interpolation_would_lose_every_other_pixel() -> None:
    stripes = np.zeros((32, 32), np.uint8)
    stripes[:, ::2] = 254
    row = picture_row(saved(Image.fromarray(stripes)), taking(GREY, 4, 4))
    assert abs(row[0, :, 1:-1].astype(int) - 127).max() <= 2


def test_the_camera_may_have_been_held_upright() -> None:
    image = colours(8, 16)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90° to the right to see it upright
    turned = picture_row(saved(image, exif=exif), taking(COLOUR))
    np.testing.assert_array_equal(turned, np.rot90(np.asarray(image), -1).transpose(2, 0, 1))


def test_what_is_transparent_is_white() -> None:
    image = colours(4, 4).convert("RGBA")
    image.putpixel((1, 2), (10, 20, 30, 0))
    row = picture_row(saved(image), taking(COLOUR))
    assert row[:, 2, 1].tolist() == [255, 255, 255]
    palette = Image.new("P", (3, 1), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    palette.putpixel((0, 0), 0)
    row = picture_row(saved(palette, transparency=0), taking(COLOUR))
    assert row[:, 0].T.tolist() == [[255, 255, 255], [200, 100, 50], [200, 100, 50]]


def test_one_bit_and_palette_pictures_are_their_colours() -> None:
    bits = np.random.default_rng().random((7, 9)) > 0.5
    np.testing.assert_array_equal(picture_row(saved(Image.fromarray(bits)), taking(GREY))[0], bits * 255)
    image = colours().quantize(16)
    wanted = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(picture_row(saved(image), taking(COLOUR)), wanted)


def sixteen_bits() -> bytes:
    return saved(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000))


def animated() -> bytes:
    return saved(colours(), save_all=True, append_images=[colours()], duration=100)


HUGE = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 5, 0, 0, 0)


def behind(first: bytes) -> bytes:
    """A sound PNG with one more chunk in front of all."""
    return module.PNG + first + png(1, 1, data=bytes(4))[len(module.PNG) :]


ODD = {
    "a GIF": (saved(colours(), "GIF"), "expected a PNG or JPEG file, got .* begin with 47 49 46"),
    "nothing": (b"", "got 0 bytes"),
    "text": (b"hello", "begin with 68 65 6c 6c 6f"),
    "a PNG's first bytes alone": (module.PNG, "header cannot be read"),
    "a JPEG's first bytes alone": (module.JPEG, "header cannot be read"),
    "a PNG cut off": (saved(colours(64, 64))[:3000], "cannot be decoded .* send the whole file"),
    "a JPEG cut off": (saved(colours(64, 64), "JPEG")[:1500], "cannot be decoded .* send the whole file"),
    "a PNG with damaged pixels": (png(8, 8, data=b"\x07" * 100), "cannot be decoded"),
    "CMYK": (saved(colours().convert("CMYK"), "JPEG"), "CMYK, for printing; save it as RGB"),
    "16 bits of grey": (sixteen_bits(), "16 bits a channel"),
    "16 bits a colour": (png(2, 1, 16, data=b"\0" + bytes(12)), "16 bits a channel"),
    "animated": (animated(), "animated; send one of its frames"),
    "a chunk before the header": (behind(chunk(b"prVt", HUGE)), r"header \(IHDR\) is not its first chunk"),
    "two headers": (behind(chunk(b"IHDR", HUGE)), r"two headers \(IHDR\)"),
    "endless chunks": (png(1, 1)[:33] + chunk(b"IDAT", b"") * 65_537, "more than 65536 chunks"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_no_plain_picture_is_refused_with_the_way_out(case: str) -> None:
    data, fault = ODD[case]
    with pytest.raises(BadRequest, match=fault):
        picture_row(data, taking(COLOUR))
    with pytest.raises(BadSamples, match=fault):
        picture_row(data, taking(COLOUR), BadSamples)


@pytest.mark.parametrize("cut", range(1, 400, 23))
def test_whatever_byte_a_file_is_damaged_at_it_is_read_or_refused(cut: int) -> None:
    for kind in ("PNG", "JPEG"):
        whole = saved(colours(24, 24), kind)
        damaged = whole[:cut] + bytes([whole[cut] ^ 0x55]) + whole[cut + 1 :]
        with suppress(BadRequest, TooLarge):
            assert picture_row(damaged, taking(COLOUR, 24, 24)).shape == (3, 24, 24)


@pytest.mark.parametrize(
    "size",
    [
        (65_535, 65_535),
        (2**31 - 1, 2**31 - 1),
        (2**25 + 1, 1),
        (10_000, 4_000),
        (2**14 + 1, 1),
        (1, 33_000_000),
    ],
)
def test_a_bomb_is_refused_by_its_header_before_a_pixel_is_decoded(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.PngImageFile, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(
        TooLarge, match=rf"has {size[0]} × {size[1]} pixels, at most 33554432 are taken and at most 16384 "
    ):
        picture_row(png(*size, data=bytes(1000)), taking(COLOUR))


def test_a_jpeg_bomb_is_refused_by_its_header_too() -> None:
    data = bytearray(saved(colours(8, 8), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(TooLarge, match="60000 × 60000 pixels"):
        picture_row(bytes(data), taking(COLOUR))


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    data = saved(colours(32, 32), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    assert picture_row(data[:-2] + scan * 3 + data[-2:], taking(COLOUR)).shape == (3, 32, 32)
    with pytest.raises(BadRequest, match=r"a JPEG of 5\d\d scans; expected at most 100"):
        picture_row(data[:-2] + scan * 500 + data[-2:], taking(COLOUR))


def test_an_output_becomes_a_png_of_its_pixels() -> None:
    for color, channels in ((COLOUR, 3), (GREY, 1)):
        row = np.random.default_rng().integers(0, 256, (channels, 5, 7), np.uint8)
        image = Image.open(io.BytesIO(png_of(row, taking(color))))
        assert (image.format, image.mode) == ("PNG", color)
        np.testing.assert_array_equal(np.asarray(image).reshape(5, 7, channels), row.transpose(1, 2, 0))
