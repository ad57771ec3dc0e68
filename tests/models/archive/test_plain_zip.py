"""Zip archives that two readers would read in two ways: refused, and nothing in them runs."""

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.models.archive.archive import load_program, save_program
from halfeven.models.archive.plain_program import read_module
from halfeven.models.archive.plain_zip import NotPlain, PlainZip
from halfeven.models.errors import DamagedFile
from torch import nn

from tests.models.archive.crafting import Touches, archive_of, contents

END = 22  # bytes of the record that ends a zip archive


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = torch.export.export(nn.Linear(3, 2).eval().requires_grad_(False), (torch.randn(4, 3),))
    path = tmp_path_factory.mktemp("archive") / "program.pt2"
    save_program(program, path, weights=True)
    return path


def harmful(saved: Path, canary: Path) -> bytes:
    """The archive with sample inputs that write the canary when torch unpickles them."""
    pickled = io.BytesIO()
    torch.save(Touches(canary), pickled)
    members = contents(saved)
    (sample_inputs,) = (name for name in members if "/sample_inputs/" in name)
    return archive_of({**members, sample_inputs: pickled.getvalue()})


def directory_of(data: bytes) -> tuple[int, int, int]:
    """(entries, size, offset) of a small archive's central directory."""
    entries, size, offset = struct.unpack_from("<HII", data, len(data) - END + 10)
    return entries, size, offset


def moved(directory: bytes, by: int) -> bytes:
    """A central directory whose offsets of members are raised by ``by``."""
    out, at = bytearray(directory), 0
    while at < len(out):
        name, extra, comment = struct.unpack_from("<HHH", out, at + 28)
        struct.pack_into("<I", out, at + 42, struct.unpack_from("<I", out, at + 42)[0] + by)
        at += 46 + name + extra + comment
    return bytes(out)


def end_of(entries: int, size: int, offset: int) -> bytes:
    return struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, entries, entries, size, offset, 0)


def end64_of(entries: int, size: int, offset: int) -> bytes:
    return struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, size, offset)


def with_a_corrected_offset(good: bytes, bad: bytes) -> bytes:
    """zipfile takes the directory that ends at the end record; torch's reader the one at the offset given there."""
    entries, size, good_at = directory_of(good)
    _, bad_size, bad_at = directory_of(bad)
    assert size == bad_size, "the same names"
    prefix = bad[:-END]
    correction = len(prefix) + good_at - bad_at
    shifted = moved(good[good_at : good_at + size], len(prefix) - correction)
    return prefix + good[:good_at] + shifted + end_of(entries, size, bad_at)


def with_two_end_records(good: bytes, bad: bytes) -> bytes:
    """zipfile reads the 64-bit end record before its locator; torch's reader the one that the locator names."""
    entries, size, good_at = directory_of(good)
    _, bad_size, bad_at = directory_of(bad)
    first = bad[:-END] + end64_of(entries, bad_size, bad_at)
    directory = moved(good[good_at : good_at + size], len(first))
    second = good[:good_at] + directory + end64_of(entries, size, len(first) + good_at)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(bad) - END, 1)
    return first + second + locator + end_of(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


@pytest.mark.parametrize("craft", [with_a_corrected_offset, with_two_end_records])
def test_an_archive_with_two_directories_is_refused_and_its_hidden_pickle_never_opened(
    craft: Callable[[bytes, bytes], bytes], saved: Path, tmp_path: Path
) -> None:
    canary, path = tmp_path / "canary", tmp_path / "crafted.pt2"
    path.write_bytes(craft(saved.read_bytes(), harmful(saved, canary)))
    for load in (load_program, read_module):
        with pytest.raises(DamagedFile, match=str(path)):
            load(path)
    assert not canary.exists(), "something from the archive was executed"


def spliced(data: bytes, at: int, put: bytes, cut: int = 0) -> bytes:
    return data[:at] + put + data[at + cut :]


def with_a_prefix(data: bytes) -> bytes:
    return b"#!/bin/sh\n" + data


def with_a_corrected_prefix(data: bytes) -> bytes:
    """A zip file with bytes before it and right offsets, as a self-extracting archive is."""
    entries, size, at = directory_of(data)
    return b"junk" + data[:at] + moved(data[at : at + size], 4) + end_of(entries, size, at + 4)


def with_a_gap(data: bytes) -> bytes:
    entries, size, at = directory_of(data)
    return data[:at] + b"hidden" + data[at : at + size] + end_of(entries, size, at + 6)


def with_a_tail(data: bytes) -> bytes:
    return data + b"\0"


def with_a_comment(data: bytes) -> bytes:
    return data[:-2] + struct.pack("<H", END) + end_of(0, 0, 0)


def with_bytes_behind_its_directory(data: bytes) -> bytes:
    return spliced(data, len(data) - END, b"hidden")


def with_one_entry_less(data: bytes) -> bytes:
    entries, size, at = directory_of(data)
    return data[:-END] + end_of(entries - 1, size, at)


def with_another_name_in_its_header(data: bytes) -> bytes:
    at = data.index(b"archive/models/model.json")
    return spliced(data, at, b"archive/models/mudel.json", len(b"archive/models/model.json"))


def with_another_size_in_its_header(data: bytes) -> bytes:
    return spliced(data, 22, struct.pack("<I", 1), 4)


def with_a_field_in_its_header(data: bytes) -> bytes:
    """Bytes that nobody checks, between a name and its data."""
    first_end = 30 + struct.unpack_from("<H", data, 26)[0]
    entries, size, at = directory_of(data)
    longer = spliced(spliced(data[:at], first_end, b"FB\4\0hide"), 28, struct.pack("<H", 8), 2)
    directory = bytearray(moved(data[at : at + size], 8))
    struct.pack_into("<I", directory, 42, 0)
    return longer + bytes(directory) + end_of(entries, size, at + 8)


def with_a_damaged_member(data: bytes) -> bytes:
    at = data.index(b"graph_module")
    return spliced(data, at, b"G", 1)


def compressed(data: bytes) -> bytes:
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return out.getvalue()


CRAFTS = [
    with_a_prefix, with_a_corrected_prefix, with_a_gap, with_a_tail, with_a_comment,
    with_bytes_behind_its_directory, with_one_entry_less, with_another_name_in_its_header,
    with_another_size_in_its_header, with_a_field_in_its_header, with_a_damaged_member, compressed,
]  # fmt: skip


@pytest.mark.parametrize("craft", CRAFTS, ids=lambda craft: craft.__name__)
def test_an_archive_that_is_not_laid_out_plainly_is_refused(
    craft: Callable[[bytes], bytes], saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "crafted.pt2"
    path.write_bytes(craft(saved.read_bytes()))
    for load in (load_program, read_module):
        with pytest.raises(DamagedFile, match=r"not a program archive|cannot be read"):
            load(path)


def test_any_byte_of_an_archive_that_is_changed_or_cut_is_noticed(
    saved: Path, random: np.random.Generator
) -> None:
    """Except for the dates, versions and attributes in its headers, which nobody reads."""
    data = saved.read_bytes()
    expected = contents(saved)
    for at in random.choice(len(data), 300, replace=False):
        for other in (spliced(data, at, bytes([data[at] ^ 0x20]), 1), data[:at]):
            try:
                archive = PlainZip(io.BytesIO(other))
                found = {name: bytes(archive.read(name)) for name in archive.members}
            except NotPlain:
                continue
            assert found == expected and len(other) == len(data)


def test_an_archive_with_64_bit_sizes_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zipfile writes an archive of more than two gigabytes in this form."""
    members = contents(saved)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 30)
    data = archive_of(members)
    assert b"PK\6\6" in data and data.count(b"\xff\xff\xff\xff") > 4
    archive = PlainZip(io.BytesIO(data))
    assert {name: bytes(archive.read(name)) for name in archive.members} == members


def test_torch_is_given_what_was_checked_and_not_the_file(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bytes] = []
    load = torch.export.load
    monkeypatch.setattr(torch.export, "load", lambda file: (given.append(file.getvalue()), load(file))[1])
    path = tmp_path / "program.pt2"
    path.write_bytes(saved.read_bytes())
    load_program(path)
    with zipfile.ZipFile(io.BytesIO(given[0])) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        assert all(item.compress_type == zipfile.ZIP_STORED for item in archive.infolist())
    assert members["archive/data/sample_inputs/model.pt"] == b""
    assert members["archive/data/weights/weight_0"] == contents(saved)["archive/data/weights/weight_0"]
    assert members["archive/models/model.json"] != contents(saved)["archive/models/model.json"], (
        "written anew"
    )


@pytest.mark.slow
def test_a_large_archive_is_held_in_memory_once_beside_what_torch_makes_of_it(tmp_path: Path) -> None:
    """Reading it all and writing it anew would hold it twice."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12))).requires_grad_(False)
    path = tmp_path / "program.pt2"
    save_program(torch.export.export(layers.eval(), (torch.randn(2, 1024),)), path, weights=True)
    load_program(path)  # what is imported at the first load is no part of it
    tracemalloc.start()
    try:
        load_program(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * path.stat().st_size
