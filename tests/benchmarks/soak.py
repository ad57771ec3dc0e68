"""Ten minutes at half load, with versions that change and callers who vanish: nothing lost, flat memory.

    python -m tests.benchmarks.soak [--seconds 600] [--out DIR]

One server process with two versions of the zoo's digits. Callers send single images at half of what they reach when
they do not pause; every answer is held against the version that it names. Meanwhile the active version changes, and
other callers hang up in the middle: half of them while sending, half while waiting for the answer.
"""

import argparse
import json
import random
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from halfeven.serve.bench.callers import Caller
from halfeven.serve.cli.demo import MODEL, await_version, own_folder, server

CALLERS = 4
SWAP_EVERY_S = 5.0
VANISH_EVERY_S = 0.05
SETTLE_S = 30.0  # memory is compared from here on: pools and caches are filled by then


@dataclass
class Seen:
    """The results that the callers saw. ``wrong``: answers that are not those of the version they name."""

    answered: int = 0
    failed: int = 0
    wrong: int = 0
    faults: list[str] = field(default_factory=list)
    by_version: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Callers:
    """Closed-loop callers, each pausing ``pause_s`` after an answer, who check what they get."""

    def __init__(
        self, port: int, images: np.ndarray, expected: dict[str, np.ndarray], pause_s: float
    ) -> None:
        self.seen = Seen()
        self.over = threading.Event()
        self._port, self._images, self._expected, self._pause_s = port, images, expected, pause_s
        self._threads = [threading.Thread(target=self._call, args=(i,)) for i in range(CALLERS)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        caller, pick = Caller(self._port, MODEL), random.Random(number)
        while not self.over.is_set():
            row = pick.randrange(len(self._images))
            start = time.perf_counter()
            try:
                outputs, headers = caller.infer({"image": self._images[row : row + 1]})
            except Exception as error:
                self._failed(f"{type(error).__name__}: {error}")
                caller.close()
                caller = Caller(self._port, MODEL)
                continue
            self._answered(
                row, outputs["logits"][0], headers["halfeven-version"], time.perf_counter() - start
            )
            if self._pause_s:
                time.sleep(self._pause_s)
        caller.close()

    def _failed(self, fault: str) -> None:
        with self.seen.lock:
            self.seen.failed += 1
            self.seen.faults = [*self.seen.faults, fault][:5]

    def _answered(self, row: int, logits: np.ndarray, version: str, seconds: float) -> None:
        want = self._expected.get(version)
        right = want is None or bool(np.abs(logits - want[row]).max() <= 0.02 * np.abs(want).max())
        with self.seen.lock:
            self.seen.answered += 1
            self.seen.wrong += not right
            self.seen.by_version[version] = self.seen.by_version.get(version, 0) + 1
            self.seen.seconds.append(seconds)


def two_versions(target: Path) -> Store:
    """Version 1 is the zoo's; version 2 has the last layer's rows in another order, so answers tell them apart."""
    from safetensors.numpy import load_file, save_file

    store, folder = Store(target / "store"), own_folder(target)
    convert(folder, store, Options(forms=("torch",)), print)
    weights = load_file(folder / "weights.safetensors")
    last = max((name for name in weights if weights[name].shape[:1] == (10,)), key=lambda n: weights[n].ndim)
    changed = {n: np.ascontiguousarray(w[::-1]) if w.shape[:1] == (10,) else w for n, w in weights.items()}
    assert not np.array_equal(changed[last], weights[last])
    (folder / "weights.safetensors").chmod(0o644)
    save_file(changed, folder / "weights.safetensors")
    convert(folder, store, Options(forms=("torch",)), print)
    return store


def answers_of(port: int, images: np.ndarray) -> np.ndarray:
    caller = Caller(port, MODEL)
    answers = [caller.infer({"image": images[i : i + 1]})[0]["logits"][0] for i in range(len(images))]
    caller.close()
    return np.stack(answers)


def activate(store: Store, port: int, number: int) -> None:
    store.promote(store.version(MODEL, number))
    await_version(port, number, lambda _: None)


def vanish(port: int, over: threading.Event, count: list[int]) -> None:
    """Connect, send a request or half of one, and hang up."""
    body = json.dumps(
        {"inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]}
    ).encode()
    head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    while not over.wait(VANISH_EVERY_S):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            message = head + body
            connection.sendall(message if count[0] % 2 else message[: len(message) // 2])
        count[0] += 1


def resident_mb(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("process_resident_memory_bytes "):
                return float(line.split()[1]) / 1e6
    raise RuntimeError("/metrics does not say how much memory the process has")


def soak(seconds: float, target: Path) -> dict[str, Any]:
    store = two_versions(target)
    images = np.random.default_rng(7).random((64, 1, 8, 8), dtype=np.float32)
    with server(store, print) as port:
        expected: dict[str, np.ndarray] = {}
        for number in (1, 2):
            activate(store, port, number)
            expected[str(number)] = answers_of(port, images)
        pause_s = _pause_for_half_load(port, images, expected)
        return _run(seconds, store, port, images, expected, pause_s)


def _pause_for_half_load(port: int, images: np.ndarray, expected: dict[str, np.ndarray]) -> float:
    with Callers(port, images, expected, 0.0) as callers:
        time.sleep(5.0)
    return statistics.mean(callers.seen.seconds)  # as long again between two requests: half of it


def _run(
    seconds: float,
    store: Store,
    port: int,
    images: np.ndarray,
    expected: dict[str, np.ndarray],
    pause_s: float,
) -> dict[str, Any]:
    vanished, over = [0], threading.Event()
    vanishing = threading.Thread(target=vanish, args=(port, over, vanished))
    memory: list[tuple[float, float]] = []
    swaps = 0
    began = time.monotonic()
    with Callers(port, images, expected, pause_s) as callers:
        vanishing.start()
        while (passed := time.monotonic() - began) < seconds:
            activate(store, port, 1 + swaps % 2)
            swaps += 1
            memory.append((passed, resident_mb(port)))
            time.sleep(min(SWAP_EVERY_S, seconds))
    over.set()
    vanishing.join()
    seen = callers.seen
    cuts = statistics.quantiles(seen.seconds, n=1000)
    settled = [mb for at, mb in memory if at >= min(SETTLE_S, seconds / 3)]
    return {
        "seconds": round(time.monotonic() - began),
        "answered": seen.answered,
        "failed": seen.failed,
        "wrong": seen.wrong,
        "faults": seen.faults,
        "by_version": seen.by_version,
        "swaps": swaps,
        "vanished_callers": vanished[0],
        "requests_per_s": round(seen.answered / (time.monotonic() - began), 1),
        "p50_ms": round(cuts[499] * 1e3, 2),
        "p99_ms": round(cuts[989] * 1e3, 2),
        "memory_mb_settled": round(settled[0], 1),
        "memory_mb_end": round(settled[-1], 1),
        "memory_mb_most": round(max(settled), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, help="also write soak.json here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(asked.seconds, Path(folder))
    print(json.dumps(found))
    if asked.out is not None:
        (asked.out / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(0 if not found["failed"] and not found["wrong"] else 1)


if __name__ == "__main__":
    main()
