"""What HTTP workers cost one caller and give many, on the smallest model: beside the same server in one process.

    python -m tests.benchmarks.http_workers [--workers 2] [--rounds 5] [--seconds 3]

Both servers stand side by side and are asked alternately. The last line on stdout is JSON: the median over the rounds
of the p50 in microseconds at one caller, and of requests per second at 32 callers, binary and JSON tensors.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from halfeven.exporters.convert import Options, convert
from halfeven.models.store import Store
from halfeven.serve.bench.command import Plan, bench

from tests.benchmarks.one_caller import asked_again_and_again
from tests.benchmarks.server_process import free_port, process
from tests.benchmarks.workloads import write_folder

CALLERS = 32


def measure(stores: dict[int, Path], where: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """``stores``: one for each server, by its number of workers."""
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as running:
        ports: dict[int, int] = {}
        for workers, store in stores.items():
            serve = [
                "halfeven.serve.cli.main",
                "serve",
                "--store",
                str(store),
                "--http-workers",
                str(workers),
            ]
            ports[workers] = running.enter_context(process(serve, where, free_port()))
        time.sleep(20)  # loaded, proven and warm; memory handed back
        for _ in range(rounds):
            for workers, port in ports.items():
                of = found.setdefault(f"{workers} workers", {})
                p50 = statistics.median(asked_again_and_again(port, seconds))
                of.setdefault("one caller, p50 us", []).append(round(p50))
                for wire in ("binary", "json"):
                    plan = Plan((CALLERS,), seconds=seconds, warmup_s=0.5, wire=wire)
                    stage = bench(f"http://127.0.0.1:{port}", "tiny", plan, lambda _: None)["stages"][0]
                    of.setdefault(f"{CALLERS} callers, {wire}, requests/s", []).append(
                        round(stage["per_second"])
                    )
    medians = {
        name: {key: statistics.median(each) for key, each in figures.items()}
        for name, figures in found.items()
    }
    return {"medians": medians, "rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as target:
        where = Path(target)
        folder = write_folder(where, "tiny", "torch", "O0")
        stores = {workers: where / f"store-{workers}" for workers in (0, asked.workers)}
        for store in stores.values():
            convert(folder, Store(store), Options(forms=("torch",)), print)
        print(json.dumps(measure(stores, where, asked.rounds, asked.seconds)))


if __name__ == "__main__":
    main()
