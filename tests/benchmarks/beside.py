"""Serving beside learning, on the zoo's digits: alone, while 500,000 rows are admitted, and while a job trains.

    python -m tests.benchmarks.beside [--rounds 5] [--seconds 5] [--rows 500000]

One server process, asked at half of the rate that it can answer (open loop: arrivals do not wait for answers; the
rate falls from that of a closed loop until 99 of 100 are answered within 50 ms). The states take turns in every round,
and of each the median over the rounds counts: a disturbance from outside meets all. ``copying`` is a process of idle
priority that copies memory and does nothing else: what no yielding can avoid, for cores share caches and memory.
``not yielding`` is the training at the priority of serving (it needs root; else it is left out). Also: the processor
seconds that the server's own process spends on one admission, and the seconds from a job's last training step to its
active version. The last line on stdout is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from halfeven.models.zoo import zoo_folder
from halfeven.serve.bench.command import Plan, bench
from halfeven.serve.cli.demo import await_version, server, write_training_file
from halfeven.serve.finetune.client.remote import Remote
from safetensors.numpy import load_file, save_file

LIMIT = 1.25  # of the p99 alone
KEEPS_UP_MS = 50.0
LONG = {"n_epochs": 1000, "batch_size": 32, "precision": "bf16", "learning_rate": 1e-4}
COPY = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
there, here = bytes(1 << 27), bytearray(1 << 27)
while True:
    here[:] = there
"""
Figures = dict[str, float]


def quiet(*_: object) -> None: ...


class Beside:
    """``port``: the server's. ``small`` and ``large``: ids of uploaded files."""

    def __init__(self, port: int, seconds: float, small: Path, large: Path) -> None:
        self.url, self.seconds = f"http://127.0.0.1:{port}", seconds
        self.remote, self.pid = Remote(self.url), pid_of(port)
        self.small, self.large = (self.remote.upload(path, quiet)["id"] for path in (small, large))
        self.rate = bench(self.url, "digits", Plan(concurrency=(32,), seconds=3), quiet)["stages"][0][
            "per_second"
        ]
        while self.asked()["p99"] > KEEPS_UP_MS:
            self.rate *= 0.8
        self.rate = round(self.rate / 2)

    def asked(self) -> Figures:
        stage = bench(self.url, "digits", Plan(rates=(self.rate,), seconds=self.seconds), quiet)["stages"][0]
        assert stage["latency_ms"] is not None, "nothing was answered"
        return {key: round(stage["latency_ms"][key], 3) for key in ("p50", "p99", "p99.9")}

    def alone(self) -> Figures:
        return self.asked()

    def admitting(self) -> Figures:
        """Jobs of the large file are asked for one after the other, and cancelled."""
        over = threading.Event()
        thread = threading.Thread(target=self._admit_until, args=(over,))
        thread.start()
        try:
            return self.asked()
        finally:
            over.set()
            thread.join()

    def training(self) -> Figures:
        with self.job():
            return self.asked()

    def copying(self) -> Figures:
        process = subprocess.Popen([sys.executable, "-c", COPY])
        try:
            return self.asked()
        finally:
            process.kill()
            process.wait()

    def not_yielding(self) -> Figures:
        with self.job():
            for task in threads_of(trainer_of(self.pid)):
                os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, task, os.getpriority(os.PRIO_PROCESS, self.pid))
            return self.asked()

    @contextmanager
    def job(self) -> Iterator[None]:
        """A job trains inside."""
        job = self.create(self.small, LONG)
        until(self.remote, job, lambda found: found["halfeven"]["progress"].get("step", 0) > 0)
        try:
            yield
        finally:
            self.cancelled(job)

    def admission(self) -> Figures:
        """One admission of the large file: its seconds, and those that the server's own process computed."""
        before, began = cpu_s(self.pid), time.monotonic()
        job = self.create(self.large, LONG)
        took, used = time.monotonic() - began, cpu_s(self.pid) - before
        self.cancelled(job)
        return {"seconds": round(took, 2), "server_cpu_seconds": round(used, 2)}

    def road_back(self) -> float:
        """Seconds from the last step of a job to its end."""
        job = self.create(self.small, {**LONG, "n_epochs": 4, "learning_rate": 3e-3})
        busy = ("queued", "checking", "training")
        until(self.remote, job, lambda found: found["halfeven"]["stage"] not in busy)
        trained = time.monotonic()
        until(self.remote, job, lambda found: found["status"] in ("succeeded", "failed"))
        return round(time.monotonic() - trained, 2)

    def create(self, file: str, values: dict[str, Any]) -> str:
        asked = {"model": "digits", "training_file": file, "hyperparameters": values}
        return self.remote.create(asked, f"beside-{time.monotonic_ns()}")["id"]

    def cancelled(self, job: str) -> None:
        self.remote.cancel(job)
        until(self.remote, job, lambda found: found["status"] == "cancelled")

    def _admit_until(self, over: threading.Event) -> None:
        while not over.is_set():
            self.cancelled(self.create(self.large, LONG))


def until(remote: Remote, id: str, holds: Callable[[dict[str, Any]], bool]) -> None:
    while not holds(remote.job(id)):
        time.sleep(0.05)


def pid_of(port: int) -> int:
    """The process that listens, by its socket in /proc."""
    wanted = f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(line[9] for line in lines if line[1].endswith(wanted) and line[3] == "0A")
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if str(handle.readlink()) == f"socket:[{inode}]":
                return int(handle.parts[2])
    raise LookupError(f"no process of ours listens on {port}")


def trainer_of(server: int) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server and b"training.trainer" in (process / "cmdline").read_bytes():
                return int(process.name)
    raise LookupError("no trainer runs")


def threads_of(process: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{process}/task").iterdir()]


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(beside: Beside, rounds: int) -> dict[str, Any]:
    states = {
        "alone": beside.alone,
        "copying": beside.copying,
        "admitting": beside.admitting,
        "training": beside.training,
    }
    if os.geteuid() == 0:
        states["training, not yielding"] = beside.not_yielding
    found: dict[str, list[Figures]] = {name: [] for name in states}
    for _ in range(rounds):
        for name, state in states.items():
            found[name].append(state())
    medians = {
        name: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for name, each in found.items()
    }
    alone = medians["alone"]["p99"]
    ratios = {name: round(one["p99"] / alone, 2) for name, one in medians.items()}
    return {"rate": beside.rate, "rounds": rounds, "ms": medians, "p99_of_alone": ratios, "limit": LIMIT}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rows", type=int, default=500_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(zoo_folder("digits"), Path(name) / "digits"))
        store = Store(Path(name) / "store")
        convert(folder, store, Options())
        small, large = write_training_file(Path(name) / "new.safetensors"), Path(name) / "large.safetensors"
        rows, draw = load_file(small), np.random.default_rng(0)
        chosen = draw.integers(0, len(rows["image"]), asked.rows)
        noise = draw.random((asked.rows, *rows["image"].shape[1:]), dtype=np.float32)
        save_file(
            {"image": rows["image"][chosen] + noise, "target:logits": rows["target:logits"][chosen]}, large
        )
        load = os.getloadavg()
        with server(store, quiet) as port:
            await_version(port, None, quiet)
            beside = Beside(port, asked.seconds, small, large)
            found = measured(beside, asked.rounds)
            found |= {"admission": beside.admission(), "last step to active, seconds": beside.road_back()}
        found |= {"rows": asked.rows, "load average before and after": [load, os.getloadavg()]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
