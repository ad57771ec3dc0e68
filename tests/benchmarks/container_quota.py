"""A server in a control group with half a core, one and one and a half: its threads, its stops, its times.

    python -m tests.benchmarks.container_quota [--before CHECKOUT] [--quotas 0.5,1,1.5] [--seconds 10] [--settle 20]

For each quota a server is started in a control group of its own that has it (the callers are outside of it), first of
the other checkout, where one is given, then of this one. Each measures its choices for itself, in a store of its own.
Eight callers ask for ``--settle`` seconds first, in which it corrects them. Load: single requests at a fixed rate of
about a third of what the quota allows, then eight callers who ask again at once. Needs root and Linux, with a control
group in which others can be made (cgroup version 1 or 2).

A row for each server and load: ``threads`` of the whole process and those that its engine took, the periods of the
scheduler (0.1 s) in which it ran and those of them in which it was stopped, milliseconds, requests per second. The last
line on stdout is the same as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfeven.models.machine.control_groups import groups_of
from halfeven.serve.bench.command import Plan, bench

from tests.benchmarks.server_process import convert_by, engine_of, free_port, is_ready, of_checkout
from tests.benchmarks.workloads import write_folder

ROOT = Path(__file__).resolve().parent.parent.parent
PERIOD_US = 100_000
SHARE = 64  # of the processor, where an ordinary process has 1
READY_S = 300.0
COLUMNS = (
    "checkout",
    "quota",
    "load",
    "threads",
    "engine",
    "periods",
    "throttled",
    "p50 ms",
    "p99 ms",
    "per s",
)


@contextmanager
def group_with(cores: float) -> Iterator[Path]:
    """A control group with so many cores' time, without a process. Its share is large, so that it gets what its quota
    allows beside other programs."""
    version, around = next(groups_of("cpu"))
    folder = around / f"halfeven-quota-{os.getpid()}"
    folder.mkdir()
    try:
        quota = int(cores * PERIOD_US)
        if version == 1:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            (folder / "cpu.shares").write_text(str(SHARE * 1024))
        else:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            (folder / "cpu.weight").write_text(str(SHARE * 100))
        yield folder
    finally:
        folder.rmdir()


@contextmanager
def server_in(group: Path, checkout: Path, store: Path, links: Path) -> Iterator[tuple[int, int]]:
    """``halfeven serve`` of a checkout: its process and its port, once its models are ready."""
    environment = of_checkout(checkout, links)
    port = free_port()
    serve = [
        sys.executable,
        "-m",
        "halfeven.serve.cli.main",
        "serve",
        "--store",
        str(store),
        "--device",
        "cpu",
    ]
    serve += ["--port", str(port), "--drain-seconds", "0"]
    enter = f"echo $$ > '{group}/cgroup.procs'; exec \"$@\""
    environment.pop("OMP_NUM_THREADS", None)
    process = subprocess.Popen(["sh", "-c", enter, "sh", *serve], env=environment, cwd=store.parent)
    try:
        end_s = time.monotonic() + READY_S
        while not is_ready(port):
            assert process.poll() is None and time.monotonic() < end_s, "the server did not become ready"
            time.sleep(0.2)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(60)


def stopped(group: Path) -> tuple[int, int]:
    """Periods in which the group ran, and in which it was stopped."""
    lines = (line.split() for line in (group / "cpu.stat").read_text().splitlines())
    found = {name: int(value) for name, value in lines}
    return found["nr_periods"], found["nr_throttled"]


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def measured(
    checkout: Path, quota: float, store: Path, where: Path, asked: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    links, model, seconds, rate = where / "links", asked.model, asked.seconds, asked.rate
    with group_with(quota) as group, server_in(group, checkout, store, links) as (pid, port):
        bench(f"http://127.0.0.1:{port}", model, Plan((8,), seconds=asked.settle), lambda _: None)
        steady = Plan(seconds=seconds, rates=(rate * quota,))
        for load, plan in (
            (f"{rate * quota:g} a second", steady),
            ("8 callers", Plan((8,), seconds=seconds)),
        ):
            before = stopped(group)
            stage = bench(f"http://127.0.0.1:{port}", model, plan, lambda _: None)["stages"][0]
            periods, throttled = (late - early for late, early in zip(stopped(group), before, strict=True))
            latency = stage["latency_ms"]
            figures = (latency["p50"], latency["p99"], stage["per_second"])
            row = (checkout.name, quota, load, threads_of(pid), engine_of(port, model), periods, throttled)
            yield dict(zip(COLUMNS, (*row, *(round(one, 1) for one in figures)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="another checkout, measured in the same way")
    parser.add_argument("--quotas", default="0.5,1,1.5")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--settle", type=float, default=20.0)
    parser.add_argument("--model", default="image", choices=["tiny", "encoder", "image"])
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second for each core")
    asked = parser.parse_args()
    checkouts = [*([asked.before.resolve()] if asked.before else []), ROOT]
    rows = []
    with tempfile.TemporaryDirectory() as target:
        where = Path(target)
        folder = write_folder(where, asked.model, "torch", "O0")
        print(" | ".join(COLUMNS), flush=True)
        for quota in map(float, asked.quotas.split(",")):
            for checkout in checkouts:
                store = where / f"store-{quota}-{checkout.name}"
                convert_by(of_checkout(checkout, where / "links"), folder, store)
                for row in measured(checkout, quota, store, where, asked):
                    rows.append(row)
                    print(" | ".join(map(str, row.values())), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
