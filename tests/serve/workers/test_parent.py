"""The parent process with children that do nothing: what it does at signals, and where it cannot have what it needs."""

import errno
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.store import Store
from halfeven.serve.settings import read_settings
from halfeven.serve.workers import parent
from halfeven.serve.workers.control import Control, read_packet

from tests.patience import PATIENCE_S

SECONDS = PATIENCE_S


class Running:
    """A parent in a process of its own; ``lines`` are its sentences, and the packets that its children hear."""

    def __init__(self, pid: int, lines: Any) -> None:
        self.pid, self._lines = pid, lines

    def until(self, word: str) -> None:
        while select.select([self._lines], [], [], SECONDS)[0] and (line := self._lines.readline()):
            if word in line.decode():
                return
        raise AssertionError(f"it never says {word!r}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def status(self) -> int:
        """The exit status; a signal's is negative."""
        ended = os.pidfd_open(self.pid)
        try:
            assert select.select([ended], [], [], SECONDS)[0], "it does not end"
        finally:
            os.close(ended)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def run_by(
    folder: Path,
    patch: pytest.MonkeyPatch,
    engine: Callable[..., None],
    worker: Callable[..., None],
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[Running]:
    """``engine`` and ``worker`` are given the child's control, and where to write lines. ``prepare`` is called in the
    parent first."""
    reads, writes = os.pipe()

    def report(line: str) -> None:
        os.write(writes, line.encode() + b"\n")

    patch.setattr(parent, "run_engine", lambda settings, store, control, *more: engine(control, report))
    patch.setattr(parent, "run_worker", lambda settings, listener, control, *more: worker(control, report))
    settings = read_settings(store=folder, port=0, http_workers=2)
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            parent.serve_with_workers(settings, Store(folder), report)
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb", 0) as lines:
        try:
            yield Running(pid, lines)
        finally:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def idle(control: Control, report: Callable[[str], None]) -> None:
    """Works, says what it hears, and does nothing of it."""
    control.send(up=True)
    while (packet := heard(control)) is not None:
        report(f"heard {' '.join(packet)}")


def obedient(control: Control, report: Callable[[str], None]) -> None:
    """A process that ends when it hears so."""
    control.send(up=True)
    while (packet := heard(control)) is not None:
        if "leave" in packet or "end" in packet:
            return


def alone(control: Control, report: Callable[[str], None]) -> None:
    """A worker: it asks for a channel, and ends when it hears so."""
    control.send(up=True, alone=True)
    while (packet := heard(control)) is not None:
        report(f"heard {' '.join(packet)}")
        if "leave" in packet:
            return


def never_up(control: Control, report: Callable[[str], None]) -> None:
    """Begins to start, and hears nothing meanwhile."""
    report("starts")
    while True:
        signal.pause()


def heard(control: Control) -> dict[str, Any] | None:
    select.select([control._wire], [], [])
    found = read_packet(control._wire)
    return None if found is None else found[0]


def test_a_third_signal_ends_the_server_as_it_is_and_is_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_by(tmp_path, monkeypatch, idle, idle) as server:
        for word in ("listens on", "heard leave", "heard hurry"):
            server.until(word)
            server.signal()
        assert server.status() == -signal.SIGTERM


def test_a_server_whose_engine_process_still_starts_ends_at_the_first_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may convert models for hours, and nobody has asked it anything."""
    with run_by(tmp_path, monkeypatch, never_up, obedient) as server:
        server.until("listens on")
        server.signal()
        assert server.status() == 0


def fails_at(call: Callable[[], int], number: int) -> Callable[[], int]:
    """The call, of which this one fails."""
    calls = 0

    def counted() -> int:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return call()

    return counted


def test_a_process_that_the_system_does_not_start_now_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_fails() -> None:
        os.fork = fails_at(os.fork, 2)

    with run_by(tmp_path, monkeypatch, obedient, alone, second_fails) as server:
        server.until("listens on")
        server.signal()
        assert server.status() == 0


def test_a_worker_whose_channel_the_system_has_no_memory_for_gets_one_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "new_memory", fails_at(parent.new_memory, 1))
    with run_by(tmp_path, monkeypatch, obedient, alone) as server:
        for _ in range(2):
            server.until("heard connect")
        server.signal()
        assert server.status() == 0
