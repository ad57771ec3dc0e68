"""Two nodes of Ray in a process of their own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.server_process import free_port
from tests.patience import PATIENCE_S

SECONDS = PATIENCE_S


class Cluster:
    """The process of `cluster.py`."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process, self.url = process, url
        assert self._said() == "up"

    def do(self, order: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._said()

    def _said(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cluster's process ended"
        return json.loads(line)


@contextmanager
def two_nodes(options: dict[str, Any], log: Path) -> Iterator[Cluster]:
    port = free_port()
    command = [sys.executable, "-m", "tests.serve.ray.cluster", str(port), json.dumps(options)]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            cwd=Path(__file__).parents[3], start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield Cluster(process, f"http://127.0.0.1:{port}")
        except BaseException:
            sys.stderr.write(log.read_text()[-8000:])
            raise
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def until(holds: Callable[[], bool], what: str, seconds: float = SECONDS) -> float:
    """The seconds until ``holds`` is true."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, what
        threading.Event().wait(0.1)
    return time.monotonic() - began
