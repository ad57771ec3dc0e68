"""A full disk: each order says what was not written and how much is free; going back works, and serving goes on."""

from typing import Any

import pytest
from halfeven.models.store.store import Store

from tests.models.full_disk import fill_the_disk
from tests.patience import until
from tests.serve.versions.traffic.conftest import Versions, call, infer, serving
from tests.serve.versions.traffic.conftest import store as store
from tests.serve.versions.traffic.conftest import versions as versions

ORDERS = [
    ("promote", {"version": 3}),
    ("canary", {"version": 3, "percent": 10}),
    ("shadow", {"version": 3, "percent": 10}),
]


@pytest.mark.slow
def test_orders_answer_507_with_words_and_a_rollback_works(
    store: Store, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(store) as (address, _):
        assert call(address, "/v1/models/net/promote", {"version": 2})[0] == 200
        reserve = store.root / ".reserve"
        fill_the_disk(monkeypatch, store.root, free=lambda: not reserve.exists())
        for order, body in ORDERS:
            status, answer = call(address, f"/v1/models/net/{order}", body)
            assert status == 507, answer
            assert answer["code"] == "disk_full" and "bytes are free there" in answer["detail"], answer
            assert ".json cannot be written" in answer["detail"] and "bug" not in answer["detail"]
        assert infer(address) == "2" and store.live_number("net") == 2
        for order in ("canary", "shadow"):
            assert call(address, f"/v1/models/net/{order}", {})[0] == 200, "ending a share is going back"
        assert call(address, "/v1/models/net/rollback", {})[0] == 200
        until(lambda: infer(address) == "1")
        assert store.live_number("net") == 1 and reserve.exists()


def test_on_v2_and_for_a_disk_that_became_read_only_the_words_are_the_same(
    store: Store, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(30, "Read-only file system", str(store.root / "models/net/live"))

    with serving(store) as (address, roster):
        monkeypatch.setattr(roster.writer, "promote", refused)
        monkeypatch.setattr(roster, "unload", refused)
        status, answer = call(address, "/v1/models/net/promote", {"version": 2})
        assert status == 507 and "live cannot be written, its disk is read-only" in answer["detail"]
        status, answer = call(address, "/v2/repository/models/net/unload", {})
        assert status == 507 and "read-only" in answer["error"] and str(store.root) not in answer["error"]
