"""A server in a process of its own with a client of its fine-tuning routes, and the processes of its jobs."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from halfeven.models.store.store import Store
from halfeven.serve.bench.callers import served_version
from halfeven.serve.cli.demo import await_port

from tests.patience import PATIENCE_S, until
from tests.server_process import serve_command, server_environment, settle


@contextmanager
def serving(store: Store) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process of its own: it can be killed like any other."""
    log = store.root / "server.log"
    settle(store)
    with log.open("wb") as file:
        process = subprocess.Popen(
            serve_command(store.root), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env=server_environment(),
        )  # fmt: skip
    try:
        yield process, await_port(process, log)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


@contextmanager
def served_to_client(
    store: Store, model: str = "digits"
) -> Iterator[tuple[subprocess.Popen[bytes], int, openai.OpenAI]]:
    """A server with the model active, and the `openai` client of it."""
    with serving(store) as (process, port):
        until(lambda: served_version(port, model))
        address = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            yield process, port, client


def create(
    client: openai.OpenAI, model: str, train: Path, hyperparameters: Mapping[str, Any],
    validation: Path | None = None, **more: Any,
) -> Any:  # fmt: skip
    """A new job; its files are uploaded first."""
    for name, file in {"training_file": train, "validation_file": validation}.items():
        if file is not None:
            more[name] = client.files.create(file=file, purpose="fine-tune").id
    method = {"hyperparameters": dict(hyperparameters)}
    return client.fine_tuning.jobs.create(model=model, seed=7, extra_body=method, **more)


def ended(client: openai.OpenAI, id: str) -> Any:
    """The job at its end. Its processes yield to all others, so that a busy machine needs minutes."""
    final = ("succeeded", "failed", "cancelled")
    return until(lambda: (job := client.fine_tuning.jobs.retrieve(id)).status in final and job, 900.0, 0.2)


def processes(store: Store, words: bytes = b"training.trainer") -> list[int]:
    """The children of this store's jobs that are alive: ``trainer.py`` or ``weights_to_version``."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes()
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if words in command and str(store.root).encode() in command and state != "Z":
                found.append(int(process.name))
    return found
