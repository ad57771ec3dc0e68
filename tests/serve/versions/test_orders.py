"""Orders, notes and events that are damaged on the disk: named or left out, never an error of another kind."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import DamagedFile
from halfeven.models.store.store import LIVE, Store, Version
from halfeven.serve.versions import orders
from halfeven.serve.versions.orders import (
    EVENTS_MOST_BYTES,
    TrafficOrders,
    drifted,
    events,
    newest_events,
    note_drift,
    pardon,
    read_orders,
    record,
)


@pytest.fixture
def version(tmp_path: Path) -> Version:
    with Store(tmp_path).draft("net") as draft:
        return draft.publish(LIVE, {})


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"device": "cpu"}', "[" * 100_000])
def test_a_half_whose_note_of_drift_is_damaged_does_not_serve(text: str, version: Version) -> None:
    note_drift(version, "cpu", "far off")
    assert (drifted(version, "cpu"), drifted(version, "cuda:0")) == ("far off", None)
    (note,) = version.folder.parent.glob("drifted-*.json")
    note.write_text(text)
    assert "its note of drift cannot be read" in str(drifted(version, "cpu"))
    pardon(version)
    assert drifted(version, "cpu") is None


def test_a_note_of_drift_holds_for_the_version_that_drifted_alone(version: Version) -> None:
    """The state of a server that only reads a store outlives a store that is made anew."""
    note_drift(version, "cpu", "far off")
    assert drifted(replace(version, manifest={**version.manifest, "digest": "another"}), "cpu") is None
    (note,) = version.folder.parent.glob("drifted-*.json")
    note.write_text('{"device": "cpu", "reason": "far off"}')
    assert drifted(version, "cpu") == "far off", "as an earlier release wrote it"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"canary": 1, "shadow": null}',
        '{"canary": {"version": 1, "percent": "all"}, "shadow": null}',
        '{"canary": {"version": null, "percent": 5}, "shadow": null}',
        '{"canary": {"version": 1, "percent": 1e999}, "shadow": null}',
        '{"canary": {"version": 1, "percent": 1' + "0" * 400 + '}, "shadow": null}',
        '{"canary": {"version": 1e999, "percent": 5}, "shadow": null}',
        "[" * 100_000,
    ],
)
def test_damaged_orders_are_named(text: str, version: Version, tmp_path: Path) -> None:
    assert read_orders(Store(tmp_path), "net") == TrafficOrders()
    (version.folder.parent / "rollout.json").write_text(text)
    with pytest.raises(DamagedFile, match=r"rollout\.json cannot be read.*remove it"):
        read_orders(Store(tmp_path), "net")


def test_a_damaged_line_of_the_events_hides_no_other(version: Version, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for kind in ("first", "second"):
        record(store, "net", kind, "it was so")
        with (version.folder.parent / "events.jsonl").open("ab") as file:
            file.write(b'{"kind": "\xff"}\n3\n' + b"[" * 100_000 + b"\n")
    assert [event["kind"] for event in events(store, "net")] == ["second", "first"]
    (version.folder.parent / "events.jsonl").unlink()
    (version.folder.parent / "events.jsonl").mkdir()
    with pytest.raises(DamagedFile, match=r"events\.jsonl cannot be read"):
        events(store, "net")


def test_events_of_whatever_size_stay_within_their_bound(version: Version, tmp_path: Path) -> None:
    store, path = Store(tmp_path), version.folder.parent / "events.jsonl"
    sizes = np.random.default_rng().integers(100, 20_000, 300).tolist()
    largest = 0
    for number, size in enumerate(sizes):
        record(store, "net", "made_up", f"{number} " + "x" * size)
        largest = max(largest, path.stat().st_size)
    assert EVENTS_MOST_BYTES // 2 < largest <= EVENTS_MOST_BYTES
    numbers = [int(event["message"].split()[0]) for event in events(store, "net", 300)]
    assert len(numbers) > 20 and numbers == list(range(299, 299 - len(numbers), -1))


def test_an_error_without_a_number_is_an_event_too(version: Version, tmp_path: Path) -> None:
    """An answer that is no number, or a wrong integer, errs by infinity: the worst events of all."""
    record(Store(tmp_path), "net", "drift", "it was so", {"worst": math.inf, "all": [1.0, math.nan]})
    (event,) = events(Store(tmp_path), "net")
    assert event["numbers"] == {"worst": None, "all": [1.0, None]}


def test_the_newest_events_of_many_models_are_those_of_all_their_files_and_old_files_are_not_read(
    tmp_path: Path, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, everything = Store(tmp_path), list[tuple[str, str]]()
    times = np.sort(random.permutation(60).reshape(12, 5))
    for model in range(12):
        folder = tmp_path / "models" / f"m{model}"
        folder.mkdir(parents=True)
        for count, second in enumerate(times[model].tolist()):
            monkeypatch.setattr(orders, "_now", lambda second=second: orders._at(second))
            record(store, folder.name, "made_up", f"{folder.name}-{count}")
            everything.append((orders._at(second), f"{folder.name}-{count}"))
        os.utime(folder / "events.jsonl", (times[model].max(), times[model].max()))
    read = list[str]()
    plain = orders.events

    def counted(store: Store, name: str, most: int) -> list[dict[str, Any]]:
        read.append(name)
        return plain(store, name, most)

    monkeypatch.setattr(orders, "events", counted)
    names = [f"m{model}" for model in range(12)]
    for most in (1, 7, 60):
        read.clear()
        found = newest_events(store, names, most)
        assert [one["message"] for one in found] == [text for _, text in sorted(everything, reverse=True)][
            :most
        ]
        assert len(read) <= most + 1
    (tmp_path / "models" / "m3" / "events.jsonl").unlink()
    (tmp_path / "models" / "m3" / "events.jsonl").mkdir()
    assert {one["model"] for one in newest_events(store, names, 60) if one["kind"] == "damaged"} == {"m3"}
