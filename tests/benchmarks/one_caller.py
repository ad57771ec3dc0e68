"""The time that one caller waits, on the smallest model: beside an empty uvicorn, and beside the model alone.

    python -m tests.benchmarks.one_caller [--rounds 6] [--seconds 2]

Both servers stand side by side and are asked alternately, by one connection that asks again at once. The time of the
model is measured twice: as the server counts it, between two system calls with cold caches, and in a tight loop in
this process. The last line on stdout is JSON; times are in microseconds.
"""

import argparse
import json
import re
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
from tritonclient.http import InferenceServerClient, InferInput

from tests.benchmarks.server_process import free_port, process
from tests.benchmarks.workloads import SOURCE, write_folder

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as target:
        where = Path(target)
        store = Store(where / "store")
        convert(write_folder(where, "tiny", "torch", "O0"), store, Options(forms=("torch",)), print)
        print(json.dumps(measure(store.root, where, asked.rounds, asked.seconds)))


if __name__ == "__main__":
    main()
