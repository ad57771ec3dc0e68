"""A bad file is told, and a deadly one kills nobody but a child."""

from pathlib import Path

import onnx
import pytest
from halfeven.exporters.torch.onnx_form import check as onnx_check
from halfeven.exporters.torch.onnx_form.check import check_file
from halfeven.models.errors import ExportFailed, OutOfTime
from halfeven.models.order.one_order import OrderBounds, one_order
from onnx import TensorProto, helper


def written(path: Path, op: str) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.mark.parametrize("bodies", [False, True])
def test_a_valid_file_passes_here_and_in_a_child(tmp_path: Path, bodies: bool) -> None:
    check_file(written(tmp_path / "good.onnx", "Relu"), bodies)


@pytest.mark.slow
def test_a_large_file_is_checked_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_check, "LARGE", 1)
    check_file(written(tmp_path / "good.onnx", "Relu"), False)
    with pytest.raises(ExportFailed, match="NoSuchOp"):
        check_file(written(tmp_path / "bad.onnx", "NoSuchOp"), False)


def test_a_file_that_kills_its_reader_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_check, "_CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(ExportFailed, match=r"crashes \(signal 11\) when it loads good.onnx"):
        check_file(written(tmp_path / "good.onnx", "Relu"), bodies=True)


def test_a_check_that_does_not_end_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_check, "_CHILD", "import time; time.sleep(600)")
    with one_order(OrderBounds(seconds=0.2)), pytest.raises(OutOfTime, match=r"has taken 0\.2 s"):
        check_file(written(tmp_path / "good.onnx", "Relu"), bodies=True)
