"""The child process of a job: what it shares with the server, and that nothing of it stays."""

import os
from pathlib import Path

import pytest
from halfeven.serve.finetune.jobs.worker_process import Child

SCRIPT = """
import json, os, subprocess, sys
grandchild = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
niceness = os.getpriority(os.PRIO_PROCESS, 0)
line = {"niceness": niceness, "session": os.getsid(0), "group": os.getpgrp(), "grandchild": grandchild.pid}
print(json.dumps(line), flush=True)
sys.stdin.read()
"""


def test_a_child_is_nicer_in_the_server_s_session_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(SCRIPT)
    with Child.of_script(script, {"nice": 3}, tmp_path / "request") as child:
        line = next(line for line in child.lines(every_s=60) if line is not None)
        # Linux divides processor time among sessions first (sched(7), autogroup): niceness counts within one alone.
        assert line["session"] == os.getsid(0)
        assert line["niceness"] == min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
        assert line["group"] == child.pid != os.getpgrp()
        status = Path(f"/proc/{line['grandchild']}/status")
        assert status.exists()
    until_gone(status)


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
