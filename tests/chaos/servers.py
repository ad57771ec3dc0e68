"""Real servers that can be killed at any moment, forked from a process that has imported everything (`zygote.py`)."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

SECONDS = PATIENCE_S
STARTING = "models are being made ready"


class Zygote:
    """The process that servers are forked from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, **asked: Any) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


class Server:
    """One server on a store. ``ended``: its exit code once it has ended."""

    def __init__(self, zygote: Zygote, root: Path, place: Path, **environment: str) -> None:
        self._zygote, self.log, self.ended = zygote, place / "server.log", None
        self.log.unlink(missing_ok=True)
        self.port = 0
        asked = {"store": str(root), "log": str(self.log), "clock": str(place / "clock")}
        settings = {"HALFEVEN_DRAIN_SECONDS": "0", "HALFEVEN_KEEP_PREVIOUS_SECONDS": "0", **environment}
        self.pid = zygote.ask(start={**asked, "environment": settings})

    def alive(self) -> bool:
        """True if the process runs; a process that has ended and was not waited for does not."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_ready(self) -> bool:
        """Wait until every model is active or has its fault. False where the server has ended instead."""
        for _ in moments():
            if not self.port and "listens on http://" in self.said():
                self.port = int(self.said().split("listens on http://")[1].split()[0].rpartition(":")[2])
            if self.port:
                with suppress(OSError, http.client.HTTPException):
                    status, body = self.call("GET", "/v2/health/ready")
                    if status == 200 or STARTING not in body.decode():
                        return True
            if not self.alive():
                self.kill()
                return False
        raise AssertionError(f"the server did not become ready:\n{self.said()}")

    def call(
        self, method: str, path: str, body: bytes | str = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """The status and the body of an answer. Raises OSError or HTTPException where there is no whole answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request(method, path, body, headers or {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def order(self, path: str, asked: Any) -> tuple[int, bytes]:
        return self.call("POST", path, json.dumps(asked))

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """End the process and wait for its end; gives its exit code, -9 where the signal ended it."""
        if self.ended is None:
            self.send(number)
            self.ended = self._zygote.ask(wait=self.pid)
        return self.ended

    @property
    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024


def moments(step_s: float = 0.02) -> Iterator[None]:
    """Moments for a loop that waits for something, one every ``step_s`` seconds, for at most ``SECONDS``."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        yield
        time.sleep(step_s)


@contextmanager
def zygote() -> Iterator[Zygote]:
    own = Zygote()
    try:
        yield own
    finally:
        own.close()
