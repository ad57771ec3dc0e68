"""Swaps, rollbacks, loads and unloads under load: who failed, and where the memory stands.

    python tests/benchmarks/swaps.py [--cycles 50] [--connections 4] [--megabytes 4] [--keep 0]

Two versions of a real model of a few MB (its own weights, O1 and O3) and a second model beside it. Each cycle promotes,
rolls back, loads and unloads under traffic; the answers are held against the version that signed them, so that a batch
of mixed versions would show. The server is a process of its own; its resident memory is read after each ten cycles.
The last line on stdout is JSON.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from halfeven.serve.bench.callers import BenchTraffic, Caller
from safetensors.torch import save_file

MODEL = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 8))
"""
TOML = """
name = "NAME"
source = "model.py:build"
weights = "weights.safetensors"
form = "torch"
max_batch_size = 32
[[inputs]]
name = "x"
datatype = "FP32"
shape = [-1, 64]
[[outputs]]
name = "y"
datatype = "FP32"
shape = [-1, 8]
"""


def folder(where: Path, name: str, width: int, seed: int) -> Path:
    """A model folder of ``width`` hidden units with weights of its own."""
    path = where / f"{name}-{seed}"
    path.mkdir()
    (path / "model.py").write_text(MODEL.replace("WIDTH", str(width)))
    (path / "model.toml").write_text(TOML.replace("NAME", name))
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))
    save_file(net.state_dict(), path / "weights.safetensors")
    return path


def make_store(where: Path, megabytes: float) -> Store:
    """``net`` in two versions of different weights, and ``other``."""
    store, width = Store(where / "store"), int(megabytes * 2**20 / 4 / 72)
    for name, seed in (("net", 1), ("net", 2), ("other", 3)):
        made = convert(folder(where, name, width, seed), store, Options(forms=("torch",)))
        assert made.any_passed, made.facts
    store.promote(store.version("net", 1))
    return store


class Server:
    """``halfeven serve`` in a process of its own."""

    def __init__(self, store: Store, keep: float) -> None:
        environment = {
            **os.environ,
            "HALFEVEN_KEEP_PREVIOUS_SECONDS": str(keep),
            "HALFEVEN_DRAIN_SECONDS": "0",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "halfeven.serve.cli.main",
            "serve",
            "--store",
            str(store.root),
            "--port",
            "0",
        ]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "listens on" in line:
                self.port = int(line.strip().rpartition(":")[2])
                break
        while self.get("/v2/health/ready")[0] != 200:
            time.sleep(0.1)

    def get(self, path: str, asked: Any = None) -> tuple[int, bytes]:
        body = None if asked is None else json.dumps(asked).encode()
        try:
            url = f"http://127.0.0.1:{self.port}{path}"
            order = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(order, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def resident_mb(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def mixed_answers(port: int, rows: np.ndarray, seconds: float, known: dict[str, np.ndarray]) -> int:
    """Answers that are not those of the version that signed them."""
    caller, mixed, ends = Caller(port, "net"), 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        answer, headers = caller.infer({"x": rows})
        expected = known.setdefault(headers["halfeven-version"], answer["y"])
        mixed += not np.allclose(answer["y"], expected, atol=2e-2)
    caller.close()
    return mixed


def cycle(server: Server, faults: list[str]) -> None:
    for path, asked in (
        ("/v1/models/net/promote", {"version": 2}),
        ("/v1/models/net/rollback", {}),
        ("/v2/repository/models/other/unload", {}),
        ("/v2/repository/models/other/load", {}),
    ):
        status, answer = server.get(path, asked)
        if status != 200:
            faults.append(f"{path}: {status} {answer}")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--cycles", type=int, default=50)
    options.add_argument("--connections", type=int, default=4)
    options.add_argument("--megabytes", type=float, default=4.0)
    options.add_argument("--keep", type=float, default=0.0)
    reply = options.parse_args()
    with tempfile.TemporaryDirectory() as where:
        store = make_store(Path(where), reply.megabytes)
        with Server(store, reply.keep) as server:
            rows = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
            faults: list[str] = []
            known: dict[str, np.ndarray] = {}
            mixed = mixed_answers(server.port, rows[:2], 0.5, known)
            memory = {0: server.resident_mb()}
            with BenchTraffic(server.port, "net", {"x": rows}, reply.connections) as traffic:
                for number in range(1, reply.cycles + 1):
                    cycle(server, faults)
                    mixed += mixed_answers(server.port, rows[:2], 0.1, known)
                    if number % 10 == 0 or number in (1, 5):
                        memory[number] = server.resident_mb()
                        print(
                            number,
                            f"{memory[number]:.1f} MB",
                            traffic.answered,
                            traffic.failed,
                            file=sys.stderr,
                        )
        found = {
            "cycles": reply.cycles,
            "answered": traffic.answered,
            "by_version": dict(traffic.by_version),
            "failed": traffic.failed,
            "faults": [*traffic.faults, *faults][:10],
            "mixed": mixed,
            "resident_mb": {str(number): round(megabytes, 1) for number, megabytes in memory.items()},
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
