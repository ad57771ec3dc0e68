"""Ops write over an input of which they know that it is new memory; oneDNN's are known where torch has them."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import SimpleNamespace

import pytest
import torch
from halfeven.models.engines.cpu import in_place


def test_a_torch_without_onednn_has_the_other_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's wheels: the import of every engine failed there."""
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    loader = SourceFileLoader("halfeven.models.engines.cpu.in_place_again", in_place.__file__)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    again = module_from_spec(spec)
    loader.exec_module(again)
    named = {str(op).partition(".")[0] for op in in_place._FRESH - again._FRESH}
    assert named <= {"mkldnn"} and torch.ops.aten.linear.default in again._FRESH
