"""Reads the lines that a job's child process reports, until the child ends, the job is cancelled or the server
stops."""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .concluding import Cancelled, JobFailed, ServerStops
from .job_store import JobStore
from .worker_process import Child

CANCEL_SECONDS = 10.0


def lines_of(
    child: Child, id: str, job_store: JobStore, stopping: threading.Event
) -> Iterator[Mapping[str, Any]]:
    """The lines that a child reports; cancelling and shutting down are handled between them.

    Raises Cancelled, ServerStops.
    """
    asked_at: float | None = None
    with child:
        for line in child.lines(every_s=0.1):
            if stopping.is_set():
                raise ServerStops
            if asked_at is None and job_store.job(id).cancel_requested:
                asked_at = time.monotonic()
                child.notify("cancel")
            if asked_at is not None and time.monotonic() > asked_at + CANCEL_SECONDS:
                raise Cancelled
            if line is not None:
                yield line


def result_of(child: Child, last: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """The last line of a child that did its work. Raises JobFailed or Cancelled otherwise."""
    if not last:
        raise JobFailed(
            "WORKER_LOST",
            f"the {what} ended without a result (exit status {child.exit_status}); what serves is unchanged. "
            f"Its last output: {child.last_output()}",
        )
    if last["type"] == "cancelled":
        raise Cancelled
    if last["type"] == "failed":
        trace = f"\n{last['traceback'].rstrip()}" if last.get("traceback") else ""
        raise JobFailed(last["code"], last["message"] + trace)
    return last
