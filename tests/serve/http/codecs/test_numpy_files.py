"""npy and npz: what numpy wrote is read as it was, and what a stranger wrote costs nothing."""

import io
import struct
import tracemalloc
import warnings
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from halfeven.models.errors import BadRequest, TooLarge
from halfeven.models.spec.datatypes import DATATYPES
from halfeven.serve.http.codecs.numpy_files import is_plain_npy, read_npy, read_npz, write_npy, write_npz
from halfeven.serve.http.limits.memory_budget import FREE_BYTES, MemoryBudget, unlimited
from numpy.lib import format as npy_format

from tests.serve.http.bodies import npy, npz

MIB = 2**20


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(out, "w", method) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
    return out.getvalue()


def headed(text: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """An npy file of this header."""
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text.encode() + data


def shaped(shape: tuple[int, ...], descr: str = "<f4", is_fortran: bool = False) -> bytes:
    """An npy file of this shape without data."""
    return headed(repr({"descr": descr, "fortran_order": is_fortran, "shape": shape}) + "\n")


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_read_as_numpy_saved_it(datatype: str) -> None:
    array = np.random.default_rng().integers(0, 2, (3, 4)).astype(DATATYPES[datatype].numpy)
    came = read_npy(npy(array), "it", unlimited())
    assert came.dtype == array.dtype
    np.testing.assert_array_equal(came, array)


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_an_array_that_is_a_view_is_known_by_its_header(datatype: str, version: tuple[int, int]) -> None:
    array = np.zeros((3, 4), DATATYPES[datatype].numpy)
    for one in (array, array[0], array[0, 0]):
        out = io.BytesIO()
        npy_format.write_array(out, one, version)
        assert is_plain_npy(out.getvalue())


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '>f4', 'fortran_order': False, 'shape': (2, 2), }\n",
        "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), 'fortran_order': True, }\n",
    ],
)
def test_an_array_that_has_to_be_turned_is_known_and_its_copy_is_counted(header: str) -> None:
    data, lease = headed(header, bytes(16)), MemoryBudget(FREE_BYTES).lease()
    lease.add(FREE_BYTES)
    read_npy(headed("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }\n", bytes(16)), "it", lease)
    assert lease.held == 0 and not is_plain_npy(data)
    read_npy(data, "it", lease)
    assert lease.held == 16


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_the_other_byte_order_and_columns_first_are_turned(order: Any, byteorder: Any) -> None:
    array = np.random.default_rng().standard_normal((3, 4, 5)).astype(np.float32)
    came = read_npy(
        npy(np.asarray(array, np.dtype(np.float32).newbyteorder(byteorder), order=order)), "it", unlimited()
    )
    np.testing.assert_array_equal(came, array)
    assert came.flags.c_contiguous and came.dtype == np.dtype("<f4")


def test_plain_numbers_are_a_view_of_the_body() -> None:
    body = npy(np.arange(6.0))
    came = read_npy(body, "it", unlimited())
    assert not came.flags.owndata and not came.flags.writeable


def test_a_number_alone_and_an_array_of_none_are_arrays_too() -> None:
    assert read_npy(npy(np.array(2.5)), "it", unlimited()).shape == ()
    assert np.load(io.BytesIO(write_npy(np.array(2.5)))).shape == ()
    assert read_npy(npy(np.zeros((0, 4), np.float32)), "it", unlimited()).shape == (0, 4)


BAD_NPY = {
    "cut off": (npy(np.zeros(8))[:-1], r"shape \[8\] of float64 takes 64 bytes, but 63 follow"),
    "too long": (npy(np.zeros(8)) + b"x", "takes 64 bytes, but 65 follow"),
    "objects": (npy(np.array([{}], dtype=object), allow_pickle=True), r"objects \(pickle\) are never read"),
    "a record": (npy(np.zeros(2, np.dtype([("a", "f4")]))), "expected plain numbers"),
    "an endless shape": (
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 9999999999)}\n"),
        r"less than 2\*\*63 bytes",
    ),
    "a size beyond numpy's, of nothing": (shaped((0, 10**30)), r"shape \[0, 10+\] of float32: expected"),
    "sizes beyond numpy's together, of nothing": (shaped((0, 2**62, 2**62)), r"less than 2\*\*63 bytes"),
    "bytes in more digits than Python writes": (shaped((10**4000, 10**4000)), r"less than 2\*\*63 bytes"),
    "endlessly many numbers of no bytes": (shaped((10**9, 10**9), "V0", is_fortran=True), "plain numbers"),
    "a negative shape": (
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1)}\n", bytes(4)),
        r"shape \[-1, -1\]",
    ),
    "a shape of truths": (
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}\n", bytes(4)),
        r"shape \[True\]",
    ),
    "65 axes": (
        headed(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 65}}}\n", bytes(4)),
        "expected at most 64 sizes",
    ),
    "a deep header": (headed("(" * 5000), "not an npy file"),
    "a long header": (
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': ()}" + " " * 20000),
        "not an npy",
    ),
    "code": (headed("__import__('os').system('true')\n"), "not an npy file"),
    "an unknown version": (headed("{}", version=b"\x09\x00"), "not an npy file"),
    "its first bytes alone": (b"\x93NUMPY", "not an npy file"),
}


@pytest.mark.parametrize("case", BAD_NPY)
def test_a_bad_npy_is_refused(case: str) -> None:
    data, fault = BAD_NPY[case]
    with pytest.raises(BadRequest, match=fault):
        read_npy(data, "the npy file", unlimited())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_the_arrays_of_an_npz_are_read_by_name(save: Any) -> None:
    arrays = {"a": np.random.default_rng().standard_normal((2, 3)), "b/c": np.arange(4, dtype=np.uint8)}
    out = io.BytesIO()
    save(out, **arrays)
    came = read_npz(out.getvalue(), MIB, unlimited())
    assert list(came) == ["a", "b/c"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(came[name], array)


def test_a_zip_bomb_is_refused_by_the_sizes_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    body = zipped({"x.npy": npy(np.zeros(MIB, np.float64))})
    assert len(body) < 16_384
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(TooLarge, match=r"unpacks to 8388736 bytes, at most 1048576 are taken"):
        read_npz(body, MIB, unlimited())


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_a_member_that_declares_less_than_it_is_takes_no_more_than_that(method: int) -> None:
    body = bytearray(zipped({"x.npy": npy(np.zeros(4 * MIB, np.float64))}, method))
    at = body.rindex(b"PK\x01\x02")
    body[at + 24 : at + 28] = struct.pack("<I", 1000)
    tracemalloc.start()
    with pytest.raises(
        BadRequest, match=r"Bad CRC-32" if method < zipfile.ZIP_BZIP2 else "expected stored or deflated"
    ):
        read_npz(bytes(body), MIB, unlimited())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most - len(body) < MIB


def test_a_directory_of_a_million_members_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = zipped({f"{index}.npy": b"" for index in range(2000)})
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("it was read"))
    with pytest.raises(TooLarge, match="lists more members than a model can have"):
        read_npz(body, MIB, unlimited())
    at = body.rindex(b"PK\x05\x06")
    hidden = body[:at] + b"PK\x06\x07" + bytes(16) + body[at : at + 12] + bytes(4) + body[at + 16 :]
    with pytest.raises(BadRequest, match="ZIP64 archive"):
        read_npz(hidden, MIB, unlimited())


BAD_NPZ = {
    "cut off": (npz(x=np.zeros(100))[:200], "breaks off"),
    "another file in it": (zipped({"x.txt": b"hello"}), r"a member 'x.txt': expected one NAME.npy"),
    "a path": (zipped({"../x": b"hello"}), r"a member '../x'"),
    "an array in it is bad": (zipped({"x.npy": b"hello"}), "'x' in the npz file: not an npy file"),
    "pickle in it": (
        zipped({"x.npy": npy(np.array([{}], dtype=object), allow_pickle=True)}),
        "'x' in the npz file: .* never read",
    ),
    "a damaged member": (npz(x=np.zeros(100)).replace(bytes(64), b"\1" * 64, 1), "not an npz file: Bad CRC"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_a_bad_npz_is_refused(case: str) -> None:
    body, fault = BAD_NPZ[case]
    with pytest.raises(BadRequest, match=fault):
        read_npz(body, MIB, unlimited())


def test_the_same_name_twice_is_refused() -> None:
    one, other = zipped({"x.npy": npy(np.zeros(1))}), io.BytesIO()
    assert one
    with warnings.catch_warnings(), zipfile.ZipFile(other, "w") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("x.npy", npy(np.zeros(1)))
        archive.writestr("x.npy", npy(np.ones(1)))
    with pytest.raises(BadRequest, match=r"a member 'x.npy'"):
        read_npz(other.getvalue(), MIB, unlimited())


def test_what_is_written_is_what_numpy_reads_and_bfloat16_is_fp32() -> None:
    array = np.random.default_rng().standard_normal((2, 3)).astype(np.float16)
    np.testing.assert_array_equal(np.load(io.BytesIO(write_npy(array))), array)
    half = array.astype(ml_dtypes.bfloat16)
    came = np.load(io.BytesIO(write_npz({"file": array, "b": half})))
    np.testing.assert_array_equal(came["file"], array)
    assert came["b"].dtype == np.float32
    np.testing.assert_array_equal(came["b"], half.astype(np.float32))
