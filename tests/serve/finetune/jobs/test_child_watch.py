"""The lines of a job's process are handed on, and the job's row is looked at between them."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
from halfeven.serve.finetune.jobs import worker_process
from halfeven.serve.finetune.jobs.worker_process import Paused, lines_of


class Reporting:
    """A child that reports many lines at once, then nothing for a moment."""

    def __enter__(self) -> "Reporting":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass

    def lines(self, every_s: float) -> Iterator[dict[str, Any] | None]:
        yield from ({"step": step} for step in range(1000))
        yield None


def watched(asked_to_pause: bool) -> tuple[list[Any], int]:
    """The lines that came, and how often the job's row was read."""
    read: list[str] = []

    def job(id: str) -> SimpleNamespace:
        read.append(id)
        return SimpleNamespace(cancel_requested=False, pause_requested=asked_to_pause and len(read) > 1)

    lines: list[Any] = []
    job_store: Any = SimpleNamespace(job=job)
    child: Any = Reporting()
    try:
        lines.extend(lines_of(child, "ftjob-1", job_store, threading.Event()))
    except Paused:
        lines.append("paused")
    return lines, len(read)


def test_of_a_thousand_lines_in_a_moment_not_each_costs_a_look_at_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The lines come in a moment, however busy the machine is.
    monkeypatch.setattr(worker_process, "LOOK_EVERY_S", 1e9)
    assert watched(False) == ([{"step": step} for step in range(1000)], 2)
    assert watched(True)[0][-1] == "paused", "where no line comes the job is looked at"
