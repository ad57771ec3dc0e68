"""A half with its proof, which is converted once for all tests of this folder."""

import shutil
from pathlib import Path

import pytest
from halfeven.exporters.conversion.convert import Options
from halfeven.exporters.half_files.half_file import write_half

from tests.exporters.half_files.onnx_net import samples, written
from tests.kept import kept_store


def _make(where: Path) -> None:
    where.mkdir()
    write_half(
        written(where / "net.onnx"), where / "net.fp16.onnx", Options(samples=samples(where / "x.npz"))
    )


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """The file; with its proof, the model ``net.onnx`` and the samples ``x.npz`` beside it, to be damaged at will."""
    return shutil.copytree(kept_store(__file__, _make), tmp_path / "files") / "net.fp16.onnx"
