"""``halfeven diff``: its answers and exit codes."""

from pathlib import Path

import pytest

from tests.command_line import run
from tests.exporters.half_files.onnx_net import samples, written

pytestmark = pytest.mark.slow  # processes of their own


def test_the_first_tensor_that_differs_is_named(tmp_path: Path) -> None:
    net, rows = written(tmp_path / "net.onnx"), samples(tmp_path / "x.npz")
    code, facts, said = run("diff", net, net, "--samples", rows)
    assert code == 0 and facts["equal"] and facts["tensors"] == 3
    other = written(tmp_path / "other.onnx", loud=1.5)
    code, facts, said = run("diff", net, other, "--samples", rows, "--out", tmp_path / "node")
    assert code == 3 and facts["first"]["tensor"] == "h" and (tmp_path / "node" / "node.onnx").is_file()
    code, _, said = run("diff", net, net, "--samples", rows, "--dtype", "fp8")
    assert code == 2 and "expected one of fp32, fp16, bf16" in said
