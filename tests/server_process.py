"""Servers of tests in processes of their own: a command that can be forked, and stores whose versions load at once."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.store.store import Store
from halfeven.serve.versions.loading.kept_setups import keep_setup

CONFIRMED = 20  # rounds: the next one is due after hours


def serve_command(store: Path) -> list[str]:
    """``halfeven serve`` on a free port of this machine, forked instead of started anew (`preloaded.py`)."""
    serve = [sys.executable, "-PB", "-m", "halfeven.serve.cli.main", "serve", "--store", str(store)]
    return [*serve, "--port", "0", "--device", "cpu"]


def server_environment(**settings: object) -> dict[str, str]:
    """The environment of a server's process, with settings of `Settings`. The hash seed is that of its jobs, which can
    be forked then."""
    named = {f"HALFEVEN_{name.upper()}": str(value) for name, value in settings.items()}
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "HALFEVEN_DRAIN_SECONDS": "0",
        **named,
    }


@contextmanager
def announced(
    store: Path, *options: str, wrapper: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of `serve_command`, which ``wrapper`` starts, and the URL that it names."""
    command = [*wrapper, *serve_command(store), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=server_environment())
    with process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if " listens on " in line)
            yield process, line.strip().rpartition(" ")[2]
        finally:
            process.terminate()
            process.stderr.read()


def settle(store: Store) -> None:
    """Every version of the store runs on one thread without optional passes, and so do those that are trained from it:
    what measures that, at a load and for 15 processor seconds while serving, is tested elsewhere."""
    device, setup = torch.device("cpu"), CpuSetup(threads=1)
    for name in store.names():
        for number in store.numbers(name):
            for form, precision in itertools.product(("torch", "onnx"), ("fp32", "fp16", "bf16")):
                keep_setup(store.version(name, number), form, precision, device, setup, (), rounds=CONFIRMED)
