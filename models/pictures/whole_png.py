"""Parts of a PNG that Pillow does not look at: it fills rows that are missing, and says nothing, where the compressed
data end early; it takes any chunk before the header, several headers, and any number of chunks."""

import itertools
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress

_SIGNATURE_BYTES = 8
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the colour type in IHDR
# Adam7: (first column, first row, columns apart, rows apart) of each pass. Source: PNG specification, 8.1.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_PIECE = 1 << 16  # bytes that are unpacked at once; they are counted and thrown away
MOST_CHUNKS = 65_536  # encoders write chunks of 8 KiB and more; each costs time to walk over


def oddity_of_chunks(data: bytes) -> str | None:
    """The reason why the chunks of a PNG are not taken; None where they are: the header is the first, and only one."""
    for number, (kind, _) in enumerate(_chunks(data)):
        if (kind == b"IHDR") != (number == 0):
            return "its header (IHDR) is not its first chunk" if number == 0 else "it has two headers (IHDR)"
        if number == MOST_CHUNKS:
            return f"it has more than {MOST_CHUNKS} chunks; save it again with larger ones"
    return None


def missing_bytes(data: bytes) -> int:
    """The number of bytes of pixels that the header promises and the file does not have; 0 for a whole PNG.

    ``data``: a PNG that Pillow decoded and that has no `oddity_of_chunks`, so its header is sound. Bytes behind a
    damage count as missing.
    """
    width, height, depth, color, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, _SIGNATURE_BYTES + 8)
    bits = depth * _CHANNELS[color]
    promised = sum(
        _bytes_of(-(-(width - x) // dx), -(-(height - y) // dy), bits)
        for x, y, dx, dy in (_PASSES if interlaced else ((0, 0, 1, 1),))
    )
    return max(0, promised - _unpacked(data, promised))


def _bytes_of(width: int, height: int, bits: int) -> int:
    """A filter's byte before each row, and rows of whole bytes. A pass of a small picture may have no pixel."""
    return height * (1 + (width * bits + 7) // 8) if width > 0 and height > 0 else 0


def _unpacked(data: bytes, most: int) -> int:
    """The number of bytes in the compressed data; counting ends at ``most``."""
    stream, found = zlib.decompressobj(), 0
    with suppress(zlib.error):
        # The empty one: for what is left when all input was read.
        for chunk in itertools.chain((chunk for kind, chunk in _chunks(data) if kind == b"IDAT"), (b"",)):
            rest, piece = chunk, b"not empty"
            while found < most and (rest or piece) and not stream.eof:
                piece = stream.decompress(rest, _PIECE)
                found += len(piece)
                rest = stream.unconsumed_tail
    return found


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes | memoryview]]:
    """The kind and the content of each chunk."""
    view, at = memoryview(data), _SIGNATURE_BYTES
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        yield kind, view[at + 8 : at + 8 + size]
        at += size + 12
