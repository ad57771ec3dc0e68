"""The end of a job by its published version, whatever moved meanwhile: real stores, a roster that follows."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.store.promotions import record_promotion
from halfeven.models.store.store import LIVE, REFUSED, Store, Version
from halfeven.serve.finetune.jobs import concluding
from halfeven.serve.finetune.jobs.concluding import Conclusion
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord, JobRequest, JobRow
from halfeven.serve.finetune.jobs.worker_process import Cancelled, JobFailed
from halfeven.serve.finetune.web.openai_shapes import job_body

Gate = dict[str, Any]
PASSED: Gate = {"passed": True, "against": 1, "not_judged": None}


class Roster:
    """A roster that serves what the alias says; ``serving`` where there is none."""

    def __init__(self, store: Store) -> None:
        self.store, self.serving = store, "1"

    def active(self, name: str) -> str | None:
        live = self.store.live_number(name)
        return self.serving if live is None else str(live)

    def wait(self, timeout_s: float) -> None: ...

    def fault(self, name: str, number: int) -> None: ...


def publish(store: Store, status: str = LIVE, **facts: Any) -> Version:
    with store.draft("net") as draft:
        draft.write_json("nonce.json", len(store.numbers("net")))
        return draft.publish(status, {"reason": "made up", "parent": None, "gate": None, **facts})


def learnt(store: Store, gate: Gate | None = None, status: str = LIVE, parent: int = 1) -> Version:
    return publish(store, status, parent=parent, awaits_promotion=True, gate={**PASSED, **(gate or {})})


class Place:
    """``net@1`` is active, and a job that was made from it runs."""

    def __init__(self, root: Path) -> None:
        self.store, self.job_store = Store(root), JobStore(root / "halfeven.db")
        self.roster: Any = Roster(self.store)
        self.store.promote(publish(self.store))
        self.job_store.add_file(FileRecord("file-1", "a" * 64, 10, "train.npz", 1))
        self.id = self.job_store.create_job(JobRequest("net", "net", 1, "file-1", {}, 3))[0].id
        self.job_store.move(self.id, "running", stage="judging")
        self.conclusion = Conclusion(self.job_store, self.store, self.roster, threading.Event())

    def conclude(self, version: Version) -> JobRow:
        self.conclusion.conclude(self.id, version)
        return self.job_store.job(self.id)

    def refused(self, version: Version) -> JobFailed:
        live = self.store.live_number("net")
        with pytest.raises(JobFailed) as caught:
            self.conclude(version)
        assert self.store.live_number("net") == live and caught.value.version == version.number
        return caught.value


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "store")
    yield made
    made.job_store.close()


def test_what_is_judged_and_from_the_active_parent_is_promoted_over_it(place: Place) -> None:
    job = place.conclude(learnt(place.store))
    assert (job.status, job.stage, job.fine_tuned_model) == ("succeeded", "done", "net@2")
    assert job_body(job)["halfeven"]["promotion"] == {"state": "promoted", "code": None, "message": None}
    assert place.store.live_number("net") == 2
    assert place.store.promotions("net")[2]["first"]["by"] == "fine-tuning"


def test_what_nothing_judges_is_held_with_the_way_out(place: Place) -> None:
    job = place.conclude(learnt(place.store, {"not_judged": "nothing judges it: give a validation file"}))
    assert (job.status, job.stage, job.code, job.fine_tuned_model) == (
        "succeeded",
        "held",
        "NO_JUDGING_SET",
        "net@2",
    )
    assert job.message and "give a validation file" in job.message and "halfeven promote net@2" in job.message
    assert place.store.live_number("net") == 1


def test_what_learnt_nothing_succeeds_and_is_not_promoted(place: Place) -> None:
    job = place.conclude(learnt(place.store, {"not_learnt": "it is not better on the 36 held-out rows"}))
    assert (job.status, job.stage, job.code, job.fine_tuned_model) == (
        "succeeded",
        "not promoted",
        "NOTHING_LEARNT",
        "net@2",
    )
    assert job_body(job)["halfeven"]["promotion"]["state"] == "not promoted"
    assert job.message and "36 held-out rows" in job.message and "halfeven promote net@2" in job.message
    assert place.store.live_number("net") == 1


def test_a_promotion_while_it_was_made_makes_it_stale(place: Place) -> None:
    place.store.promote(publish(place.store))
    error = place.refused(learnt(place.store))
    assert error.code == "STALE_PARENT"
    for words in (
        "net@3 was made from net@1",
        "net@2 is active",
        "halfeven promote net@3",
        "fine-tune net again",
    ):
        assert words in str(error)


def test_a_rollback_while_it_was_made_makes_it_stale_and_going_forward_again_does_not(place: Place) -> None:
    """The parent is version 2; version 1 is what a rollback goes to."""
    parent = publish(place.store)
    place.store.promote(parent)
    id = place.job_store.create_job(JobRequest("net", "net", 2, "file-1", {}, 3))[0].id
    place.job_store.move(id, "running", stage="judging")
    place.id = id
    version = learnt(place.store, {"against": 2}, parent=2)
    place.store.rollback("net")
    assert place.refused(version).code == "STALE_PARENT"
    place.store.promote(parent)
    assert place.conclude(version).status == "succeeded"


def test_what_was_measured_against_another_version_than_its_parent_is_stale(place: Place) -> None:
    """Somebody promoted and went back while the gate measured."""
    error = place.refused(learnt(place.store, {"against": 7}))
    assert error.code == "STALE_PARENT" and "measured against net@7" in str(error)


def test_a_job_that_may_be_judged_against_the_active_version_replaces_it(place: Place) -> None:
    """The gate of the job measured version 2, which became active while the job was trained."""
    place.store.promote(publish(place.store))
    job, _ = place.job_store.create_job(JobRequest("net", "net", 1, "file-1", {"stale_parent": "rejudge"}, 3))
    place.job_store.move(job.id, "running", stage="judging")
    place.id = job.id
    assert place.refused(learnt(place.store, {"against": 1})).code == "STALE_PARENT", "it measured another"
    done = place.conclude(learnt(place.store, {"against": 2}))
    assert (done.status, done.fine_tuned_model) == ("succeeded", "net@4")
    assert place.store.live_number("net") == 4


def test_a_job_that_goes_on_waits_until_the_version_that_came_meanwhile_serves(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def swaps_late(name: str) -> str:
        asked.append(name)
        return "1" if len(asked) < 3 else "2"

    monkeypatch.setattr(place.roster, "active", swaps_late)
    monkeypatch.setattr(concluding.time, "sleep", lambda _: None)
    request = JobRequest("net", "net", 1, "file-1", {"stale_parent": "retrain"}, 3)
    place.id = place.job_store.create_job(request)[0].id
    place.job_store.move(place.id, "running", stage="judging")
    place.store.promote(publish(place.store))
    assert place.refused(learnt(place.store)).code == "STALE_PARENT"
    assert len(asked) == 3


def test_a_job_that_learnt_nothing_from_a_stale_parent_is_called_stale(place: Place) -> None:
    place.store.promote(publish(place.store))
    assert place.refused(learnt(place.store, {"not_learnt": "no better"})).code == "STALE_PARENT"


def test_a_promotion_between_the_look_and_the_move_is_not_undone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, other, note = learnt(place.store), publish(place.store), place.job_store.note

    def late(*words: Any, **given: Any) -> None:
        place.store.promote(other)
        note(*words, **given)

    monkeypatch.setattr(place.job_store, "note", late)
    with pytest.raises(JobFailed) as caught:
        place.conclude(version)
    assert caught.value.code == "STALE_PARENT" and place.store.live_number("net") == 3


def test_after_a_crash_behind_the_promotion_the_job_ends_as_promoted(place: Place) -> None:
    version = learnt(place.store)
    place.job_store.note(place.id, stage="activating")
    place.store.promote_over(1, version, "fine-tuning")
    assert place.conclude(version).status == "succeeded"


@pytest.mark.parametrize("recorded", [False, True])
def test_after_a_crash_within_the_promotion_it_is_done(place: Place, recorded: bool) -> None:
    """The crash comes before anything was written, or between the record and the alias."""
    version = learnt(place.store)
    place.job_store.note(place.id, stage="activating")
    if recorded:
        record_promotion(place.store.root / "models/net", version.number, 1, "fine-tuning")
    assert place.conclude(version).status == "succeeded" and place.store.live_number("net") == 2


def test_after_a_crash_in_the_promotion_an_operator_s_rollback_is_not_undone(place: Place) -> None:
    version = learnt(place.store)
    place.job_store.note(place.id, stage="activating")
    place.store.promote_over(1, version, "fine-tuning")
    place.store.rollback("net")
    error = place.refused(version)
    assert error.code == "NOT_SERVED" and "halfeven promote net@2" in str(error)


def test_a_job_that_is_to_be_cancelled_promotes_nothing(place: Place) -> None:
    version = learnt(place.store)
    place.job_store.request_cancel(place.id)
    with pytest.raises(Cancelled):
        place.conclude(version)
    assert place.store.live_number("net") == 1


def test_over_a_parent_that_serves_without_an_alias_it_is_promoted_and_over_another_it_is_not(
    place: Place,
) -> None:
    """The parent's half was refused: its FP32 original serves, and the store names nothing."""
    (place.store.root / "models/net/live").unlink()
    version = learnt(place.store)
    place.roster.serving = "7"
    assert place.refused(version).code == "STALE_PARENT"
    place.roster.serving = "1"
    assert place.conclude(version).status == "succeeded"


def test_a_refused_version_fails_its_job_with_the_gate_s_numbers(place: Place) -> None:
    job = place.conclude(learnt(place.store, {"passed": False}, REFUSED))
    assert (job.status, job.code, job.version) == ("failed", "METRIC_REGRESSED", 2)
    assert job.gate is not None and job.gate["passed"] is False
