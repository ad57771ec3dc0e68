"""A package that only some users need is an extra: where it is missed, a sentence names it."""

import sys
from pathlib import Path
from typing import Any, cast

import pytest
from halfeven.models.errors import BadSamples, BadSetting
from halfeven.serve.finetune.data.tables import CSV, _table
from halfeven.serve.server import grpc_beside
from halfeven.serve.settings import read_settings


def test_a_table_without_pyarrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadSamples, match=r"safetensors or npz.*pip install 'halfeven\[finetune\]'"):
        _table(tmp_path / "rows.csv", CSV, 1000)


def test_a_grpc_port_without_grpcio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in [name for name in sys.modules if name.startswith("halfeven.serve.grpc.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BadSetting, match=r"--grpc-port needs .*pip install 'halfeven\[grpc\]'"):
        grpc_beside(read_settings(grpc_port=0), *cast(Any, (None, None, None)))
