"""A check that a server with wrong choices finds the right ones while it serves: all ratios in one pass.

    python -m tests.benchmarks.wrong_choices [--store DIR] [--starts 10] [--callers 32]

The encoder of `workloads.py`, whose level lets bf16 be chosen. First two calm starts with nothing kept, each over a
copy of the store, asked for 60 s and then in turns; the faster one stays as the reference. Then one start for each
planted wrong choice: one thread and no passes for every form; a form that is not the fastest, and batches of one row,
both as a tuning's winner. Then ``starts`` starts beside busy processes that come and go by chance, which end after 15
s of traffic. Each start is asked by closed loops of 5 s for 60 s, in which it has to make its choice, and then until it
has confirmed that choice, two minutes at most: what measuring again costs callers is not what the choice is worth. Then
it is asked in twenty turns of 1 s with the reference. While one server is asked, the other is stopped (SIGSTOP). A
start's ratio is that of the answers in all turns: the machine's own speed, which may double from minute to minute, is
not in it. Run it on a calm machine.

Printed for each start: its rates, the ratio, what was replaced within the 60 s and what later, how many requests
failed, and how many were refused with 503, since they would have waited longer than ``batching.max_queue_ms``: beside
three busy processes that happens, and these callers ask again at once. The last line is JSON with ``worst_planted`` (at
least 0.9), ``worst_beside_noise`` (of the best of those starts; at least 0.85), ``late`` (starts that replaced more
after the 60 s), ``failed`` (0) and ``refused``.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
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
from halfeven.serve.cli.demo import await_port, await_version
from halfeven.serve.versions.loading.kept_setups import keep_setup, kept_setup
from halfeven.serve.versions.loading.tuned import Winner, save_tuned
from halfeven.serve.versions.orders import events

from tests.benchmarks.workloads import write_folder

MODEL, CPU = "encoder", torch.device("cpu")
FORMS = (("torch", "fp32"), ("onnx", "fp32"), ("torch", "bf16"), ("onnx", "bf16"))
LOOP_S, ALONE_S, NOISE_S, SETTLES_S = 5.0, 60.0, 15.0, 120.0
TURN_S, TURNS = 1.0, 20  # short ones, many: the machine's speed changes within seconds
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


class Server:
    """A server process over a store, which computes only while it is asked."""

    def __init__(self, store: Store, stack: ExitStack) -> None:
        command = [sys.executable, "-P", "-m", "halfeven.serve.cli.main", "serve", "--store", str(store.root)]
        self._store, log = store, store.root / "server.log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, "--port", "0", "--drain-seconds", "0"], stdout=file, stderr=file, cwd=store.root
            )
        stack.callback(self._end)
        self.port = await_port(self._process, log)
        await_version(self.port, None, quiet, MODEL)
        self.others: Counter[str] = Counter()

    def asked(self, callers: int, seconds: float = LOOP_S) -> float:
        """Requests per second. Other answers than 200 are counted by their status in ``others``."""
        self._process.send_signal(signal.SIGCONT)
        plan = Plan(concurrency=(callers,), seconds=seconds, warmup_s=0.3)
        (stage,) = bench(f"http://127.0.0.1:{self.port}", MODEL, plan, quiet)["stages"]
        self.others.update({status: count for status, count in stage["statuses"].items() if status != "200"})
        return stage["per_second"]

    def settled(self, callers: int) -> list[float]:
        """Ask until a sweep that changed nothing has confirmed a choice, `SETTLES_S` at most; gives the rates."""
        rates: list[float] = []
        while len(rates) * LOOP_S < SETTLES_S and not self._has_confirmed():
            rates.append(self.asked(callers))
        return rates

    def _has_confirmed(self) -> bool:
        live = self._store.live(MODEL)
        assert live is not None
        kept = [kept_setup(live, form, precision, CPU) for form, precision in FORMS]
        return any(one.rounds for one in kept if one is not None)

    def rest(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def serves(self) -> Winner:
        self._process.send_signal(signal.SIGCONT)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=30) as answer:
            (model,) = [one for one in json.load(answer)["models"] if one["name"] == MODEL]
        self.rest()
        cpu = model["cpu"]
        return Winner(model["form"], model["precision"], cpu["threads"], 0, 0, 1.0, tuple(cpu["passes"]))

    def _end(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def alternating(one: Server, other: Server, callers: int) -> list[tuple[float, float]]:
    """The rates of both, asked in turns; both rest at the end."""
    pairs = []
    for _ in range(TURNS):
        other.rest()
        rate = one.asked(callers, TURN_S)
        one.rest()
        pairs.append((rate, other.asked(callers, TURN_S)))
    other.rest()
    return pairs


def ratio_of(pairs: list[tuple[float, float]]) -> float:
    return sum(rate for rate, _ in pairs) / sum(reference for _, reference in pairs)


def calm_start(root: Path, store: Store, callers: int, stack: ExitStack) -> Server:
    shutil.copytree(store.root, root)
    started = Server(Store(root), stack)
    started.asked(callers, ALONE_S)
    started.settled(callers)
    started.rest()
    return started


class Starts:
    """Starts of a server over one store, beside a reference; each begins with what ``plant`` wrote."""

    def __init__(self, store: Store, reference: Server, callers: int) -> None:
        self.store, self.reference, self.callers = store, reference, callers

    def start(self, name: str, plant: Callable[[], object] = quiet, seed: int | None = None) -> Figures:
        """``seed``: of the busy processes beside it; None: none."""
        forget(self.store)
        plant()
        known = len(events(self.store, MODEL, 10_000))
        with ExitStack() as stack:
            noise = stack.enter_context(ExitStack())
            if seed is not None:
                noise.enter_context(busy(seed))
            started, rates, began = Server(self.store, stack), [], time.monotonic()
            while len(rates) * LOOP_S < ALONE_S:
                rates.append(started.asked(self.callers))
                if time.monotonic() - began >= NOISE_S:
                    noise.close()
            replaced = self.replaced(known)
            rates += started.settled(self.callers)
            pairs = alternating(started, self.reference, self.callers)
            others = started.others
        found = {
            "start": name,
            "ratio": round(ratio_of(pairs), 3),
            "first": round(rates[0] / statistics.median(reference for _, reference in pairs), 3),
            "rates": [round(rate, 1) for rate in rates],
            "alternating": [(round(rate, 1), round(reference, 1)) for rate, reference in pairs],
            "failed": others.total() - others["503"],
            "refused": others["503"],
            "replaced": replaced,
            "replaced_late": self.replaced(known)[len(replaced) :],
        }
        print(json.dumps(found), flush=True)
        return found

    def replaced(self, known: int) -> list[str]:
        """The replacements after so many events."""
        done = events(self.store, MODEL, 10_000)
        new = done[: len(done) - known]
        return [one["message"] for one in reversed(new) if one["kind"] == "choice_replaced"]


def forget(store: Store) -> None:
    live = store.live(MODEL)
    assert live is not None
    shutil.rmtree(live.folder.parent / "tuned", ignore_errors=True)


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
        for form, precision in FORMS:
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


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--store", type=Path, help="kept, and used again where it has the model")
    options.add_argument("--starts", type=int, default=10)
    options.add_argument("--callers", type=int, default=32)
    options.add_argument("--level", default="mixed_bfloat16")
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        store = made(asked.store or Path(place) / "store", asked.level)
        forget(store)
        calm = [calm_start(Path(place) / f"calm{number}", store, asked.callers, stack) for number in range(2)]
        pairs = alternating(calm[0], calm[1], asked.callers)
        reference = calm[0 if ratio_of(pairs) > 1 else 1]
        print(
            json.dumps({"start": "calm", "alternating": pairs, "first_to_second": ratio_of(pairs)}),
            flush=True,
        )
        winner = reference.serves()
        print(json.dumps({"reference": str(winner)}), flush=True)
        starts = Starts(store, reference, asked.callers)
        live = store.live(MODEL)
        assert live is not None
        wrong = [starts.start(name, plant) for name, plant in planted(live, winner).items()]
        noisy = [
            starts.start(f"beside noise {number}", seed=asked.seed * 1000 + number)
            for number in range(asked.starts)
        ]
        best = max((one["ratio"] for one in noisy), default=0.0)
        beside = [round(one["ratio"] / best, 3) for one in noisy]
        print(
            json.dumps(
                {
                    "planted": {one["start"]: one["ratio"] for one in wrong},
                    "planted_at_first": {one["start"]: one["first"] for one in wrong},
                    "worst_planted": min(one["ratio"] for one in wrong),
                    "beside_noise": [one["ratio"] for one in noisy],
                    "worst_beside_noise": min(beside, default=None),
                    "late": [one["start"] for one in [*wrong, *noisy] if one["replaced_late"]],
                    "failed": sum(one["failed"] for one in [*wrong, *noisy]),
                    "refused": sum(one["refused"] for one in [*wrong, *noisy]),
                }
            )
        )


if __name__ == "__main__":
    main()
