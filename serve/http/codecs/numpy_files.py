"""``.npy`` and ``.npz`` bodies: arrays as numpy saves them, without pickle and within bounds set beforehand.

Source: numpy.lib.format (NPY 1.0 and 2.0); APPNOTE.TXT 4.3 for the zip's directory. An array is a view of the
body wherever it can be one.
"""

import io
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from math import prod

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from ....models.errors import BadRequest, Overloaded, TooLarge
from ....models.files.zip_members import bytes_of, members_of
from ..limits.memory_budget import Lease
from .json_numbers import writable

NPY, NPZ = b"\x93NUMPY", b"PK\x03\x04"
NPY_TYPE, NPZ_TYPE = "application/x-npy", "application/x-npz"
_MAX_HEADER = 10_000  # characters that are read as a Python literal
_MAX_DIRECTORY = 65_536  # bytes of a zip's list of members: some hundred tensors
_END, _END_SIZE, _END_LONGEST = b"PK\x05\x06", 22, 22 + 65_535
_ZIP64_LOCATOR, _LOCATOR_SIZE = b"PK\x06\x07", 20
# The header as numpy writes it, of an array that is little-endian and in rows.
_PLAIN = re.compile(
    rb"\x93NUMPY[\1\2]\0.{2,4}?\{'descr': '[<|]\w{1,8}', 'fortran_order': False, "
    rb"'shape': \([\d, ]{0,512}\), \} {0,128}\n",
    re.DOTALL,
)
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def is_plain_npy(data: bytes) -> bool:
    """True if the array is a view of the data. A header that numpy would write otherwise makes it False too."""
    return _PLAIN.match(data) is not None


def read_npy(data: bytes, where: str, lease: Lease) -> np.ndarray:
    """One array, little-endian and C-contiguous; read-only where it is a view. A copy counts in the lease.

    Raises BadRequest, TooLarge, Overloaded.
    """
    stream = io.BytesIO(data)
    try:
        shape, is_fortran, dtype = _HEADERS[npy.read_magic(stream)](stream, max_header_size=_MAX_HEADER)
    except Exception as fault:  # the header is the caller's text
        raise BadRequest(f"{where}: not an npy file (version 1 or 2): {str(fault)[:200]}") from None
    # Numbers of no bytes may be so many that numpy walks over them for years.
    if dtype.hasobject or dtype.names or dtype.subdtype or not dtype.itemsize:
        raise BadRequest(f"{where}: expected plain numbers, got {dtype}; objects (pickle) are never read")
    if not _is_a_shape(shape, dtype.itemsize):
        raise BadRequest(
            f"{where}: shape {str(list(shape))[:200]} of {dtype}: expected at most 64 sizes from 0 on, for less than "
            "2**63 bytes"
        )
    if (size := prod(shape) * dtype.itemsize) != (came := len(data) - stream.tell()):
        raise BadRequest(f"{where}: shape {list(shape)} of {dtype} takes {size} bytes, but {came} follow")
    array = np.ndarray(shape, dtype, data, stream.tell(), order="F" if is_fortran else "C")
    if dtype.kind == "V" and dtype.itemsize == 2:  # how numpy saves bfloat16
        array = array.view(ml_dtypes.bfloat16)
    plain = array.dtype.newbyteorder("<")
    if array.dtype != plain or not array.flags.c_contiguous:
        lease.add(array.nbytes)
    return np.asarray(array, plain, order="C")


def _is_a_shape(shape: Sequence[int], itemsize: int) -> bool:
    """True if numpy takes the shape: it counts the bytes as if a size of 0 were 1."""
    if len(shape) > 64 or bool in map(type, shape) or min(shape, default=0) < 0:
        return False
    return prod(max(size, 1) for size in shape) * itemsize < 2**63


def read_npz(body: bytes, max_bytes: int, lease: Lease) -> dict[str, np.ndarray]:
    """The arrays by name. What they unpack to is bounded by ``max_bytes`` before anything is unpacked, and counted.

    Raises BadRequest, TooLarge, Overloaded.
    """
    _check_directory(body)
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            members = members_of(archive)
            lease.add(_unpacked_bytes(members, max_bytes))
            data = {member.filename.removesuffix(".npy"): bytes_of(archive, member) for member in members}
    except (BadRequest, TooLarge, Overloaded):
        raise
    except Exception as fault:
        raise BadRequest(f"the body is not an npz file: {str(fault)[:200]}") from None
    return {name: read_npy(part, f"'{name}' in the npz file", lease) for name, part in data.items()}


def _check_directory(body: bytes) -> None:
    """The list of members must be short: zipfile reads all of it before anything can be asked."""
    at = body.rfind(_END, max(0, len(body) - _END_LONGEST))
    if at < 0 or at + _END_SIZE > len(body):
        raise BadRequest("the body is not an npz file: it breaks off; send the whole file")
    (size,) = struct.unpack_from("<I", body, at + 12)
    if size > _MAX_DIRECTORY:
        raise TooLarge(
            f"the npz file lists more members than a model can have ({_MAX_DIRECTORY} bytes of list)"
        )
    if body[max(0, at - _LOCATOR_SIZE) : at].startswith(_ZIP64_LOCATOR):
        raise BadRequest(
            "the body is a ZIP64 archive, as torch.save writes them, and no npz file: send inputs, as numpy.savez or "
            "safetensors write them, not a model"
        )


def _unpacked_bytes(members: list[zipfile.ZipInfo], max_bytes: int) -> int:
    """Raises BadRequest, TooLarge."""
    names = [member.filename for member in members]
    if odd := [name for name in names if not name.endswith(".npy") or names.count(name) > 1]:
        raise BadRequest(f"the npz file has a member {odd[0][:80]!r}: expected one NAME.npy for each input")
    if (size := sum(member.file_size for member in members)) > max_bytes:
        raise TooLarge(
            f"the npz file unpacks to {size} bytes, at most {max_bytes} are taken; send fewer rows"
        )
    return size


def write_npy(array: np.ndarray) -> bytes:
    """BF16, for which numpy has no name, as the FP32 numbers that it is exactly."""
    out = io.BytesIO()
    npy.write_array(out, writable(array).reshape(array.shape), allow_pickle=False)
    return out.getvalue()


def write_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A file that is not compressed, as that of ``numpy.savez`` (which cannot write an array named ``file``)."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", write_npy(array))
    return out.getvalue()
