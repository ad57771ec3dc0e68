"""What the job store forgets: it would grow with every job for ever."""

from .database import Database
from .job_types import FINAL

KEPT_JOBS = 1000  # that have ended, the newest
KEPT_STEPS = 2_000_000  # records of steps of all jobs together, about 500 MB
_ENDED = f"status IN ({', '.join(repr(status) for status in sorted(FINAL))})"
_OF_A_JOB = ("idempotency_keys", "events", "steps", "evaluations")


def forget_old(db: Database, kept_jobs: int = KEPT_JOBS, kept_steps: int = KEPT_STEPS) -> None:
    """Delete the oldest jobs that have ended, with their events, steps and idempotency keys, and what is left of
    deleted files that no job names; where there are too many steps, those of the oldest of the others too."""
    old = f"{_ENDED} ORDER BY number DESC LIMIT -1 OFFSET ?"
    if ids := [row["id"] for row in db.all("id", "jobs", old, kept_jobs)]:
        with db.transaction() as connection:
            for table in _OF_A_JOB:
                connection.executemany(f"DELETE FROM {table} WHERE job = ?", [(id,) for id in ids])
            connection.executemany("DELETE FROM jobs WHERE id = ?", [(id,) for id in ids])
    with db.transaction() as connection:
        connection.execute(
            "DELETE FROM files WHERE deleted AND id NOT IN (SELECT training_file FROM jobs) AND id NOT IN "
            "(SELECT validation_file FROM jobs WHERE validation_file IS NOT NULL)"
        )
    last = "id, (SELECT MAX(step) FROM steps WHERE job = id) AS last"  # counting them would read all records
    steps = {row["id"]: row["last"] or 0 for row in db.all(last, "jobs", f"{_ENDED} ORDER BY number")}
    over = sum(steps.values()) - kept_steps
    for id, count in steps.items():
        if over > 0 and count:
            with db.transaction() as connection:
                connection.execute("DELETE FROM steps WHERE job = ?", [id])
            over -= count
