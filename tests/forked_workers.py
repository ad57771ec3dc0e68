"""``pytest --workers N``: the tests are collected once, and N processes forked from that one run them.

Every other option of pytest means what it always does. A worker runs one group of tests after another: those of a file,
or those with the same mark ``together("name")``, whatever their files. The longest groups go first. A worker that finds
no group left takes half of the tests of a file that another worker still has to begin, so no file keeps one worker busy
while the others are done. How long a test takes is remembered in pytest's cache.
"""

import importlib
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest
from halfeven.models.machine.usable_cores import usable_cores

RECORD = "halfeven/seconds"  # in pytest's cache: the seconds of each test that took `WORTH` or more
WORTH = 0.2
SLOW, QUICK = 0.5, 0.05  # seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers",
        metavar="N",
        help="run the tests in N forked processes; 'auto': one more than there are cores",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", 'together("name"): run in one process with the others of this name')


def workers(config: pytest.Config) -> int:
    """The number of processes that run tests beside each other; 0: the one that collected them does.

    ``auto`` is one more than there are cores, because many tests wait for other processes.
    """
    asked = config.getoption("workers")
    return usable_cores() + 1 if asked == "auto" else int(asked or 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count, option = workers(session.config), session.config.option
    broken = session.testsfailed and not option.continue_on_collection_errors
    if not count or broken or option.collectonly or not session.items:
        return None  # pytest's own loop runs the tests, or says what is wrong
    _Run(session, min(count, len(session.items))).run()
    return True


def expected_seconds(item: pytest.Item, recorded: Mapping[str, float]) -> float:
    """About what a test takes: as an earlier run recorded, as its mark ``slow(seconds=…)`` says, or a usual number."""
    mark = item.get_closest_marker("slow")
    return recorded.get(item.nodeid, QUICK if mark is None else mark.kwargs.get("seconds", SLOW))


class Deal:
    """The deal of tests to workers: each asks for its next one. A test is its place in the list of all.

    ``groups``: the group of each test. ``whole``: the groups that no worker takes a part of. ``seconds``: what each
    test takes, about.
    """

    def __init__(self, groups: Sequence[str], whole: set[str], seconds: Sequence[float]) -> None:
        self._groups, self._whole, self._seconds = groups, whole, seconds
        members: dict[str, deque[int]] = {}
        for place, group in enumerate(groups):
            members.setdefault(group, deque()).append(place)
        self._waiting = deque(sorted(members.values(), key=self._length, reverse=True))
        self._begun: dict[object, deque[int]] = {}  # what is left of the group of each worker

    def next(self, worker: object) -> int | None:
        """A test that nobody else has been given; None where there is none left for this worker."""
        own = self._begun.get(worker)
        if not own:
            own = self._begun[worker] = self._waiting.popleft() if self._waiting else self._half_of_another()
        return own.popleft() if own else None

    def take_back(self, worker: object, places: Sequence[int]) -> None:
        """The worker is gone, and has not begun the tests of these places."""
        if left := deque([*places, *self._begun.pop(worker, ())]):
            self._waiting.appendleft(left)

    def stop(self) -> None:
        """No test is given any more."""
        self._waiting.clear()
        self._begun.clear()

    def _length(self, places: deque[int]) -> float:
        return sum(self._seconds[place] for place in places)

    def _half_of_another(self) -> deque[int]:
        """The later half of the tests of the longest file that is begun; nothing where none can be parted."""
        parted = [left for left in self._begun.values() if left and self._groups[left[0]] not in self._whole]
        longest = max(parted, key=self._length, default=deque[int]())
        taken = [longest.pop() for _ in range((len(longest) + 1) // 2)]
        return deque(reversed(taken))


@dataclass(eq=False)
class _Worker:
    """``held``: the places of the tests that it was given and has not ended; the first is the one that it runs."""

    process: int
    link: Connection
    held: deque[int] = field(default_factory=deque[int])


class _Run:
    """The parent: gives tests to workers, and hands their reports to pytest as if it had run the tests itself."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._config, self._items = session, session.config, session.items
        self._cache = getattr(session.config, "cache", None)  # none with -p no:cacheprovider
        self._recorded: dict[str, float] = self._cache.get(RECORD, {}) if self._cache else {}
        self._took: dict[str, float] = {}
        marks = [item.get_closest_marker("together") for item in self._items]
        groups = [
            mark.args[0] if mark else item.nodeid.partition("::")[0]
            for item, mark in zip(self._items, marks, strict=True)
        ]
        seconds = [expected_seconds(item, self._recorded) for item in self._items]
        self._deal = Deal(groups, {mark.args[0] for mark in marks if mark}, seconds)
        self._workers: list[_Worker] = []
        self._count = count

    def run(self) -> None:
        if reporter := self._config.pluginmanager.get_plugin("terminalreporter"):
            reporter.showfspath = False  # tests of many files end by turns
        if "torch" in sys.modules:
            importlib.import_module("torch._dynamo")  # half a second, which each worker would take by itself
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all workers
        try:
            for _ in range(self._count):
                self._start_worker()
            while self._workers:
                self._hear_workers()
        finally:
            for worker in self._workers:
                os.kill(worker.process, signal.SIGKILL)
                os.waitpid(worker.process, 0)
            self._record()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _start_worker(self) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of threads that the fork leaves behind: libraries have some that wait, and start them anew.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if not process:
            ours.close()
            _work(self._session, theirs)
        theirs.close()
        self._workers.append(_Worker(process, ours))

    def _hear_workers(self) -> None:
        by_link: dict[Any, _Worker] = {worker.link: worker for worker in self._workers}
        for link in wait(list(by_link)):
            worker = by_link[link]
            try:
                kind, content = worker.link.recv()
            except (EOFError, ConnectionResetError):
                self._lose(worker)
                continue
            if kind == "next":
                place = self._deal.next(worker)
                if place is not None:
                    worker.held.append(place)
                worker.link.send(place)
            elif kind == "ended":
                worker.held.popleft()
            elif kind == "warning":
                self._config.hook.pytest_warning_recorded.call_historic(kwargs=content)
            else:
                self._report(
                    self._config.hook.pytest_report_from_serializable(config=self._config, data=content)
                )

    def _report(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid] = self._took.get(report.nodeid, 0) + report.duration
        self._config.hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail or self._session.shouldstop:
            self._deal.stop()

    def _lose(self, worker: _Worker) -> None:
        """The worker has ended: as it should, or in the middle of a test, which then has failed."""
        worker.link.close()
        self._workers.remove(worker)
        _, status = os.waitpid(worker.process, 0)
        if not worker.held:
            return
        item = self._items[worker.held[0]]
        self._deal.take_back(worker, list(worker.held)[1:])
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {status >> 8}"
        text = f"the process that ran this test ended ({how}) before the test did"
        self._report(
            pytest.TestReport(
                item.nodeid, item.location, {item.name: 1}, "failed", text, "call", duration=0.0
            )
        )
        self._start_worker()

    def _record(self) -> None:
        """Write the times for the next run. The time of a test that is gone stays until the cache is cleared."""
        if self._cache is not None:
            took = {**self._recorded, **{name: round(seconds, 2) for name, seconds in self._took.items()}}
            self._cache.set(RECORD, {name: each for name, each in took.items() if each >= WORTH})


class _Sender:
    """The plugin of a worker that sends what pytest would print."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: Any, nodeid: str, location: Any
    ) -> None:
        # The warning's text is sent, because the warning itself, or what it is about, may not be one to send.
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        recorded = warnings.WarningMessage(text, Warning, warning_message.filename, warning_message.lineno)
        content = {"warning_message": recorded, "when": when, "nodeid": nodeid, "location": location}
        self._link.send(("warning", content))


def _work(session: pytest.Session, link: Connection) -> NoReturn:
    """A worker: runs what it is given until there is nothing more. Nothing of the parent's is closed or written."""
    status = 0
    try:
        plugins = session.config.pluginmanager
        for name in ("terminalreporter", "terminalprogress-plugin"):
            if plugins.has_plugin(name):
                plugins.unregister(name=name)
        capture: Any = plugins.get_plugin("capturemanager")
        if capture.is_globally_capturing():  # the file of the parent's would be one for all workers
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture(in_=False)
        plugins.register(_Sender(session.config, link))
        _run_given(session, link)
    except BaseException as error:  # nothing of it may reach the parent's code, which is in the frames below
        status = 1
        if not isinstance(error, KeyboardInterrupt | BrokenPipeError | EOFError):
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_given(session: pytest.Session, link: Connection) -> None:
    """One test is always known beforehand: pytest keeps what two tests in turn share."""

    def asked() -> pytest.Item | None:
        link.send(("next", None))
        place = link.recv()
        return None if place is None else session.items[place]

    item = asked()
    while item is not None:
        following = asked()
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        link.send(("ended", None))
        item = following
