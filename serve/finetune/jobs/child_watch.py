"""Reads the lines that a job's child process reports, until the child ends, the job is cancelled or paused, or the
server stops."""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ....models.order.lacking_memory import exit_words
from .concluding import Cancelled, JobFailed, Paused, ServerStops, WorkerLost
from .records.job_store import JobStore
from .worker_process import Child

LOOK_EVERY_S = 0.05  # at the job's row: a small net makes a thousand steps a second, each with a line
CANCEL_SECONDS = 10.0  # for the step that is being made
PAUSE_SECONDS = 30.0  # for that step and a checkpoint


def lines_of(
    child: Child, id: str, job_store: JobStore, stopping: threading.Event, pauses: bool = False
) -> Iterator[Mapping[str, Any]]:
    """The lines that a child reports; cancelling, pausing and shutting down are handled between them.

    ``pauses``: the child has a checkpoint to write first. Raises Cancelled, Paused, ServerStops.
    """
    until: dict[str, float] = {}  # by the word that was sent: when its answer is waited for no longer
    looked = -math.inf
    with child:
        for line in child.lines(every_s=0.1):
            if stopping.is_set():
                raise ServerStops
            if line is not None and time.monotonic() - looked < LOOK_EVERY_S:
                yield line
                continue
            job, looked = job_store.job(id), time.monotonic()
            if job.pause_requested and not pauses:
                raise Paused
            for word, asked, seconds in (
                ("cancel", job.cancel_requested, CANCEL_SECONDS),
                ("pause", job.pause_requested, PAUSE_SECONDS),
            ):
                if asked and word not in until:
                    until[word] = time.monotonic() + seconds
                    child.notify(word)
            if time.monotonic() > until.get("cancel", math.inf):
                raise Cancelled
            if time.monotonic() > until.get("pause", math.inf):
                raise Paused
            if line is not None:
                yield line


def result_of(child: Child, last: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """The last line of a child that did its work. Raises JobFailed (WorkerLost), Cancelled or Paused otherwise."""
    if not last:
        raise WorkerLost(
            "WORKER_LOST",
            f"the {what} ended without a result ({exit_words(child.exit_status)}); what serves is unchanged. "
            f"Its last output: {child.last_output()}",
        )
    if last["type"] == "cancelled":
        raise Cancelled
    if last["type"] == "paused":
        raise Paused
    if last["type"] == "failed":
        trace = f"\n{last['traceback'].rstrip()}" if last.get("traceback") else ""
        raise JobFailed(last["code"], last["message"] + trace)
    return last
