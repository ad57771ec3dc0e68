"""The thread that owns a device: fair, quiet, and not to be killed by what it runs."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from halfeven.models.errors import NotReady
from halfeven.serve.batching.device import BACKGROUND_EVERY_NS, Bell, DeviceThread

from tests.patience import PATIENCE_S


class BatchScheduler:
    """A batcher without requests: a list of arrival times, one batch each, recorded in a common list of events."""

    def __init__(self, name: str, events: list[str], *arrivals_ns: int) -> None:
        self.name, self.events, self.arrivals_ns = name, events, list(arrivals_ns)
        self.refused = False
        self.computing = False

    def due_ns(self) -> int | None:
        return min(self.arrivals_ns, default=None)

    def step(self) -> None:
        first_ns = min(self.arrivals_ns)
        self.arrivals_ns.remove(first_ns)
        self.events.append(f"{self.name}{first_ns}")

    def land(self) -> bool:
        return False

    def refuse(self) -> None:
        self.refused = True


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    device = DeviceThread(clock=lambda: 100)
    yield device
    assert device.stop(30)


def looked(device: DeviceThread) -> None:
    """Return after the thread has looked at least once and found nothing to do but calls."""
    for _ in range(2):
        device.call(lambda: None).result(PATIENCE_S)


def test_the_oldest_waiting_request_of_all_models_goes_first(device: DeviceThread) -> None:
    events: list[str] = []
    device.attach(BatchScheduler("a", events, 1, 4, 5))
    device.attach(BatchScheduler("b", events, 2, 3, 6))
    device.start()
    assert device.stop(30)
    assert events == ["a1", "b2", "b3", "a4", "a5", "b6"]


def test_calls_run_on_the_device_thread_and_their_results_and_errors_come_back(device: DeviceThread) -> None:
    device.start()
    assert device.call(lambda: device.here).result(PATIENCE_S)
    assert not device.here
    with pytest.raises(ZeroDivisionError):
        device.call(lambda: 1 / 0).result(PATIENCE_S)
    assert device.call(lambda: 7).result(PATIENCE_S) == 7


def test_a_call_cancelled_before_its_turn_is_not_run(device: DeviceThread) -> None:
    ran: list[int] = []
    future = device.call(lambda: ran.append(1))
    assert future.cancel()
    device.start()
    looked(device)
    assert ran == []


def test_a_long_line_of_calls_does_not_starve_the_batches(device: DeviceThread) -> None:
    events: list[str] = []
    device.attach(BatchScheduler("a", events, 1, 2, 3))
    for _ in range(4):
        device.call(lambda: events.append("call"))
    device.start()
    assert device.stop(30)
    assert events == ["call", "a1", "call", "a2", "call", "a3", "call"]


@pytest.mark.parametrize("where", ["step", "due_ns"])
def test_a_queue_that_raises_kills_neither_the_thread_nor_the_other_models(
    device: DeviceThread, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []
    broken = BatchScheduler("broken", events, 1)

    def fail() -> Any:
        broken.arrivals_ns.clear()
        raise MemoryError

    setattr(broken, where, fail)
    device.attach(broken)
    device.attach(BatchScheduler("a", events, 2))
    device.start()
    looked(device)
    assert events == ["a2"] and device.alive
    assert "MemoryError" in caplog.text
    device.detach(broken)


def test_a_call_that_exits_the_interpreter_does_not_end_the_thread(device: DeviceThread) -> None:
    def leave() -> None:
        raise SystemExit(3)

    device.start()
    with pytest.raises(SystemExit):
        device.call(leave).result(PATIENCE_S)
    assert device.call(lambda: 1).result(PATIENCE_S) == 1


def test_it_sleeps_without_a_timer_unless_a_batch_is_due_later(device: DeviceThread) -> None:
    slept: list[int | None] = []
    timed = threading.Event()
    wait = device._bell.wait

    def noted(timeout_ns: int | None = None) -> bool:
        slept.append(timeout_ns)
        if timeout_ns == 3_600_000_000_000:
            timed.set()
        return wait(timeout_ns)

    device._bell.wait = noted
    later = BatchScheduler("a", [], 100 + 3_600_000_000_000)
    device.start()
    looked(device)
    assert set(slept) <= {None}
    device.attach(later)
    looked(device)
    device.ring()
    assert timed.wait(PATIENCE_S)
    device.detach(later)


def test_held_it_begins_no_batch_but_runs_calls(device: DeviceThread) -> None:
    events: list[str] = []
    device.hold()
    device.attach(BatchScheduler("a", events, 1))
    device.start()
    looked(device)
    assert events == []
    device.release()
    looked(device)
    assert events == ["a1"]


def test_stopping_refuses_first_then_finishes_what_waits(device: DeviceThread) -> None:
    events: list[str] = []
    # The last is due later: stopping does not wait for it.
    scheduler = BatchScheduler("a", events, 1, 2, 9_999)
    device.attach(scheduler)
    device.hold()
    device.start()
    last = device.call(lambda: events.append("call"))
    assert device.stop(30)
    assert scheduler.refused and last.done() and not device.alive
    assert sorted(events) == ["a1", "a2", "a9999", "call"]
    with pytest.raises(NotReady, match="stopping"):
        device.call(lambda: None)
    assert not device.ring()


def test_stopping_one_that_was_never_started_still_finishes_what_waits() -> None:
    device = DeviceThread()
    future = device.call(lambda: 5)
    assert device.stop(30)
    assert future.result(0) == 5


def test_stopping_says_so_when_a_call_outlasts_its_time(device: DeviceThread) -> None:
    inside, gate = threading.Event(), threading.Event()

    def long() -> None:
        inside.set()
        assert gate.wait(PATIENCE_S)

    device.start()
    future = device.call(long)
    assert inside.wait(PATIENCE_S)
    assert not device.stop(0)
    gate.set()
    assert future.result(PATIENCE_S) is None


def test_a_bell_rung_many_times_is_heard_once() -> None:
    bell = Bell()
    for _ in range(3):
        bell.ring()
    bell.wait()
    heard = threading.Event()
    listener = threading.Thread(target=lambda: (bell.wait(), heard.set()))
    listener.start()
    assert not heard.is_set()
    bell.ring()
    assert heard.wait(PATIENCE_S)
    listener.join()


# Batches in the background


class Busy(BatchScheduler):
    """A scheduler that always has a batch, until its number of rounds is over; each round moves the clock on."""

    def __init__(self, name: str, events: list[str], rounds: int, then: Callable[[], None]) -> None:
        super().__init__(name, events, *range(rounds))
        self.then = then

    def due_ns(self) -> int | None:
        return 0 if self.arrivals_ns else None

    def step(self) -> None:
        super().step()
        self.then()


def test_in_the_background_a_batch_waits_for_everybody_elses() -> None:
    events: list[str] = []
    device = DeviceThread(clock=lambda: 100)
    device.attach(BatchScheduler("shadow", events, 1, 2), background=True)
    device.attach(BatchScheduler("a", events, 3, 4))
    device.start()
    assert device.stop(30)
    assert events == ["a3", "a4", "shadow1", "shadow2"]


def test_under_full_load_the_background_gets_one_turn_a_second_and_no_more() -> None:
    events: list[str] = []
    now = [0]

    def tenth() -> None:
        now[0] += BACKGROUND_EVERY_NS // 10

    device = DeviceThread(clock=lambda: now[0])
    device.attach(Busy("a", events, 35, tenth))
    device.attach(Busy("shadow", events, 9, lambda: None), background=True)
    device.start()
    for _ in range(50):
        looked(device)
    assert device.stop(30)
    places = [place for place, name in enumerate(events[:38]) if name.startswith("shadow")]
    assert places == [10, 21, 32]
    assert [name[0] for name in events[38:]] == ["s"] * 6


def test_the_background_may_go_while_everybody_else_waits_for_a_batch_to_fill(device: DeviceThread) -> None:
    events: list[str] = []
    later = BatchScheduler("a", events, 9_999)
    device.attach(later)
    device.attach(BatchScheduler("shadow", events, 1), background=True)
    device.start()
    for _ in range(3):
        looked(device)
    assert events == ["shadow1"]
    device.detach(later)


def test_it_wakes_for_the_background_as_well(device: DeviceThread) -> None:
    slept: list[int | None] = []
    wait = device._bell.wait
    device._bell.wait = lambda timeout_ns=None: (slept.append(timeout_ns), wait(timeout_ns))[1]
    a, shadow = (
        BatchScheduler("a", [], 100 + 7_200_000_000_000),
        BatchScheduler("s", [], 100 + 3_600_000_000_000),
    )
    device.attach(a)
    device.attach(shadow, background=True)
    device.start()
    looked(device)
    assert 3_600_000_000_000 in slept
    device.detach(a)
    device.detach(shadow)


def test_stopping_refuses_and_finishes_the_background_too(device: DeviceThread) -> None:
    events: list[str] = []
    shadow = BatchScheduler("shadow", events, 9_999)
    device.attach(shadow, background=True)
    device.start()
    assert device.stop(30)
    assert shadow.refused and events == ["shadow9999"]


def test_a_device_that_is_lost_says_why_first(device: DeviceThread) -> None:
    assert device.lost is None
    device.lose("the driver reset it")
    device.lose("everything fails")
    assert device.lost == "the driver reset it"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness belongs to the process")
def test_a_thread_that_computes_stands_behind_those_that_speak_http_and_so_do_the_ones_it_starts() -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    def nice_of_another() -> int:
        with ThreadPoolExecutor(1) as another:
            return another.submit(nice).result(PATIENCE_S)

    before = nice()
    device = DeviceThread(nice=3)
    device.start()
    assert device.call(nice).result(PATIENCE_S) == before + 3
    assert device.call(nice_of_another).result(PATIENCE_S) == before + 3
    assert device.stop(30)
    assert nice() == before


def test_after_work_and_a_rest_it_is_told_once() -> None:
    reply: list[int] = []
    resting = threading.Event()

    def at_rest() -> None:
        reply.append(threading.get_ident())
        resting.set()

    device = DeviceThread(at_rest=at_rest, rest_ns=1_000_000)
    device.start()
    device.call(lambda: None).result(PATIENCE_S)
    assert resting.wait(PATIENCE_S)
    resting.clear()
    device.ring()  # it looks, finds nothing, and has not worked
    assert not resting.wait(0.05)
    thread = device.call(threading.get_ident).result(PATIENCE_S)
    assert resting.wait(PATIENCE_S)
    assert device.stop(30)
    assert reply == [thread, thread]


def test_neither_a_rest_that_raises_nor_a_niceness_that_is_forbidden_ends_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError("not here")

    resting = threading.Event()

    def at_rest() -> None:
        resting.set()
        raise ValueError("no rest")

    monkeypatch.setattr(os, "setpriority", forbidden)
    device = DeviceThread(nice=3, at_rest=at_rest, rest_ns=1_000_000)
    device.start()
    assert device.call(lambda: 7).result(PATIENCE_S) == 7
    assert resting.wait(PATIENCE_S)
    assert device.call(lambda: 8).result(PATIENCE_S) == 8
    assert device.stop(30)
