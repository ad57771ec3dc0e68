"""Members of a zip archive that a stranger made, read so that none takes more memory than it declares.

Python's reader cuts a member to the size that it declares only after it is decompressed. Of a deflated member it
decompresses no more than it is asked for; of one by bzip2 or LZMA everything that some bytes of it hold, which can be a
million times as much (`zipfile.ZipExtFile._read1`).
"""

import zipfile

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def members_of(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """All members. Raises BadZipFile for one that cannot be read in bounded memory."""
    members = archive.infolist()
    if odd := [member.filename for member in members if member.compress_type not in _METHODS]:
        raise zipfile.BadZipFile(
            f"its member {odd[0][:80]!r} is compressed in a way that is not read: expected stored or deflated"
        )
    return members


def bytes_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """The content of a member of `members_of`. Raises BadZipFile if it holds more than it declares."""
    with archive.open(member) as opened:
        return opened.read(member.file_size)
