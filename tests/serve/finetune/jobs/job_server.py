"""A server in a process of its own with a client of its fine-tuning routes, and the processes of its jobs."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import torch
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.store import Store
from halfeven.serve.bench.callers import served_version
from halfeven.serve.cli.demo_stage import await_port
from halfeven.serve.versions.loading.kept_setups import keep_setup

from tests.patience import PATIENCE_S


@contextmanager
def serving(store: Store) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process of its own: it can be killed like any other."""
    log = store.root / "server.log"
    command = [sys.executable, "-PB", "-m", "halfeven.serve.cli.main", "serve", "--store", str(store.root)]
    settings = ["--port", "0", "--drain-seconds", "0"]
    settle(store)
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
    }  # as of its jobs: their processes can be forked (preloaded.py)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command + settings, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
        )
    try:
        yield process, await_port(process, log)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


def settle(store: Store) -> None:
    """Every version of the store runs on one thread without optional passes: what measures that is tested elsewhere,
    and takes seconds of each server that loads one."""
    device, setup = torch.device("cpu"), CpuSetup(threads=1)
    for name in store.names():
        for number in store.numbers(name):
            for form, precision in itertools.product(("torch", "onnx"), ("fp32", "fp16", "bf16")):
                keep_setup(store.version(name, number), form, precision, device, setup, ())


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


def until(holds: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
    return found


def ended(client: openai.OpenAI, id: str) -> Any:
    """The job at its end. Its processes yield to all others, so that a busy machine needs minutes."""
    final = ("succeeded", "failed", "cancelled")
    return until(lambda: (job := client.fine_tuning.jobs.retrieve(id)).status in final and job, 900.0)


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
