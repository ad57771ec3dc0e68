"""An archive of unknown origin is unpacked inside its folder and below its bounds, or not at all."""

import io
import stat
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.importing import torchserve
from halfeven.exporters.importing.torchserve import unpack
from halfeven.models.errors import BadFolder, TooLarge


def packed(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def unpacked(path: Path, tmp_path: Path) -> set[str]:
    folder = tmp_path / "inside/folder"
    folder.mkdir(parents=True)
    try:
        unpack(path, folder)
    finally:
        outside = {file for file in tmp_path.rglob("*") if file.is_file() and file != path}
        assert all(file.is_relative_to(folder) for file in outside)
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_files_and_folders_come_out_as_they_are(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.mar", ("MAR-INF/MANIFEST.json", b"{}"), ("deep/", b""), ("deep/x.py", b"1"))
    assert unpacked(path, tmp_path) == {"MAR-INF/MANIFEST.json", "deep/x.py"}
    assert (tmp_path / "inside/folder/deep/x.py").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["../up", "a/../../up", "/etc/up", "..\\up", "C:/up", "a/./../../../up"])
def test_a_member_outside_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match="outside the archive's folder"):
        unpacked(packed(tmp_path / "a.mar", ("fine", b"1"), (name, b"2")), tmp_path)


def test_a_name_that_hides_its_end_behind_a_null_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.mar", ("fineXup", b"1"))
    path.write_bytes(path.read_bytes().replace(b"fineXup", b"fine\0up"))
    with pytest.raises(BadFolder, match="outside the archive's folder"):
        unpacked(path, tmp_path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(BadFolder, match="is a link"):
        unpacked(packed(tmp_path / "a.mar", (link, b"/etc/passwd")), tmp_path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_in_one_place_are_refused(tmp_path: Path) -> None:
    for number, names in enumerate((("x", "x"), ("x", "x/y"), ("x/y", "x"))):
        path = packed(tmp_path / "a.mar", *((name, b"1") for name in names))
        (tmp_path / str(number)).mkdir()
        with pytest.raises(BadFolder, match="two members in one place"):
            unpack(path, tmp_path / str(number))


def test_what_unpacks_to_far_more_than_it_is_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchserve, "FREE_BYTES", 1 << 16)
    path = packed(tmp_path / "a.mar", ("zeros", bytes(1 << 22)))
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(TooLarge, match="4194304 bytes unpacked"):
        unpack(path, folder)
    assert not any(folder.iterdir())


def test_a_member_that_is_larger_than_it_is_said_to_be_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.mar", ("zeros", bytes(1 << 20)))
    data = path.read_bytes().replace(struct.pack("<I", 1 << 20), struct.pack("<I", 7))
    path.write_bytes(data)
    with pytest.raises(BadFolder, match="not a whole zip archive"):
        unpacked(path, tmp_path)
    assert (tmp_path / "inside/folder/zeros").stat().st_size <= 7


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchserve, "MAX_MEMBERS", 3)
    with pytest.raises(TooLarge, match="4 members"):
        unpacked(packed(tmp_path / "a.mar", *((str(number), b"") for number in range(4))), tmp_path)


@pytest.mark.parametrize("cut", [0, 10, 60])
def test_a_file_that_is_no_whole_zip_archive_is_refused(cut: int, tmp_path: Path) -> None:
    path = packed(tmp_path / "a.mar", ("x", b"1"))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadFolder, match="not a whole zip archive"):
        unpacked(path, tmp_path)


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    file = io.BytesIO(packed(tmp_path / "a.mar", ("x", b"1")).read_bytes())
    data = bytearray(file.getvalue())
    for sign, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(sign) + flags] |= 1
    (tmp_path / "a.mar").write_bytes(data)
    with pytest.raises(BadFolder, match="encrypted"):
        unpacked(tmp_path / "a.mar", tmp_path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_that_cannot_be_unpacked_is_refused_by_the_archive_s_name(
    tmp_path: Path, packing: int
) -> None:
    content = np.random.default_rng(7).integers(0, 4, 20_000).astype(np.uint8).tobytes()
    path = tmp_path / "damaged.mar"
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("model.onnx", content)
    data = bytearray(path.read_bytes())
    for place in range(60, 2000, 7):
        data[place] ^= 0xFF
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(BadFolder, match=r"damaged\.mar"):
        unpack(path, tmp_path / "out")
