"""A thread that stood ready without a core says so, and one that only slept does not."""

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
from halfeven.models.machine import core_wait
from halfeven.models.machine.core_wait import seconds_on_core, waited_for_core_s

from tests.control_group_tree import UNIFIED, control_groups, of_version_1
from tests.patience import PATIENCE_S


@pytest.mark.slow
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


def counted(monkeypatch: pytest.MonkeyPatch, **facts: tuple[float, float]) -> core_wait.Crowding:
    """A second, at whose begin and end the counters stand as given."""
    names = {"waited": "process_waited_for_cores_s", "others": "_other_programs_worked_s"}
    names |= {"stolen": "stolen_s", "throttled": "throttled_s"}
    times = iter([100.0])
    for name, function in names.items():
        first, last = facts.get(name, (5.0, 5.0))
        readings = iter([first])
        monkeypatch.setattr(core_wait, function, lambda readings=readings, last=last: next(readings, last))
    monkeypatch.setattr(core_wait.time, "perf_counter", lambda: next(times, 101.0))
    return core_wait.Crowding()


def test_time_stolen_by_the_host_disturbs_although_no_thread_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    crowding = counted(monkeypatch, stolen=(1.0, 1.3))
    assert crowding.share() == pytest.approx(0.3) == crowding.disturbance()


def test_a_quota_that_is_used_up_disturbs_and_is_nobody_elses_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Throttled threads wait too: that was taken for other programs, and more threads were started."""
    crowding = counted(monkeypatch, waited=(0.0, 0.6), others=(0.0, 9.0), throttled=(2.0, 2.6))
    assert crowding.share() == 0.0
    assert crowding.disturbance() == pytest.approx(0.6)


def test_pauses_do_not_hide_what_disturbed_the_runs_before_and_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = {"went by": 0.0, "waited": 0.0}
    monkeypatch.setattr(core_wait.time, "perf_counter", lambda: clock["went by"])
    monkeypatch.setattr(core_wait, "process_waited_for_cores_s", lambda: clock["waited"])
    monkeypatch.setattr(core_wait, "_other_programs_worked_s", lambda: clock["went by"])
    monkeypatch.setattr(core_wait, "stolen_s", lambda: 0.0)
    monkeypatch.setattr(core_wait, "throttled_s", lambda: 0.0)
    crowding = core_wait.Crowding(at_once=False)
    for _ in range(2):
        clock["went by"] += 50.0
        with crowding.counted():
            clock["went by"] += 1.0
            clock["waited"] += 0.5
    assert crowding.share() == pytest.approx(0.5)


def test_own_load_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(monkeypatch, waited=(0.0, 2.0)).disturbance() == 0.0


def test_processor_time_of_children_and_of_theirs_is_this_programs(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, parent, seconds in [(10, 1, 1), (11, 10, 2), (12, 11, 4), (13, 1, 8), (14, 13, 16)]:
        (tmp_path / str(pid)).mkdir()
        times = f"{seconds * ticks} 0 0 {ticks if pid == 11 else 0}"  # of those that have ended as well
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} {'0 ' * 9}{times} 20 0")
    own = core_wait.own_programs_worked_s(10**9, tmp_path)
    assert core_wait.own_programs_worked_s(10, tmp_path) - own == pytest.approx(8.0, abs=0.5)
    assert core_wait.own_programs_worked_s(13, tmp_path) - own == pytest.approx(24.0, abs=0.5)


def test_steal_is_read_for_the_processors_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3}, raising=False)
    lines = ["cpu 0 0 0 0 0 0 0 99999 0 0"] + [
        f"cpu{n} 0 0 0 0 0 0 0 {(n + 1) * ticks} 0 0" for n in range(4)
    ]
    (tmp_path / "stat").write_text("\n".join([*lines, "intr 1 2", ""]))
    assert core_wait.stolen_s(tmp_path / "stat") == 2 + 4
    assert core_wait.stolen_s(tmp_path / "absent") == 0.0
    (tmp_path / "odd").write_text("cpu1 0 0\n")
    assert core_wait.stolen_s(tmp_path / "odd") == 0.0


@pytest.mark.parametrize(
    ("own", "mounts", "files", "seconds"),
    [
        (
            ["0::/a/b"],
            [UNIFIED],
            {"a/b/cpu.stat": "throttled_usec 1500000", "a/cpu.stat": "throttled_usec 500000"},
            2.0,
        ),
        (["0::/"], [UNIFIED], {"cpu.stat": "nr_throttled 3\nthrottled_usec 250000"}, 0.25),
        (
            ["4:cpu,cpuacct:/a"],
            [of_version_1("cpu,cpuacct")],
            {"cpu,cpuacct/a/cpu.stat": "throttled_time 3000000000"},
            3.0,
        ),
        (
            ["4:cpu:/seen/by/host"],
            [of_version_1("cpu", "/seen/by/host")],
            {"cpu/cpu.stat": "throttled_time 1000000000"},
            1.0,
        ),
        (["4:cpuset:/a"], [of_version_1("cpuset")], {"cpuset/a/cpu.stat": "throttled_time 1000000000"}, 0.0),
        (["0::/a"], [UNIFIED], {"a/cpu.stat": "nonsense here too"}, 0.0),
        (["0::/a"], [UNIFIED], {}, 0.0),
        ([], [], {}, 0.0),
    ],
)
def test_throttling_is_that_of_the_own_group_and_those_around_it(
    own: list[str], mounts: list[str], files: dict[str, str], seconds: float, tmp_path: Path
) -> None:
    root = control_groups(tmp_path, own, mounts, files)
    assert core_wait.throttled_s(root) == pytest.approx(seconds)
