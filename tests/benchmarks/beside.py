"""Serving beside training, and how long the road back takes, on the zoo's digits.

    python -m tests.benchmarks.beside

One server process, open connections of single images; latencies with no job, then while a job trains; then the
seconds from a job's last training step to its active version.
"""

import json
import shutil
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from halfeven.exporters.convert import Options, convert
from halfeven.models.store import Store
from halfeven.models.zoo import zoo_folder
from halfeven.serve.bench.callers import Caller
from halfeven.serve.cli.demo_digits import write_training_file
from halfeven.serve.cli.demo_stage import await_version, server
from halfeven.serve.finetune.client.remote import Remote

CALLERS = 4
SECONDS = 8.0
PAUSE_S = 0.02  # between a caller's requests: about half of what the server could do


def latencies(port: int, seconds: float) -> list[float]:
    """Milliseconds per request of several callers who pause between their requests."""
    image = np.random.default_rng(0).random((1, 1, 8, 8), dtype=np.float32)
    found: list[float] = []

    def call() -> None:
        caller, end = Caller(port, "digits"), time.monotonic() + seconds
        while time.monotonic() < end:
            start = time.perf_counter()
            caller.infer({"image": image})
            found.append((time.perf_counter() - start) * 1e3)
            time.sleep(PAUSE_S)

    threads = [threading.Thread(target=call) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def described(found: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(found, n=100)
    return {"requests": len(found), "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}


def until(remote: Remote, id: str, holds: Any) -> dict[str, Any]:
    while not holds(job := remote.job(id)):
        time.sleep(0.05)
    return job


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(zoo_folder("digits"), Path(name) / "digits"))
        store = Store(Path(name) / "store")
        convert(folder, store, Options())
        data = write_training_file(Path(name) / "new.safetensors")
        with server(store, print) as port:
            await_version(port, None, print)
            results: dict[str, Any] = {"alone": described(latencies(port, SECONDS))}
            remote = Remote(f"http://127.0.0.1:{port}")
            file = remote.upload(data, lambda done, total: None)["id"]
            numbers = {"n_epochs": 1000, "batch_size": 32, "precision": "bf16", "learning_rate": 1e-4}
            asked = {"model": "digits", "training_file": file, "hyperparameters": numbers}
            job = remote.create(asked, "beside-long")
            until(remote, job["id"], lambda j: j["halfeven"]["progress"].get("step", 0) > 0)
            results["beside training"] = described(latencies(port, SECONDS))
            remote.cancel(job["id"])
            until(remote, job["id"], lambda j: j["status"] == "cancelled")
            asked["hyperparameters"] = {**numbers, "n_epochs": 4, "learning_rate": 3e-3}
            job = remote.create(asked, "beside-short")
            until(
                remote, job["id"], lambda j: j["halfeven"]["stage"] not in ("queued", "checking", "training")
            )
            trained = time.monotonic()
            done = until(remote, job["id"], lambda j: j["status"] in ("succeeded", "failed"))
            results["last step to active, seconds"] = round(time.monotonic() - trained, 2)
            results["job"] = done["status"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
                results["active"] = json.loads(answer.read())["models"][0]
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
