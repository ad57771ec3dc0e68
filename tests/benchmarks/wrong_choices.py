"""A check that a server with wrong choices finds the right ones while it serves: all ratios in one pass.

    python -m tests.benchmarks.wrong_choices [--store DIR] [--starts 10] [--callers 32] [--rounds 30]

The encoder of `workloads.py`, whose level lets bf16 be chosen. Two calm starts with nothing kept, asked until they have
confirmed their choice. Then one start for each planted wrong choice: one thread and no passes for every form; a form
that is not the fastest, and batches of one row, both as a tuning's winner. Then ``starts`` starts beside busy processes
that come and go by chance, which end after 15 s of traffic. Each start is asked by closed loops of 5 s for 60 s; with
the choices that it has made by then it serves from there on, and measures nothing any more (SIGUSR1).

In the end all servers are asked in ``rounds`` turns of 1 s each, in an order drawn for each round, while the others are
stopped (SIGSTOP). A turn differs from the next by a quarter and more: the machine's speed changes within seconds. So
servers that serve in the same way, with the same limit of rows, are measured together: a way's rate is the mean of its
servers' turns, each divided by the round's mean. A start's ratio is the rate of its way to that of the faster calm one.

Printed for each start: its rates, what was replaced, how many requests failed, and how many were refused with 503,
since they would have waited longer than ``batching.max_queue_ms``: beside three busy processes that happens, and these
callers ask again at once. For each way: its rate, the standard error of it, its turns. The last line is JSON with
``worst_planted`` (at least 0.9), ``worst_beside_noise`` (of the best of those starts; at least 0.85), ``failed`` (0)
and ``refused``.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
LOOP_S, ALONE_S, NOISE_S, SETTLES_S, TURN_S = 5.0, 60.0, 15.0, 120.0, 1.0
BUSY = """
import random, sys, time
chance = random.Random(int(sys.argv[1]))
while True:
    end = time.monotonic() + chance.uniform(0.05, 1.5)
    while time.monotonic() < end:
        pass
    time.sleep(chance.uniform(0.0, 1.0))
"""
# The command line of a server whose choices stay as they are from SIGUSR1 on; it logs the limit of rows then.
SERVE = """
import signal
from halfeven.serve.cli.main import main
from halfeven.serve.versions.choices.remeasuring import Remeasuring

begin, made = Remeasuring.__init__, []

def kept(self, *given, **named):
    begin(self, *given, **named)
    made.append(self)

def freeze(*_):
    for one in made:
        one.leave()
        for served in one._models():
            print("limit of rows:", served.traffic.stable.prepared.useful_rows, flush=True)

Remeasuring.__init__ = kept
signal.signal(signal.SIGUSR1, freeze)
main()
"""
LIMIT = "limit of rows:"
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
    """A server process over a copy of the store, which computes only while it is asked."""

    def __init__(self, name: str, store: Store, stack: ExitStack) -> None:
        self.name, self._store, self._log = name, store, store.root / "server.log"
        command = [sys.executable, "-P", "-c", SERVE, "serve", "--store", str(store.root)]
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, "--port", "0", "--drain-seconds", "0"], stdout=file, stderr=file, cwd=store.root
            )
        stack.callback(self._end)
        self.port = await_port(self._process, self._log)
        await_version(self.port, None, quiet, MODEL)
        self.others: Counter[str] = Counter()
        self.rates: list[float] = []
        self._known = len(self._events())

    def asked(self, callers: int, seconds: float = LOOP_S) -> float:
        """Requests per second. Other answers than 200 are counted by their status in ``others``."""
        self._process.send_signal(signal.SIGCONT)
        plan = Plan(concurrency=(callers,), seconds=seconds, warmup_s=0.3)
        (stage,) = bench(f"http://127.0.0.1:{self.port}", MODEL, plan, quiet)["stages"]
        self.others.update({status: count for status, count in stage["statuses"].items() if status != "200"})
        return stage["per_second"]

    def settle(self, callers: int) -> None:
        """Ask until a sweep that changed nothing has confirmed a choice, `SETTLES_S` at most."""
        loops = int(SETTLES_S / LOOP_S)
        while loops and not self._has_confirmed():
            self.rates.append(self.asked(callers))
            loops -= 1

    def _has_confirmed(self) -> bool:
        live = self._store.live(MODEL)
        assert live is not None
        kept = [kept_setup(live, form, precision, CPU) for form, precision in FORMS]
        return any(one.rounds for one in kept if one is not None)

    def keep_choices(self) -> str:
        """Let the choices stay as they are, and stop the process; gives the way in which it serves."""
        self._process.send_signal(signal.SIGUSR1)
        while not (said := self._log.read_text(errors="replace").partition(LIMIT)[2]).strip():
            time.sleep(0.1)
        winner = self.serves()
        self.rest()
        return f"{winner}, {LIMIT} {said.split()[0]}"

    def serves(self) -> Winner:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=30) as answer:
            (model,) = [one for one in json.load(answer)["models"] if one["name"] == MODEL]
        cpu = model["cpu"]
        return Winner(model["form"], model["precision"], cpu["threads"], 0, 0, 1.0, tuple(cpu["passes"]))

    def rest(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def replaced(self) -> list[str]:
        done = self._events()
        new = done[: len(done) - self._known]
        return [one["message"] for one in reversed(new) if one["kind"] == "choice_replaced"]

    def _events(self) -> list[dict[str, Any]]:
        return events(self._store, MODEL, 10_000)

    def _end(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class Starts:
    """Starts of servers, each over its own copy of a store in which nothing is kept; all are left stopped."""

    original: Store
    place: Path
    callers: int
    stack: ExitStack
    ways: dict[Server, str] = field(default_factory=dict)

    def calm(self, name: str) -> Winner:
        started = self._begun(name, quiet)
        self._ask(started)
        started.settle(self.callers)
        winner = started.serves()
        self._end(started)
        return winner

    def begin(self, name: str, plant: Callable[[Version], object] = quiet, seed: int | None = None) -> None:
        """``plant`` writes into the copy of the store. ``seed``: of the busy processes beside it; None: none."""
        with ExitStack() as noise:
            if seed is not None:
                noise.enter_context(busy(seed))
            started = self._begun(name, plant)
            self._ask(started, noise.close)
        self._end(started)

    def _begun(self, name: str, plant: Callable[[Version], object]) -> Server:
        shutil.copytree(self.original.root, self.place / name)
        store = Store(self.place / name)
        live = store.live(MODEL)
        assert live is not None
        shutil.rmtree(live.folder.parent / "tuned", ignore_errors=True)
        plant(live)
        return Server(name, store, self.stack)

    def _ask(self, started: Server, end_noise: Callable[[], object] = quiet) -> None:
        for loop in range(int(ALONE_S / LOOP_S)):
            started.rates.append(started.asked(self.callers))
            if (loop + 1) * LOOP_S >= NOISE_S:
                end_noise()

    def _end(self, started: Server) -> None:
        self.ways[started] = started.keep_choices()
        found = {
            "start": started.name,
            "way": self.ways[started],
            "rates": [round(rate, 1) for rate in started.rates],
            "replaced": started.replaced(),
            "failed": started.others.total() - started.others["503"],
            "refused": started.others["503"],
        }
        print(json.dumps(found), flush=True)

    def rates(self, rounds: int) -> dict[str, float]:
        """The rate of each way: its servers' turns, each divided by the round's mean."""
        relative, order = defaultdict[str, list[float]](list), list(self.ways)
        for _ in range(rounds):
            random.shuffle(order)
            taken = {}
            for server in order:
                taken[server] = server.asked(self.callers, TURN_S)
                server.rest()
            mean = statistics.mean(taken.values())
            for server, rate in taken.items():
                relative[self.ways[server]].append(rate / mean)
        for way, found in relative.items():
            error = statistics.stdev(found) / len(found) ** 0.5
            print(
                json.dumps({"way": way, "rate": statistics.mean(found), "error": error, "turns": len(found)})
            )
        return {way: statistics.mean(found) for way, found in relative.items()}


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


def planted(calm: Winner) -> dict[str, Callable[[Version], object]]:
    """Wrong choices by name, each as a function that writes it beside a version."""

    def bad_setups(version: Version) -> None:
        for form, precision in FORMS:
            keep_setup(version, form, precision, CPU, CpuSetup(1), [])

    def tuned(winner: Winner) -> Callable[[Version], object]:
        none = {"measurements": [], "simulations": []}
        return lambda version: save_tuned(version, CPU, winner, "2026-01-01T00:00:00+00:00", none)

    form, precision = ("onnx", "fp32") if calm.form == "torch" else ("torch", "fp32")
    return {
        "one thread, no passes": bad_setups,
        "the wrong form": tuned(Winner(form, precision, calm.threads, 0, 0, 1.0)),
        "batches of one row": tuned(Winner(calm.form, calm.precision, calm.threads, 1, 0, 1.0, calm.passes)),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--store", type=Path, help="kept, and used again where it has the model")
    options.add_argument("--starts", type=int, default=10)
    options.add_argument("--callers", type=int, default=32)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--level", default="mixed_bfloat16")
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        store = made(asked.store or Path(place) / "store", asked.level)
        starts = Starts(store, Path(place), asked.callers, stack)
        winners = [starts.calm(f"calm {number}") for number in range(2)]
        for name, plant in planted(winners[0]).items():
            starts.begin(name, plant)
        for number in range(asked.starts):
            starts.begin(f"beside noise {number}", seed=asked.seed * 1000 + number)
        rates = starts.rates(asked.rounds)
        by_name = {server.name: rates[way] for server, way in starts.ways.items()}
        calm = max(rate for name, rate in by_name.items() if name.startswith("calm"))
        ratios = {name: round(rate / calm, 3) for name, rate in by_name.items()}
        noisy = [ratio for name, ratio in ratios.items() if name.startswith("beside noise")]
        others = sum((server.others for server in starts.ways), Counter[str]())
        print(
            json.dumps(
                {
                    "ratios": ratios,
                    "worst_planted": min(ratios[name] for name in planted(winners[0])),
                    "worst_beside_noise": round(min(noisy) / max(noisy), 3) if noisy else None,
                    "failed": others.total() - others["503"],
                    "refused": others["503"],
                }
            )
        )


if __name__ == "__main__":
    main()
