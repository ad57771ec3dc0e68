"""A check that a server with wrong choices finds the right ones while it serves: all ratios in one pass.

    python -m tests.benchmarks.wrong_choices [--store DIR] [--starts 10] [--seconds 60] [--callers 32]

The encoder of `workloads.py`, whose level lets bf16 be chosen. First two calm starts with nothing kept; the faster one
counts. Then one start for each planted wrong choice: one thread and no passes for every form; a form that is not the
fastest, and batches of one row, both as a tuning's winner. Then ``starts`` starts beside busy processes that come and
go by chance, which end after 15 s of traffic. Each is asked by closed loops of 5 s until it keeps up with the calm
start (0.97 of it, twice in a row), for 60 s at most; then the better of its last two pairs of loops counts. Run it on a
calm machine: what others take is missing from a ratio.

Printed for each start: the rate at first and at the end, what was replaced, and how many requests failed. The last line
is JSON with ``worst_planted`` (of the calm rate; at least 0.9), ``worst_beside_noise`` (of the best of those starts; at
least 0.85) and ``failed`` (0).
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.store.store import Store, Version
from halfeven.serve.bench.command import Plan, bench
from halfeven.serve.cli import demo
from halfeven.serve.cli.demo import server
from halfeven.serve.versions.loading.kept_setups import keep_setup
from halfeven.serve.versions.loading.tuned import Winner, save_tuned
from halfeven.serve.versions.orders import events

from tests.benchmarks.workloads import write_folder

MODEL, CPU = "encoder", torch.device("cpu")
LOOP_S, KEEPS_UP, NOISE_S = 5.0, 0.97, 15.0
BUSY = """
import random, sys, time
chance = random.Random(int(sys.argv[1]))
while True:
    end = time.monotonic() + chance.uniform(0.05, 1.5)
    while time.monotonic() < end:
        pass
    time.sleep(chance.uniform(0.0, 1.0))
"""
Figures = dict[str, Any]
demo.SWAP_SECONDS = 600.0  # a load beside busy processes


def quiet(*_: object) -> None: ...


def made(root: Path, level: str) -> Store:
    store = Store(root)
    if MODEL not in store.names():
        folder = write_folder(root / "folders", MODEL, "auto", level)
        done = convert(folder, store, Options(forms=("torch", "onnx")), quiet)
        assert done.any_passed, done.facts
    return store


class Starts:
    """Starts of a server over one store; each begins with what ``plant`` wrote, and nothing else kept."""

    def __init__(self, store: Store, seconds: float, callers: int) -> None:
        self.store, self.seconds, self.callers = store, seconds, callers
        live = store.live(MODEL)
        assert live is not None
        self.version: Version = live

    def asked(self, port: int, seconds: float = LOOP_S) -> tuple[float, int]:
        """Requests per second, and how many failed."""
        plan = Plan(concurrency=(self.callers,), seconds=seconds, warmup_s=0.5)
        (stage,) = bench(f"http://127.0.0.1:{port}", MODEL, plan, quiet)["stages"]
        failed = sum(count for status, count in stage["statuses"].items() if status != "200")
        return stage["per_second"], failed

    def forget(self) -> None:
        shutil.rmtree(self.version.folder.parent / "tuned", ignore_errors=True)

    def start(
        self, name: str, wanted: float = 0.0, plant: Callable[[], object] = quiet, seed: int | None = None
    ) -> Figures:
        """``wanted``: the rate at which it may end. ``seed``: of the busy processes beside it; None: none."""
        self.forget()
        plant()
        known = len(events(self.store, MODEL, 10_000))
        with ExitStack() as stack:
            noise = stack.enter_context(ExitStack())
            if seed is not None:
                noise.enter_context(busy(seed))
            port = stack.enter_context(server(self.store, quiet, MODEL))
            rates, failed, began = [], 0, time.monotonic()
            while time.monotonic() - began < self.seconds:
                rate, lost = self.asked(port)
                rates, failed = [*rates, rate], failed + lost
                if time.monotonic() - began >= NOISE_S:
                    noise.close()
                if (
                    len(rates) > 1
                    and min(rates[-2:]) >= KEEPS_UP * wanted > 0
                    and (seed is None or len(rates) > 5)
                ):
                    break
        done = events(self.store, MODEL, 10_000)
        replaced = [one["message"] for one in done[: len(done) - known] if one["kind"] == "choice_replaced"]
        end = max(min(pair) for pair in zip(rates[-3:], rates[-2:], strict=False))
        found = {
            "start": name,
            "first": round(rates[0], 1),
            "end": round(end, 1),
            "seconds": round(len(rates) * LOOP_S),
            "failed": failed,
            "replaced": replaced[::-1],
        }
        print(json.dumps(found), flush=True)
        return found


@contextmanager
def busy(seed: int) -> Iterator[None]:
    """One to three processes that compute for a part of the time."""
    count = random.Random(seed).randint(1, 3)
    commands = [[sys.executable, "-c", BUSY, str(seed * 10 + number)] for number in range(count)]
    processes = [subprocess.Popen(command, start_new_session=True) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def planted(version: Version, calm: Winner) -> dict[str, Callable[[], object]]:
    """Wrong choices by name, each as a function that writes it into the store."""

    def bad_setups() -> None:
        for form, precision in (("torch", "fp32"), ("onnx", "fp32"), ("torch", "bf16"), ("onnx", "bf16")):
            keep_setup(version, form, precision, CPU, CpuSetup(1), [])

    def tuned(winner: Winner) -> None:
        save_tuned(version, CPU, winner, "2026-01-01T00:00:00+00:00", {"measurements": [], "simulations": []})

    form, precision = ("onnx", "fp32") if calm.form == "torch" else ("torch", "fp32")
    wrong = Winner(form, precision, calm.threads, 0, 0, 1.0)
    one_row = Winner(calm.form, calm.precision, calm.threads, 1, 0, 1.0, calm.passes)
    return {
        "one thread, no passes": bad_setups,
        "the wrong form": lambda: tuned(wrong),
        "batches of one row": lambda: tuned(one_row),
    }


def served_now(store: Store, port: int) -> Winner:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        (model,) = [one for one in json.load(answer)["models"] if one["name"] == MODEL]
    cpu = model["cpu"]
    return Winner(model["form"], model["precision"], cpu["threads"], 0, 0, 1.0, tuple(cpu["passes"]))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--store", type=Path, help="kept, and used again where it has the model")
    options.add_argument("--starts", type=int, default=10)
    options.add_argument("--seconds", type=float, default=60.0, help="of traffic for each start at most")
    options.add_argument("--callers", type=int, default=32)
    options.add_argument("--level", default="mixed_bfloat16")
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        store = made(asked.store or Path(place) / "store", asked.level)
        starts = Starts(store, asked.seconds, asked.callers)
        calm_rate, calm = 0.0, None
        for _ in range(2):
            starts.forget()
            with server(store, quiet, MODEL) as port:
                rate, winner = starts.asked(port, 2 * LOOP_S)[0], served_now(store, port)
            print(json.dumps({"start": "calm", "rate": round(rate, 1), "chosen": str(winner)}), flush=True)
            if rate > calm_rate:
                calm_rate, calm = rate, winner
        assert calm is not None
        wrong = [
            starts.start(name, calm_rate, plant) for name, plant in planted(starts.version, calm).items()
        ]
        noisy = [
            starts.start(f"beside noise {number}", calm_rate, seed=asked.seed * 1000 + number)
            for number in range(asked.starts)
        ]
        ratios = {one["start"]: round(one["end"] / calm_rate, 3) for one in wrong}
        best = max((one["end"] for one in noisy), default=0.0)
        beside = [round(one["end"] / best, 3) for one in noisy]
        print(
            json.dumps(
                {
                    "calm": round(calm_rate, 1),
                    "planted": ratios,
                    "planted_at_first": {one["start"]: round(one["first"] / calm_rate, 3) for one in wrong},
                    "worst_planted": min(ratios.values()),
                    "beside_noise": beside,
                    "worst_beside_noise": min(beside, default=None),
                    "failed": sum(one["failed"] for one in [*wrong, *noisy]),
                }
            )
        )


if __name__ == "__main__":
    main()
