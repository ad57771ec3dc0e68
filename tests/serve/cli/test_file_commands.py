"""``halfeven fp16`` and ``halfeven verify``: what they print, and their exit codes."""

from pathlib import Path

import pytest

from tests.command_line import run
from tests.exporters.exported.onnx_net import samples, written

pytestmark = pytest.mark.slow  # conversions


def test_a_half_is_written_and_verified_and_a_changed_one_is_not(tmp_path: Path) -> None:
    net, out, rows = written(tmp_path / "net.onnx"), tmp_path / "net.fp16.onnx", samples(tmp_path / "x.npz")
    code, facts, said = run("fp16", net, "-o", out, "--samples", rows)
    assert code == 0 and facts["verdict"] == "equal" and facts["file"] == str(out)
    code, facts, said = run("verify", out)
    assert code == 0 and facts["status"] == "equal" and facts["digests"] == "as proven"
    out.write_bytes(out.read_bytes() + b"\n")
    code, facts, said = run("verify", out)
    assert code == 3 and "is not the file that was proven" in said


def test_without_a_proven_half_no_file_is_written_and_the_exit_code_is_3(tmp_path: Path) -> None:
    code, facts, _ = run("fp16", written(tmp_path / "net.onnx"), "-o", tmp_path / "out.onnx", "--level", "O0")
    assert code == 3 and facts["verdict"] == "fp32" and facts["file"] is None
    assert not (tmp_path / "out.onnx").exists()
