"""The child process of a job: what it shares with the server, and that nothing of it stays."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.machine.usable_cores import Cores
from halfeven.serve.finetune.jobs import worker_process
from halfeven.serve.finetune.jobs.worker_process import Child

SCRIPT = """
import json, os, subprocess, sys
grandchild = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
niceness, policy = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
line = {"niceness": niceness, "policy": policy, "session": os.getsid(0), "group": os.getpgrp()}
line["grandchild"] = grandchild.pid
print(json.dumps(line), flush=True)
sys.stdin.read()
"""

# A child whose fork, a worker of the operator's code, keeps the report pipe open.
FORKING = """
import os, signal
if os.fork() == 0:
    signal.pause()
os.write(1, b'{"type": "done"}\\n{"type":')
os.{end}
"""
ENDLESS = """
import os
while True:
    os.write(1, b"x" * 4096)
"""
TALKATIVE = """
import os
os.truncate(2, 2**40)
os.lseek(2, 0, os.SEEK_END)
os.write(2, b"last words")
"""
MANY = 100  # looks of 0.1 s, of which one is enough


def started(folder: Path, script: str) -> Child:
    return Child([sys.executable, "-c", script], folder / "request.log")


def whole_lines(child: Child) -> list[object]:
    """The lines of a child until they end, without the looks between them."""
    found, looks = [], 0
    for line in child.lines(every_s=0.1):
        looks += line is None
        assert looks < MANY, "the lines of a process that has ended do not end"
        found += [] if line is None else [line]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("priority", "steps"), [("normal", 0), ("low", 10), ("idle", 0)])
def test_a_child_yields_in_the_server_s_session_and_ends_with_all_that_it_started(
    tmp_path: Path, priority: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reporting.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Child.of_module("reporting", {"priority": priority}, tmp_path / "request") as child:
        line = next(line for line in child.lines(every_s=60) if line is not None)
        # Linux divides processor time among sessions first (sched(7), autogroup): priority counts within one alone.
        assert line["session"] == os.getsid(0)
        assert line["niceness"] == min(os.getpriority(os.PRIO_PROCESS, 0) + steps, 19)
        assert line["policy"] == (os.SCHED_IDLE if priority == "idle" else os.SCHED_OTHER)
        assert line["group"] == child.pid != os.getpgrp()
        status = Path(f"/proc/{line['grandchild']}/status")
        assert status.exists()
    until_gone(status)


def test_a_child_whose_start_fails_is_killed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, begin = list[subprocess.Popen[bytes]](), subprocess.Popen

    def begun(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        made.append(begin(*arguments, **named))
        return made[-1]

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", begun)
    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started(tmp_path, "import sys\nsys.stdin.read()")
    (process,) = made
    assert process.returncode == -9 and process.stdin is not None and process.stdin.closed


@pytest.mark.parametrize(("end", "status"), [("_exit(0)", 0), ("kill(os.getpid(), 9)", -9)])
def test_its_lines_end_with_it_though_what_it_has_forked_holds_the_pipe(
    tmp_path: Path, end: str, status: int
) -> None:
    with started(tmp_path, FORKING.replace("{end}", end)) as child:
        assert whole_lines(child) == [{"type": "done"}], "a line that breaks off is none"
    assert child.exit_status == status


def test_of_however_much_it_wrote_the_last_is_read_alone(tmp_path: Path) -> None:
    with started(tmp_path, TALKATIVE) as child:
        assert whole_lines(child) == []
        assert child.last_output().endswith("last words")


def test_a_line_without_an_end_is_not_kept_beyond_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "MAX_LINE", 2**18)
    with started(tmp_path, ENDLESS) as child:
        assert whole_lines(child) == []
    assert child.exit_status == -9


def until_gone(status: Path) -> None:
    """A killed process whose parent has ended may be a zombie for a moment."""
    for _ in range(10_000):
        try:
            if "(zombie)" in status.read_text():
                return
        except OSError:
            return
        os.sched_yield()
    pytest.fail("the grandchild lives on")


def test_the_process_of_a_job_is_told_of_the_quota_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfeven.models.machine.usable_cores.cores_here", lambda: Cores(64, 64, 1.5))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with started(tmp_path, "import json, os\nprint(json.dumps({**os.environ}))") as child:
        (found,) = whole_lines(child)
    assert isinstance(found, dict) and found["OMP_NUM_THREADS"] == "2"
