"""Going back works on a full disk: the reserve file is given up for it, and made again."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.store.reserve import BYTES, keep_reserve, with_reserve
from halfeven.models.store.store import Store

from tests.models.full_disk import fill_the_disk
from tests.serve.versions.traffic.conftest import store as store


def test_a_rollback_works_where_nothing_else_can_be_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.promote(store.version("net", 2))
    keep_reserve(store.root)
    reserve = store.root / ".reserve"
    assert reserve.stat().st_size == BYTES
    fill_the_disk(monkeypatch, store.root, free=lambda: not reserve.exists())
    with pytest.raises(OSError, match="No space left"):
        store.promote(store.version("net", 3))
    assert store.live_number("net") == 2
    assert store.rollback("net").number == 1 and store.live_number("net") == 1
    assert reserve.exists(), "made again, for the next time"


def test_without_a_reserve_or_for_another_reason_the_error_is_raised(tmp_path: Path) -> None:
    calls = list[int]()

    def full() -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, "full")

    def denied() -> None:
        calls.append(1)
        raise PermissionError(errno.EACCES, "denied")

    for deed in (full, denied):
        with pytest.raises(OSError, match=r"full|denied"):
            with_reserve(tmp_path, deed)
    assert len(calls) == 2
    keep_reserve(tmp_path)
    with pytest.raises(PermissionError):
        with_reserve(tmp_path, denied)
    assert len(calls) == 3 and (tmp_path / ".reserve").exists()


def test_a_reserve_that_cannot_be_made_whole_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", write)
    keep_reserve(tmp_path)
    assert list(tmp_path.iterdir()) == []
