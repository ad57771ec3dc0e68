"""PNG and JPEG bytes to a model's input row, and an output row to PNG: the one place that knows both.

Requests, samples and training rows are all made by `picture_row`, so that they have the same numbers for the same
picture. The bytes are not trusted: sizes are read from the header before a pixel is decoded.
"""

import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from PIL import Image, ImageOps
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from ..errors import BadInput, BadRequest, TooLarge
from .picture_bounds import MAX_PIXELS, MAX_SIDE
from .pixels import Picture
from .whole_png import missing_bytes, oddity_of_chunks

MAX_SCANS = 100  # of a JPEG; usual ones have 1 to 12, and each more costs a walk over all pixels
PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
SUFFIXES = (".png", ".jpg", ".jpeg")
_DECODED = 12  # bytes of a pixel: 4 as it is decoded, 4 turned upright, 4 in the colours that are asked for
_WIDE = "it has 16 bits a channel, pictures here have 8; save it with 8"
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")


def is_picture(data: bytes) -> bool:
    """True if the first bytes are those of PNG or JPEG."""
    return data.startswith((PNG, JPEG))


def picture_row(
    data: bytes,
    picture: Picture,
    error: type[BadInput] = BadRequest,
    hold: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> np.ndarray:
    """One row (without the batch's axis) in the tensor's datatype and layout.

    Turned as EXIF says, transparency laid over white, colours to grey by ITU-R 601-2 luma, then stretched to the
    size that the entry asks for: bilinear, antialiased where it shrinks (Pillow's BILINEAR). Colour profiles
    and gamma are not applied. ``hold`` is entered with the bytes that decoding takes, before they are taken.
    Raises ``error``, TooLarge above `MAX_PIXELS` or `MAX_SIDE`, and what ``hold`` does.
    """
    image = _opened(data, error)
    with hold(_DECODED * image.width * image.height):
        try:
            image.load()
            flat = _sized(_upright(image), picture)
        except Exception as fault:  # a decoder may raise anything on bytes that are not trusted
            raise error(
                f"the picture cannot be decoded ({fault}); send the whole file, as it was saved"
            ) from None
        if data.startswith(PNG) and (missing := missing_bytes(data)):
            raise error(
                f"the picture breaks off: {missing} bytes of its pixels are missing; send the whole file"
            )
        pixels = np.asarray(flat)
        return picture.row(pixels[..., None] if pixels.ndim == 2 else pixels)


def png_of(row: np.ndarray, picture: Picture) -> bytes:
    """An output's row as a PNG file: `Picture.pixels`, without loss."""
    pixels = picture.pixels(row)
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(out, "PNG")
    return out.getvalue()


def _opened(data: bytes, error: type[BadInput]) -> ImageFile:
    """The file with its header read and checked against the bounds; no pixel is decoded yet."""
    if not is_picture(data):
        raise error(f"expected a PNG or JPEG file, got {len(data)} bytes that begin with {data[:8].hex(' ')}")
    if data.startswith(PNG) and (fault := oddity_of_chunks(data)):
        raise error(f"the picture is not taken: {fault}")
    try:
        # Image.open is not used: it tries further formats, and its own bound on sizes is the whole process's.
        image = PngImageFile(io.BytesIO(data)) if data.startswith(PNG) else JpegImageFile(io.BytesIO(data))
    except Exception as fault:
        raise error(f"the picture's header cannot be read ({fault}); send the whole file") from None
    if image.width * image.height > MAX_PIXELS or max(image.size) > MAX_SIDE:
        raise TooLarge(
            f"the picture has {image.width} × {image.height} pixels, at most {MAX_PIXELS} are taken and at most "
            f"{MAX_SIDE} on each side; shrink it first"
        )
    if fault := _oddity(image, data):
        raise error(f"the picture is not taken: {fault}")
    return image


def _oddity(image: ImageFile, data: bytes) -> str | None:
    if image.mode not in _MODES:
        kinds = {"CMYK": "its colours are CMYK, for printing; save it as RGB"}
        return _WIDE if image.mode.startswith("I") else kinds.get(image.mode, f"its mode is {image.mode}")
    if isinstance(image, PngImageFile):
        if data[24] == 16:  # the bit depth in IHDR (PNG specification, 11.2.1); Pillow would drop half of it
            return _WIDE
        if image.n_frames > 1:
            return "it is animated; send one of its frames"
    elif (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        return f"a JPEG of {scans} scans; expected at most {MAX_SCANS}, save it as baseline"
    return None


def _upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image) or image


def _sized(image: Image.Image, picture: Picture) -> Image.Image:
    """The image in the entry's colours and size."""
    clear = image.has_transparency_data
    image = image.convert("RGBA" if clear else picture.color)
    height, width = picture.sizes
    size = (width or image.width, height or image.height)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    if clear:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert(picture.color)
    return image
