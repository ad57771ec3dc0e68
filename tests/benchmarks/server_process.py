"""A server in a process of its own, on a free port of this machine."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def of_checkout(checkout: Path, links: Path) -> dict[str, str]:
    """The environment in which ``halfeven`` is that checkout. ``links``: a folder for this checkout alone."""
    links.mkdir(exist_ok=True)
    (links / "halfeven").unlink(missing_ok=True)
    (links / "halfeven").symlink_to(checkout)
    return {**os.environ, "PYTHONPATH": str(links)}


def convert_by(environment: dict[str, str], folder: Path, store: Path, form: str = "torch") -> None:
    """Convert with that checkout: an older one does not read what a newer one writes."""
    command = [sys.executable, "-m", "halfeven.serve.cli.main", "convert", str(folder), "--form", form]
    subprocess.run([*command, "--store", str(store)], cwd=folder.parent, env=environment, check=True)


def is_ready(port: int) -> bool:
    try:
        url = f"http://127.0.0.1:{port}/v2/health/ready"
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def engine_of(port: int, model: str) -> str:
    """Threads and passes of the active version."""
    listed = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20))
    (setup,) = (one["cpu"] for one in listed["models"] if one["name"] == model)
    return ", ".join([f"{setup['threads']} threads", *setup["passes"]])


@contextmanager
def process(
    command: list[str], where: Path, port: int, environment: dict[str, str] | None = None
) -> Iterator[int]:
    """A server of its own, entered when it takes connections."""
    running = subprocess.Popen(
        [sys.executable, "-m", *command, "--port", str(port)], cwd=where, env=environment
    )
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
