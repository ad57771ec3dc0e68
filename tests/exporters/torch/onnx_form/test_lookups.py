"""A fact that torch.onnx looks up for every file is looked up once, the files are the same, and torch is left as it
was."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from halfeven.exporters.torch.onnx_form import decompositions, export
from halfeven.exporters.torch.onnx_form.export import write_onnx
from torch._export import utils as ops_of_torch
from torch.onnx._internal.exporter import _registration

from tests.nets import captured_net

registration: Any = _registration
Registry = registration.ONNXRegistry


@pytest.mark.slow
def test_files_are_the_same_and_what_is_looked_up_for_all_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (looked_up.update([name]), function(*given))[1])

    counted(registration.onnxscript_apis, "get_torchlib_ops")
    counted(ops_of_torch, "_materialize_cpp_cia_ops")
    decompositions._translations.cache_clear()
    model = captured_net("in place")  # which torch.onnx traces again
    for file in ("one", "other"):
        write_onnx(model.program, model.spec, tmp_path / file, {})
    assert looked_up == {"get_torchlib_ops": 1, "_materialize_cpp_cia_ops": 2}
    monkeypatch.setattr(export, "looked_up_once", nullcontext)
    write_onnx(model.program, model.spec, tmp_path / "as torch does it", {})
    assert looked_up["get_torchlib_ops"] == 2 and looked_up["_materialize_cpp_cia_ops"] > 3
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


def test_torch_is_left_as_it_was_also_by_a_file_that_fails() -> None:
    before = vars(Registry)["from_torchlib"], vars(ops_of_torch)["_materialize_cpp_cia_ops"]
    with pytest.raises(ValueError), decompositions.looked_up_once():
        assert vars(Registry)["from_torchlib"] is not before[0]
        raise ValueError
    assert before == (vars(Registry)["from_torchlib"], vars(ops_of_torch)["_materialize_cpp_cia_ops"])


def test_a_torch_without_these_functions_looks_up_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ops_of_torch, "_materialize_cpp_cia_ops")
    monkeypatch.delattr(Registry, "from_torchlib")
    with decompositions.looked_up_once():
        assert not hasattr(ops_of_torch, "_materialize_cpp_cia_ops")
        assert not hasattr(Registry, "from_torchlib")
