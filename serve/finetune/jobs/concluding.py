"""The end of a job: its published version is made active, held, or refused.

A version becomes active only where a judging set judged what was learnt and it is better on held-out rows, and only in
place of the parent that it was made from and measured against. The comparison and the promotion are one step, whatever
is promoted or rolled back meanwhile.
"""

import threading
import time

from ....models.errors import Conflict
from ....models.store.store import LIVE, Store, Version
from ...versions.roster import Roster
from .choices.hyperparameter_table import REFUSE, REJUDGE
from .records.job_store import JobStore
from .records.job_types import (
    ACTIVATING,
    FAILED,
    NO_JUDGING_SET,
    NOTHING_LEARNT,
    STALE_PARENT,
    SUCCEEDED,
    JobRow,
)
from .worker_process import Cancelled, JobFailed, ServerStops, StaleParent

SWAP_SECONDS = 600.0  # another device proves again first
FINE_TUNING = "fine-tuning"  # by whose order the version becomes active


def ends_stale(parent: Version, live: int | None, policy: str) -> str | None:
    """A sentence, before the training, where the result can only be published. ``live``: the active version's number;
    ``policy``: the job's ``stale_parent``."""
    if policy != REFUSE or live in (None, parent.number):
        return None
    return (
        f"{parent} is not active, {parent.name}@{live} is: what this job makes is published and not made active. Name "
        f'no version to train from the active one, or set stale_parent = "{REJUDGE}" to have it judged against that one'
    )


class Conclusion:
    """``stopping`` ends the waiting for the roster."""

    def __init__(self, job_store: JobStore, store: Store, roster: Roster, stopping: threading.Event) -> None:
        self._job_store, self._store, self._roster, self._stopping = job_store, store, roster, stopping

    def conclude(self, id: str, version: Version) -> None:
        """Settle a job by the version that it published. Raises JobFailed, Cancelled, ServerStops."""
        job, gate = self._job_store.job(id), version.manifest["gate"]
        if version.status != LIVE:
            refused_by_gate = gate is not None and not gate["passed"]
            code = "METRIC_REGRESSED" if refused_by_gate else "PARITY_FAILED"
            message = version.manifest["reason"]
            self._job_store.move(id, FAILED, code=code, message=message, gate=gate, version=version.number)
            return
        if self._store.live_number(version.name) != version.number:
            if job.cancel_requested:
                raise Cancelled
            if why := gate.get("not_judged"):
                self._leave(job, version, "held", NO_JUDGING_SET, f"and held, not made active: {why}")
                return
            alias = self._replaceable(job, version)
            if why := gate.get("not_learnt"):
                self._leave(job, version, "not promoted", NOTHING_LEARNT, f"and not made active: {why}")
                return
            self._promote(job, version, alias)
        self._await_active(version)
        self._job_store.move(
            id, SUCCEEDED, stage="done", message=f"{version} is active", gate=gate,
            fine_tuned_model=str(version), version=version.number,
        )  # fmt: skip

    def _leave(self, job: JobRow, version: Version, stage: str, code: str, why: str) -> None:
        """Settle a job whose version is published only."""
        message = f"{version} is published {why}; {by_hand(version)}"
        self._job_store.move(
            job.id, SUCCEEDED, stage=stage, code=code, message=message,
            gate=version.manifest["gate"], fine_tuned_model=str(version), version=version.number,
        )  # fmt: skip

    def _replaceable(self, job: JobRow, version: Version) -> int | None:
        """The alias, where the version may take the place of the active one: the gate measured that one, and the
        version was made from it or, with ``stale_parent = "rejudge"``, has kept what it knows."""
        against, alias = version.manifest["gate"].get("against"), self._store.live_number(version.name)
        if self._was_replaced(version):
            raise JobFailed(
                "NOT_SERVED",
                f"{version} was active already, and version {alias} took its place: it is not made active again; "
                f"{by_hand(version)}",
                version.number,
            )
        active = alias if alias is not None else self._serving(version.name)
        if active not in (against, None) or (
            active != version.manifest["parent"] and _policy(job) != REJUDGE
        ):
            raise self._stale(job, version, active)
        return alias

    def _was_replaced(self, version: Version) -> bool:
        """True if another version was made active in place of ``version``. A server that ends within a promotion may
        leave the promotion recorded and not done: the promotion is then done again."""
        promotions = self._store.promotions(version.name).values()
        return any(
            entry["over"] == version.number for each in promotions for entry in (each["first"], each["last"])
        )

    def _promote(self, job: JobRow, version: Version, alias: int | None) -> None:
        self._job_store.note(job.id, stage=ACTIVATING, gate=version.manifest["gate"])
        try:
            self._store.promote_over(alias, version, FINE_TUNING)
        except Conflict:
            raise self._stale(job, version, self._store.live_number(version.name)) from None

    def _stale(self, job: JobRow, version: Version, active: int | None) -> StaleParent:
        """The error of a job whose parent is not active any more. If the job goes on, wait until the new active version
        serves: the next pass is measured against the version that serves, and against an older one is stale again."""
        name, deadline = version.name, time.monotonic() + SWAP_SECONDS
        while _policy(job) != REFUSE and time.monotonic() < deadline and not self._stopping.is_set():
            live = self._store.live_number(name)
            if live is None or self._roster.active(name) == str(live) or self._roster.fault(name, live):
                break
            time.sleep(0.05)
        return _stale(version, active)

    def _serving(self, name: str) -> int | None:
        """The version that serves under a name without an alias: its half was refused, its FP32 original serves."""
        self._roster.wait(SWAP_SECONDS)
        number = self._roster.active(name)
        return None if number is None else int(number)

    def _await_active(self, version: Version) -> None:
        deadline = time.monotonic() + SWAP_SECONDS
        while time.monotonic() < deadline and not self._stopping.is_set():
            if self._roster.active(version.name) == str(version.number):
                return
            if (live := self._store.live_number(version.name)) != version.number:
                message = f"{version} was made active, but it did not serve: version {live} is active now"
                raise JobFailed("NOT_SERVED", message, version.number)
            if fault := self._roster.fault(version.name, version.number):
                message = f"{version} was published, but the server did not take it: {fault}"
                raise JobFailed("NOT_SERVED", message, version.number)
            time.sleep(0.05)
        if self._stopping.is_set():
            raise ServerStops
        message = f"{version} was published but did not become active in {SWAP_SECONDS:g} s"
        raise JobFailed("NOT_SERVED", message, version.number)


def by_hand(version: Version) -> str:
    """The commands with which an operator makes a version active that no job may make active."""
    return (
        f"to make it active all the same: `halfeven promote {version}`, or POST /v1/models/{version.name}/promote with "
        f'{{"version": {version.number}}}'
    )


def _policy(job: JobRow) -> str:
    return job.hyperparameters.get("stale_parent", REFUSE)


def _stale(version: Version, active: int | None) -> StaleParent:
    name, parent = version.name, version.manifest["parent"]
    measured = version.manifest["gate"].get("against")
    measured_against = f" and measured against {name}@{measured}" if measured not in (None, parent) else ""
    return StaleParent(
        STALE_PARENT,
        f"{version} was made from {name}@{parent}{measured_against}, but {name}@{active} is active: making it "
        "active would undo what came since. It is published and not made active; fine-tune "
        f'{name} again, or with stale_parent = "rejudge" (judged against the active version) or "retrain" (trained '
        "again from it); " + by_hand(version),
        version.number,
    )
