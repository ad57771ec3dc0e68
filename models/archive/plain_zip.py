"""Zip archives that every reader reads in the same way: uncompressed members, one behind the other, and a directory.

The zip format lets one file be two archives: the directory is found from the end, its offsets may be corrected for
bytes before the archive, and a second directory may be named by a 64-bit record that some readers ignore. So nothing is
searched for here. Each record must begin where the record before it ends, each local header must agree with the
directory, and every byte of the file must belong to exactly one record.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO

MAX_MEMBERS = 200_000
_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_EXTRA64 = 1  # the id of the field with 64-bit sizes
_ALL16, _ALL32 = 0xFFFF, 0xFFFFFFFF  # "the value is in the 64-bit record"
_UTF8_NAME = 0x800
_CHUNK = 1 << 20


class NotPlain(ValueError):
    """The file is no zip archive, or one that two readers could read in two ways."""


@dataclass(frozen=True, slots=True)
class Member:
    """The place of a member's bytes in the file: offsets and size in bytes."""

    name: str
    header_at: int
    data_at: int
    size: int
    crc: int


class PlainZip:
    """The members of an open file, by name and in their order. Raises NotPlain for any other file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._length = file.seek(0, os.SEEK_END)
        entries, at, end = self._directory()
        directory = self._exactly(at, end - at)
        self.members: dict[str, Member] = {}
        place, header_at = 0, 0
        for _ in range(entries):
            place, member = self._entry(directory, place, header_at)
            if member.name in self.members:
                raise NotPlain(f"the member '{member.name}' is there twice")
            self.members[member.name] = member
            header_at = member.data_at + member.size
        if place != len(directory) or header_at != at:
            raise NotPlain("there are bytes in it that belong to no member")

    def read(self, name: str) -> bytearray:
        """The bytes of one member. Raises NotPlain where their checksum is not the member's."""
        member = self.members[name]
        data = self._exactly(member.data_at, member.size)
        if zlib.crc32(data) != member.crc:
            raise NotPlain(f"the member '{name}' is damaged: its bytes do not give its checksum")
        return data

    def _exactly(self, at: int, size: int) -> bytearray:
        """``size`` bytes from ``at`` on, none of them beyond the end of the file."""
        if not 0 <= at <= at + size <= self._length:
            raise NotPlain("it breaks off, or a record points beyond its end")
        self._file.seek(at)
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            chunk = self._file.read(min(size - filled, _CHUNK))
            if not chunk:
                raise NotPlain("it became shorter while it was read")
            view[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return data

    def _directory(self) -> tuple[int, int, int]:
        """(number of members, where the directory begins, where it ends)."""
        end_at = self._length - _END.size
        sign, disk, start_disk, here, entries, size, at, comment = _END.unpack(
            self._exactly(end_at, _END.size)
        )
        if sign != b"PK\5\6" or comment:
            raise NotPlain("it does not end with the end record of a zip archive without a comment")
        locator_at = end_at - _LOCATOR.size
        is_64 = locator_at >= 0 and self._exactly(locator_at, 4) == b"PK\6\7"
        if is_64:
            short = (disk, start_disk, here, entries, size, at)
            disk, start_disk, here, entries, size, at, end_at = self._end64(locator_at)
            long = (disk, start_disk, here, entries, size, at)
            marks = (_ALL16, _ALL16, _ALL16, _ALL16, _ALL32, _ALL32)
            if any(one not in (mark, other) for one, mark, other in zip(short, marks, long, strict=True)):
                raise NotPlain("its two end records disagree")
        if (disk, start_disk) != (0, 0) or here != entries or entries > MAX_MEMBERS or at + size != end_at:
            raise NotPlain(
                f"its directory does not end where the end record begins, or has more than {MAX_MEMBERS} members"
            )
        return entries, at, end_at

    def _end64(self, locator_at: int) -> tuple[int, int, int, int, int, int, int]:
        """The six fields of the 64-bit end record and where it begins: directly before its locator."""
        _, disk, record_at, disks = _LOCATOR.unpack(self._exactly(locator_at, _LOCATOR.size))
        if disk or disks != 1 or record_at != locator_at - _END64.size:
            raise NotPlain("its 64-bit end record is not directly before its locator")
        sign, rest, _, _, *fields = _END64.unpack(self._exactly(record_at, _END64.size))
        if sign != b"PK\6\6" or rest != _END64.size - 12:
            raise NotPlain("its 64-bit end record is no such record")
        disk, start_disk, here, entries, size, at = fields
        return disk, start_disk, here, entries, size, at, record_at

    def _entry(self, directory: bytearray, place: int, header_at: int) -> tuple[int, Member]:
        """The directory's entry at ``place``, whose member must begin at ``header_at``; and where the next one is."""
        if place + _ENTRY.size > len(directory):
            raise NotPlain("its directory breaks off")
        sign, _, _, flags, method, _, _, crc, packed, size, *lengths = _ENTRY.unpack_from(directory, place)
        name_length, extra_length, comment, disk, _, _, offset = lengths
        name_at = place + _ENTRY.size
        end = name_at + name_length + extra_length
        if sign != b"PK\1\2" or method or flags & ~_UTF8_NAME or comment or disk or end > len(directory):
            raise NotPlain("a member is compressed, encrypted, has a comment, or is not fully listed")
        raw = bytes(directory[name_at : name_at + name_length])
        extra = bytes(directory[name_at + name_length : end])
        size, packed, offset = _sizes(extra, size, packed, offset)
        if size != packed or offset != header_at:
            raise NotPlain(f"the member {raw!r} does not begin where the one before it ends")
        try:
            name = raw.decode("ascii")
        except UnicodeDecodeError:
            raise NotPlain(f"the member's name {raw!r} is not ASCII") from None
        return end, Member(name, header_at, self._data_at(header_at, raw, flags, crc, size), size, crc)

    def _data_at(self, header_at: int, name: bytes, flags: int, crc: int, size: int) -> int:
        """The offset of the bytes behind a local header. The header must say what the directory says."""
        header = _LOCAL.unpack(self._exactly(header_at, _LOCAL.size))
        sign, _, own_flags, method, _, _, own_crc, packed, own_size, name_length, extra_length = header
        behind = self._exactly(header_at + _LOCAL.size, name_length + extra_length)
        own_size, packed, _ = _sizes(bytes(behind[name_length:]), own_size, packed, 0)
        said = (sign, own_flags, method, own_crc, packed, own_size, bytes(behind[:name_length]))
        if said != (b"PK\3\4", flags, 0, crc, size, size, name):
            raise NotPlain(f"the member {name!r} and the directory disagree")
        return header_at + _LOCAL.size + len(behind)


def _sizes(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The values of one header with those of its 64-bit field; no other extra field may be there."""
    if not extra:
        return size, packed, offset
    values = [size, packed, offset]
    wide = [place for place, value in enumerate(values) if value == _ALL32]
    if len(extra) != 4 + 8 * len(wide) or struct.unpack_from("<2H", extra) != (_EXTRA64, 8 * len(wide)):
        raise NotPlain("a member has a further field, or one that disagrees with its 64-bit sizes")
    for place, value in zip(wide, struct.unpack_from(f"<{len(wide)}Q", extra, 4), strict=True):
        values[place] = value
    return values[0], values[1], values[2]
