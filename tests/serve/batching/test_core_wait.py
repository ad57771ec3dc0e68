"""A thread that stood ready without a core says so, and one that only slept does not."""

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
from halfeven.serve.batching import core_wait
from halfeven.serve.batching.core_wait import seconds_on_core, waited_for_core_s

from tests.patience import PATIENCE_S


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count it")
def test_two_threads_on_one_core_each_wait_for_the_other() -> None:
    core, block = {min(os.sched_getaffinity(0))}, bytes(1 << 20)
    waited: list[float] = []

    def work() -> None:
        os.sched_setaffinity(0, core)  # of this thread alone
        before = waited_for_core_s()
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            hashlib.sha256(block)  # without the interpreter's lock: it is the core that both want
        waited.append(waited_for_core_s() - before)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(waited) == 2
    assert max(waited) > 0.05


def test_a_kernel_that_does_not_count_it_means_no_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core_wait, "_SCHEDSTAT", tmp_path / "absent")
    assert waited_for_core_s() == 0.0
    (tmp_path / "odd").write_text("nothing")
    monkeypatch.setattr(core_wait, "_SCHEDSTAT", tmp_path / "odd")
    assert waited_for_core_s() == 0.0


@pytest.mark.parametrize(
    ("waited_s", "least_s", "most_s"), [(0.0, 0.2, 10.0), (0.15, 0.05, 0.15), (60.0, 0.2, 10.0)]
)
def test_what_a_run_waited_for_a_core_is_not_its_own_time(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, least_s: float, most_s: float
) -> None:
    readings = iter((1.0, 1.0 + waited_s))
    monkeypatch.setattr(core_wait, "waited_for_core_s", lambda: next(readings))
    began = time.perf_counter()
    found = seconds_on_core(lambda: time.sleep(0.2))
    late_s = time.perf_counter() - began - 0.2  # this machine's own
    assert least_s <= found <= most_s + late_s


def test_a_run_is_never_shorter_than_the_processor_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that began before the run counts with it, and left next to nothing of the run."""
    spent: list[float] = []
    readings = iter((0.0, 0.0))
    monkeypatch.setattr(core_wait, "_others_worked_s", lambda: 0.0)
    monkeypatch.setattr(core_wait, "waited_for_core_s", lambda: next(readings) + 0.9999 * sum(spent))

    def run() -> None:
        began, end = time.perf_counter(), time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        spent.append(time.perf_counter() - began)

    assert seconds_on_core(run) >= 0.05


@pytest.mark.parametrize(
    ("waited_s", "others_s", "crowded"), [(5.0, 5.0, True), (5.0, 0.0, False), (0.0, 5.0, False)]
)
def test_a_machine_is_crowded_where_other_programs_computed_while_this_one_waited(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, others_s: float, crowded: bool
) -> None:
    """Threads of this process that spin make each other wait too; and on many cores others may disturb nothing."""
    waited, others = iter((1.0, 1.0 + waited_s)), iter((2.0, 2.0 + others_s))
    monkeypatch.setattr(core_wait, "process_waited_for_cores_s", lambda: next(waited))
    monkeypatch.setattr(core_wait, "_other_programs_worked_s", lambda: next(others))
    assert (core_wait.Crowding().share() > 0) == crowded
