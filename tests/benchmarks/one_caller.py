"""What one caller waits for, on the smallest model: beside an empty uvicorn, and beside the model alone.

    python -m tests.benchmarks.one_caller [--rounds 6] [--seconds 2] [--before CHECKOUT]

With ``--before`` the small model is served by another checkout and by this one instead: median
milliseconds of one caller and requests per second of 32 callers, and how many times as fast this one is (above 1 is
faster).

Both servers stand side by side and are asked alternately, by one connection that asks again at once. The time of the
model is measured twice: as the server counts it, between two system calls with cold caches, and in a tight loop in
this process. The last line on stdout is JSON; times are in microseconds.
"""

import argparse
import json
import re
import shutil
import socket
import statistics
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from halfeven.serve.bench.command import Plan, bench
from tritonclient.http import InferenceServerClient, InferInput

from tests.benchmarks.server_process import convert_by, engine_of, free_port, is_ready, of_checkout, process
from tests.benchmarks.workloads import SOURCE, write_folder

ROOT = Path(__file__).resolve().parent.parent.parent
EMPTY = """
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    head = [(b"content-type", b"application/octet-stream"), (b"content-length", b"160")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": bytes(160)})
"""
COUNTED = re.compile(r'halfeven_compute_seconds_(sum|count)\{[^}]*model="tiny"[^}]*\} (\S+)')


def request() -> bytes:
    given = InferInput("x", [1, 64], "FP32")
    given.set_data_from_numpy(np.random.default_rng(7).standard_normal((1, 64), np.float32))
    body, head = InferenceServerClient.generate_request_body([given])
    fields = f"Host: localhost\r\nContent-Length: {len(body)}\r\nInference-Header-Content-Length: {head}"
    return f"POST /v2/models/tiny/infer HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body


def asked_again_and_again(port: int, seconds: float) -> list[float]:
    """Microseconds of each answer on one connection."""
    message, took = request(), []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends = time.perf_counter() + seconds
        while (began := time.perf_counter()) < ends:
            wire.sendall(message)
            answer = wire.recv(65536)
            head, _, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: (\d+)", head)
            assert answer.startswith(b"HTTP/1.1 200") and length, answer[:200]
            missing = int(length[1]) - len(body)
            while missing:  # uvicorn writes head and body apart
                missing -= len(wire.recv(missing))
            took.append((time.perf_counter() - began) * 1e6)
    return took[len(took) // 10 :]


def counted(port: int) -> tuple[float, int]:
    """Seconds of computing and batches so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        found = dict(COUNTED.findall(answer.read().decode()))
    return float(found.get("sum", 0)), int(float(found.get("count", 0)))


def in_a_tight_loop() -> float:
    """The model alone, eager, on one thread: the median of ten thousand runs."""
    scope: dict[str, Any] = {}
    exec(SOURCE, scope)
    model, rows, took = scope["tiny"]().eval(), torch.randn(1, 64), []
    torch.set_num_threads(1)
    with torch.inference_mode():
        for _ in range(10_000):
            began = time.perf_counter()
            model(rows)
            took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took)


def measure(store: Path, where: Path, rounds: int, seconds: float) -> dict[str, Any]:
    (where / "empty.py").write_text(EMPTY)
    uvicorn = ["uvicorn", "empty:app", "--http", "httptools", "--loop", "uvloop", "--no-access-log"]
    serve = ["halfeven.serve.cli.main", "serve", "--store", str(store)]
    medians: dict[str, list[float]] = {"empty": [], "halfeven": [], "computing": []}
    with ExitStack() as running:
        empty = running.enter_context(process(uvicorn, where, free_port()))
        ours = running.enter_context(process(serve, where, free_port()))
        time.sleep(10)  # loaded, proven and warm; memory handed back
        for _ in range(rounds):
            medians["empty"].append(statistics.median(asked_again_and_again(empty, seconds)))
            before = counted(ours)
            medians["halfeven"].append(statistics.median(asked_again_and_again(ours, seconds)))
            after = counted(ours)
            medians["computing"].append((after[0] - before[0]) / (after[1] - before[1]) * 1e6)
    found: dict[str, Any] = {name: round(statistics.median(each)) for name, each in medians.items()}
    found["around computing"] = found["halfeven"] - found["computing"]
    found["in a tight loop"] = round(in_a_tight_loop())
    return {**found, "rounds": {name: [round(one) for one in each] for name, each in medians.items()}}


def beside(before: Path, where: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """The other checkout converts, for this one reads what an older release wrote; each measures its own choices."""
    cli, folder = "halfeven.serve.cli.main", write_folder(where, "tiny", "torch", "O0")
    stores = {name: where / f"store-{name}" for name in ("before", "now")}
    links = {name: of_checkout(one, where / name) for name, one in (("before", before), ("now", ROOT))}
    convert_by(links["before"], folder, stores["before"])
    shutil.copytree(stores["before"] / "models", stores["now"] / "models")
    p50: dict[str, list[float]] = {"before": [], "now": []}
    per_second: dict[str, list[float]] = {"before": [], "now": []}
    with ExitStack() as running:
        ports = {}
        for name, store in stores.items():
            serve = [cli, "serve", "--device", "cpu", "--drain-seconds", "0", "--store", str(store)]
            ports[name] = running.enter_context(process(serve, where, free_port(), links[name]))
            wait_ready(ports[name])
        engines = {name: engine_of(port, "tiny") for name, port in ports.items()}
        for turn in range(rounds):
            for name in sorted(ports, reverse=bool(turn % 2)):
                p50[name].append(statistics.median(asked_again_and_again(ports[name], seconds)))
                plan = Plan((32,), seconds=seconds)
                stage = bench(f"http://127.0.0.1:{ports[name]}", "tiny", plan, lambda _: None)["stages"][0]
                per_second[name].append(stage["per_second"])
    times = {name: statistics.median(each) for name, each in p50.items()}
    rates = {name: statistics.median(each) for name, each in per_second.items()}
    return {
        "engines": engines,
        "p50 ms": {name: round(each / 1000, 3) for name, each in times.items()},
        "requests per second": {name: round(each) for name, each in rates.items()},
        "p50, times as fast": round(times["before"] / times["now"], 3),
        "requests per second, times as many": round(rates["now"] / rates["before"], 3),
        "rounds": {"p50 us": p50, "requests per second": per_second},
    }


def wait_ready(port: int) -> None:
    for _ in range(1200):
        if is_ready(port):
            return
        time.sleep(0.1)
    raise TimeoutError("a server did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--before", type=Path, help="another checkout, served beside this one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as target:
        where = Path(target)
        if asked.before is not None:
            print(json.dumps(beside(asked.before.resolve(), where, asked.rounds, asked.seconds)))
            return
        store = Store(where / "store")
        convert(write_folder(where, "tiny", "torch", "O0"), store, Options(forms=("torch",)), print)
        print(json.dumps(measure(store.root, where, asked.rounds, asked.seconds)))


if __name__ == "__main__":
    main()
