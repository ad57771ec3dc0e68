"""A thread that stood ready without a core says so, and one that only slept does not."""

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
from halfeven.models.machine import core_wait
from halfeven.models.machine.core_wait import core_seconds, seconds_on_core, waited_for_core_s

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


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count it")
def test_the_time_on_a_core_is_the_threads_processor_time() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    assert core_seconds()[0] == pytest.approx(time.thread_time(), abs=0.02)
    assert core_seconds(threading.get_native_id())[0] == pytest.approx(time.thread_time(), abs=0.02)


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


class Clock:
    """The counters of a machine, which a test sets: seconds, and those that each thread waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.others, self.stolen, self.throttled = 100.0, 5.0, 5.0, 5.0
        self.waits = {1: 5.0}
        self.looks_at_others = 0
        monkeypatch.setattr(core_wait.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(core_wait, "waits_of_threads", lambda: dict(self.waits))
        monkeypatch.setattr(core_wait, "_other_programs_worked_s", self._others)
        monkeypatch.setattr(core_wait, "stolen_s", lambda: self.stolen)
        monkeypatch.setattr(core_wait, "throttled_s", lambda: self.throttled)
        monkeypatch.setattr(core_wait, "usable_cores", lambda: 1)

    def _others(self) -> float:
        self.looks_at_others += 1
        return self.others

    def go_on(
        self, waited: float = 0.0, others: float = 0.0, stolen: float = 0.0, throttled: float = 0.0
    ) -> None:
        """A second goes by."""
        self.now, self.others = self.now + 1.0, self.others + others
        self.stolen, self.throttled = self.stolen + stolen, self.throttled + throttled
        self.waits = {thread: before + waited for thread, before in self.waits.items()}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("waited_s", "others_s", "crowded"), [(5.0, 5.0, True), (5.0, 0.0, False), (0.0, 5.0, False)]
)
def test_a_machine_is_crowded_where_other_programs_computed_while_this_one_waited(
    clock: Clock, waited_s: float, others_s: float, crowded: bool
) -> None:
    """Threads of this process that spin make each other wait too; and on many cores others may disturb nothing."""
    crowding = core_wait.Crowding()
    clock.go_on(waited=waited_s, others=others_s)
    assert (crowding.share() > 0) == crowded


def test_time_stolen_by_the_host_disturbs_although_no_thread_waited(clock: Clock) -> None:
    crowding = core_wait.Crowding()
    clock.go_on(stolen=0.3)
    assert crowding.share() == pytest.approx(0.3) == crowding.disturbance()


def test_a_quota_that_is_used_up_disturbs_and_is_nobody_elses_doing(clock: Clock) -> None:
    """Throttled threads wait too: that was taken for other programs, and more threads were started."""
    crowding = core_wait.Crowding()
    clock.go_on(waited=0.6, others=9.0, throttled=0.6)
    assert crowding.share() == 0.0
    assert crowding.disturbance() == pytest.approx(0.6)


@pytest.mark.parametrize(("threads", "waited_s", "share"), [(64, 0.002, 0.002), (1, 0.128, 0.128)])
def test_what_disturbs_is_the_longest_wait_of_a_thread_and_not_the_sum_over_the_cores(
    clock: Clock, threads: int, waited_s: float, share: float
) -> None:
    clock.waits = dict.fromkeys(range(64), 5.0)
    crowding = core_wait.Crowding()
    clock.go_on(others=64.0)
    clock.waits |= dict.fromkeys(range(threads), 5.0 + waited_s)
    assert crowding.disturbance() == pytest.approx(share)


def test_a_quota_that_many_processors_used_up_together_is_counted_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_wait, "usable_cores", lambda: 64)
    crowding = core_wait.Crowding()
    clock.go_on(throttled=64 * 0.002)
    assert crowding.disturbance() == pytest.approx(0.002)


def test_a_thread_that_ends_takes_no_wait_of_another_with_it(clock: Clock) -> None:
    """An old version's pool had waited for 40 s in its life, and its threads end meanwhile; the system may give a new
    thread the number of one of them."""
    clock.waits = {1: 5.0, 2: 20.0, 3: 20.0}
    crowding = core_wait.Crowding()
    clock.go_on(others=1.0)
    clock.waits = {1: 5.4, 3: 0.1}
    assert crowding.share() == pytest.approx(0.4)


def test_pauses_do_not_hide_what_disturbed_the_runs_before_and_after_them(clock: Clock) -> None:
    crowding = core_wait.Crowding(at_once=False)
    for _ in range(2):
        for _ in range(50):
            clock.go_on(others=1.0)
        with crowding.counted():
            clock.go_on(waited=0.5, others=1.0)
    assert crowding.share() == pytest.approx(0.5)


def test_other_programs_are_looked_for_once_however_often_it_counts(clock: Clock) -> None:
    """A look reads a file of every process, which takes longer than a brief batch; what they computed in pauses is not
    held against the runs."""
    crowding = core_wait.Crowding(at_once=False)
    for _ in range(10):
        with crowding.counted():
            clock.go_on(waited=0.5, others=0.2)
    assert clock.looks_at_others == 1
    assert crowding.share() == pytest.approx(0.2)


def test_own_load_disturbs_nothing(clock: Clock) -> None:
    crowding = core_wait.Crowding()
    clock.go_on(waited=2.0)
    assert crowding.disturbance() == 0.0


def test_the_waits_of_threads_are_read_by_their_numbers(tmp_path: Path) -> None:
    for thread, text in {"7": "1 2500000000 3", "8": "nothing", "9": None}.items():
        (tmp_path / thread).mkdir()
        if text is not None:
            (tmp_path / thread / "schedstat").write_text(text)
    assert core_wait.waits_of_threads(tmp_path) == {7: 2.5}


def test_processor_time_of_children_and_of_theirs_is_this_programs(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, parent, seconds in [(10, 1, 1), (11, 10, 2), (12, 11, 4), (13, 1, 8), (14, 13, 16)]:
        (tmp_path / str(pid)).mkdir()
        times = f"{seconds * ticks} 0 0 {ticks if pid == 11 else 0}"  # of those that have ended as well
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} {'0 ' * 9}{times} 20 0")
    own = core_wait.own_programs_worked_s(10**9, tmp_path)
    assert core_wait.own_programs_worked_s(10, tmp_path) - own == pytest.approx(8.0, abs=0.5)
    assert core_wait.own_programs_worked_s(13, tmp_path) - own == pytest.approx(24.0, abs=0.5)


def stat(folder: Path, ours: set[int], monkeypatch: pytest.MonkeyPatch, *columns: int) -> Path:
    """A /proc/stat with four processors, of which this process may use ``ours``: each has one second more than the one
    before in each of the columns."""
    ticks = os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: ours, raising=False)
    seconds = [("cpu", 100), *((f"cpu{number}", number + 1) for number in range(4))]
    lines = [[name, *(str(ticks * s * (at in columns)) for at in range(10))] for name, s in seconds]
    (folder / "stat").write_text("\n".join([*map(" ".join, lines), "intr 1 2", ""]))
    return folder / "stat"


def test_steal_is_the_mean_of_the_processors_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In sum, half a percent of each of 32 processors was more than a machine may be disturbed."""
    assert core_wait.stolen_s(stat(tmp_path, {1, 3}, monkeypatch, 7)) == (2 + 4) / 2
    assert core_wait.stolen_s(tmp_path / "absent") == 0.0
    (tmp_path / "odd").write_text("cpu1 0 0\n")
    assert core_wait.stolen_s(tmp_path / "odd") == 0.0


def test_other_programs_are_those_on_the_processors_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container the file has the whole host's: waits of own threads for each other seemed to be for others."""
    monkeypatch.setattr(core_wait, "own_programs_worked_s", lambda: 1.5)
    works = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq
    assert (
        core_wait._other_programs_worked_s(stat(tmp_path, {0, 2}, monkeypatch, *works)) == 5 * (1 + 3) - 1.5
    )
    assert core_wait._other_programs_worked_s(stat(tmp_path, {0}, monkeypatch, 3, 4, 7)) == -1.5
    assert core_wait._other_programs_worked_s(tmp_path / "absent") == 0.0


def test_a_container_with_processors_of_other_numbers_in_its_file_has_all_that_the_file_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert core_wait.stolen_s(stat(tmp_path, {20, 21, 22, 23}, monkeypatch, 7)) == 100 / 4


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
