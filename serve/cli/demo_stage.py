"""The demo runs on a model folder of its own and a server process on a free port, and waits for it."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...models.errors import NotReady
from ...models.store.store import Store
from ...models.zoo import zoo_folder
from ..bench.callers import served_version

Notify = Callable[[str], None]
MODEL = "digits"
SWAP_SECONDS = 120.0  # a load measures forms: 2 s on idle cores, over 20 s beside five busy processes


def own_folder(target: Path) -> Path:
    """The zoo's digits with a form asked for, so that the half serves: on a CPU ``auto`` would rightly prefer FP32.

    On a CPU that is the ONNX form: ONNX Runtime computes it about as fast as FP32, and torch's own FP16 convolutions
    take from 2 to 100 times as long, by processor.
    """
    form = "torch" if torch.cuda.is_available() else "onnx"
    folder = target / MODEL
    shutil.copytree(zoo_folder(MODEL), folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "samples.safetensors").chmod(0o644)
    manifest = folder / "model.toml"
    lines = [line for line in manifest.read_text().splitlines() if not line.startswith("form")]
    manifest.write_text(f'form = "{form}"\n' + "\n".join(lines) + "\n")
    return folder


@contextmanager
def server(store: Store, notify: Notify, model: str = MODEL) -> Iterator[int]:
    """A server process of its own on a free port of this machine, which serves ``model``; stopped gracefully at the
    end."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "halfeven.serve.cli.main",
        "serve",
        "--store",
        str(store.root),
        "--port",
        "0",
    ]
    command += ["--drain-seconds", "0"]  # there is no load balancer to wait for
    log = store.root / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=store.root)
    try:
        port = await_port(process, log)
        await_version(port, None, notify, model)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def await_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("halfeven listens on http://"):
                return int(line.rpartition(":")[2])
        time.sleep(0.1)
    raise NotReady(f"the demo's server did not start; its log: {log.read_text(errors='replace')[-2000:]}")


def await_version(port: int, number: int | None, notify: Notify, model: str = MODEL) -> None:
    """Wait until the server answers with this version (any version, where None)."""
    began = time.monotonic()
    found = None
    while time.monotonic() < began + SWAP_SECONDS:
        found = served_version(port, model)
        if found is not None and number in (None, int(found)):
            notify(f"   version {found} is active ({time.monotonic() - began:.1f} s)")
            return
        time.sleep(0.05)
    raise NotReady(
        f"after {SWAP_SECONDS:g} s {f'version {found}' if found else 'no version'} of {model} is active, and "
        f"{f'version {number}' if number else 'any version'} was expected: try again when the machine has less to do"
    )
