"""One honest caller beside 200 connections of every greedy kind, and what the server's memory does meanwhile.

    python -m tests.benchmarks.strangers [--connections 200] [--requests 400] [--kinds silent,bombs]

The real server serves the zoo's digits with a budget of 64 MiB. For each kind the honest caller is measured calm, then
beside it (`stranger_kinds.py`, one process at nice 10 that opens connections again as the server closes them), then
calm again, so that other load of the machine is in both: look at the ratio. The last line on stdout is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from halfeven.serve.bench.callers import Caller
from halfeven.serve.cli.demo import MODEL, await_version, own_folder

from tests.benchmarks.stranger_kinds import KINDS
from tests.conformance.conftest import Serving, served

BUDGET_MIB, BODY_SECONDS = 64, 5
MOST_RATIO = 3.0
# The heap keeps memory that was freed for the next batch, and 64 KiB of each request are not counted.
KEPT_MIB = 32
PAUSE_S = 0.002  # of the honest caller, after each answer


@contextmanager
def beside(port: int, kind: str, count: int) -> Iterator[None]:
    """Strangers, from when all have been connected."""
    command = ["nice", "-n", "10", sys.executable, "-m", "tests.benchmarks.stranger_kinds"]
    process = subprocess.Popen([*command, kind, str(port), str(count), MODEL], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        time.sleep(1.0)  # what they begin with is over
        yield
    finally:
        process.kill()
        process.wait()


def asked(port: int, requests: int, serving: Serving) -> tuple[list[float], int, float]:
    """The honest caller: milliseconds of each request, how many it lost, and the most MiB the server had."""
    rows = np.random.default_rng().random((1, 1, 8, 8), np.float32)
    caller, took, lost, most = Caller(port, MODEL), [], 0, 0
    for number in range(requests):
        began = time.perf_counter()
        try:
            caller.infer({"image": rows})
        except (OSError, ValueError) as error:
            lost += 1
            print("lost:", error, flush=True)
            caller.close()
            caller = Caller(port, MODEL)
        took.append(1000 * (time.perf_counter() - began))
        if number % 10 == 0:
            most = max(most, serving.resident_bytes)
        time.sleep(PAUSE_S)
    caller.close()
    return took, lost, most / 2**20


def compared(port: int, kind: str, count: int, requests: int, serving: Serving) -> dict[str, Any]:
    before, _, resident = asked(port, requests // 2, serving)
    with beside(port, kind, count):
        loaded, lost, most = asked(port, requests, serving)
    time.sleep(6)  # what was received from those that are gone has been read and refused
    calm = before + asked(port, requests // 2, serving)[0]
    found: dict[str, Any] = {"lost": lost, "mib": round(most), "grown_mib": round(most - resident)}
    for share in (50, 99):
        pair = [float(np.percentile(took, share)) for took in (calm, loaded)]
        found[f"p{share}_ms"] = [round(one, 2) for one in pair]
        found[f"ratio_p{share}"] = round(pair[1] / pair[0], 2)
    return found


def run(count: int, requests: int, kinds: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        convert(own_folder(Path(folder)), store, Options(forms=("torch",)), print)
        settings = {"max_in_flight_mib": BUDGET_MIB, "body_seconds": BODY_SECONDS}
        with served(store.root, [MODEL], **settings) as serving:
            port = int(serving.address.split(":")[1])
            await_version(port, None, print)
            asked(port, 200, serving)
            for kind in kinds:
                found[kind] = compared(port, kind, count, requests, serving)
                print(kind, json.dumps(found[kind]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    found = run(given.connections, given.requests, given.kinds.split(","))
    most = BUDGET_MIB + KEPT_MIB + given.connections / 8
    within = all(one["ratio_p99"] < MOST_RATIO and one["grown_mib"] < most for one in found.values())
    print(
        json.dumps(
            {
                "budget_mib": BUDGET_MIB,
                "most_grown_mib": most,
                "most_ratio": MOST_RATIO,
                "passed": within,
                "kinds": found,
            }
        )
    )


if __name__ == "__main__":
    main()
