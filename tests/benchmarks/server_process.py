"""A server in a process of its own, on a free port of this machine."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def process(command: list[str], where: Path, port: int) -> Iterator[int]:
    """A server of its own, entered when it takes connections."""
    running = subprocess.Popen([sys.executable, "-m", *command, "--port", str(port)], cwd=where)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        running.terminate()
        running.wait(60)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
