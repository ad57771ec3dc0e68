"""The model is not at fault for a disk that is full, or for a child that was killed while it wrote its result."""

import errno
from pathlib import Path

import pytest
from halfeven.models.capture.capture import _run_child
from halfeven.models.capture.failures import described
from halfeven.models.capture.result_file import read_result, write_result
from halfeven.models.errors import CaptureFailed

FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_result_that_was_not_written_to_its_end_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, pathlib; pathlib.Path(sys.argv[1]).with_name('result.json').write_text('{\"notes\": [')"
    )
    (tmp_path / "torn.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CaptureFailed, match="ended its process"):
        _run_child("torn", tmp_path, tmp_path)


def test_a_result_takes_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(path: Path, text: str) -> None:
        path.write_bytes(text[:3].encode())
        raise FULL

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(OSError, match="No space left"):
        write_result(tmp_path, {"notes": []})
    assert not (tmp_path / "result.json").exists()


def test_a_full_disk_is_the_error_of_the_system_whether_or_not_the_child_could_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"folder": str(tmp_path), "path": [], "out": str(tmp_path)}
    elsewhere = OSError(errno.ENOSPC, "No space left on device", "/dev/shm/cache")
    for error, place in ((FULL, str(tmp_path)), (elsewhere, "/dev/shm/cache")):
        write_result(tmp_path, described(error, request))
        with pytest.raises(OSError, match="No space left") as said:
            read_result(tmp_path)
        assert (said.value.errno, said.value.filename) == (errno.ENOSPC, place)
    (tmp_path / "result.json").unlink()
    assert read_result(tmp_path) == {}

    def refused(*_: object) -> int:
        raise FULL

    monkeypatch.setattr(Path, "write_bytes", refused)
    with pytest.raises(OSError, match="No space left"):
        read_result(tmp_path)
