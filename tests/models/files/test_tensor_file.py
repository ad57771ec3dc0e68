"""A file of tensors has the errors and the mode of any other new file."""

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.models.files.tensor_file import save_tensors

ARRAYS = {"x": np.zeros(1000, np.float32)}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def umask_of(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_a_write_that_the_system_refuses_is_its_error_with_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        save_tensors(tmp_path / "none" / "x", ARRAYS)
    assert missing.value.filename == str(tmp_path / "none" / "x")
    for tensors in (ARRAYS, {"x": torch.zeros(1000)}):
        with pytest.raises(OSError) as refused, files_of_at_most(100):
            save_tensors(tmp_path / "x", tensors)
        assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(tmp_path / "x"))
        assert not [*tmp_path.iterdir()]


def test_a_file_has_the_mode_of_any_new_file_unless_it_is_private(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").touch()
    shared.chmod(0o664)
    with umask_of(0o027):
        save_tensors(shared, ARRAYS)
        save_tensors(new := tmp_path / "new", ARRAYS)
        save_tensors(private := tmp_path / "private", ARRAYS, private=True)
    assert [stat.S_IMODE(file.stat().st_mode) for file in (shared, new, private)] == [0o664, 0o640, 0o600]
