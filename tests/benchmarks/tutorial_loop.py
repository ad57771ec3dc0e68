"""The training loop of the tutorials, in FP32, beside a fine-tuning job of the same net on the same rows.

    python -m tests.benchmarks.tutorial_loop

The 28×28 nets of the zoo, from the same untrained weights, on handwritten digits that are scaled up from 8×8. The loop
runs in a process of its own (Adam, batches of 32, as many epochs); the job is asked for over HTTP and its version is
asked for the rows that no training saw. Accuracy, seconds and the most memory of each training process, three seeds.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from halfeven.exporters.convert import Options, convert
from halfeven.models.store import Store
from halfeven.models.zoo import zoo_folder
from halfeven.serve.bench.callers import Caller
from halfeven.serve.cli.demo_stage import await_version, server
from halfeven.serve.finetune.client.job_command import fine_tune
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_digits

NETS = {"cnn28": ("image", (1, 28, 28)), "mlp": ("pixels", (784,))}
PRECISIONS = ("fp32", "auto")
SEEDS = (1, 2, 3)
EPOCHS, BATCH, RATE = 8, 32, 1e-3
TEST_ROWS, HELD_OUT_ROWS, ASKED = 500, 200, 50
SCRIPT = Path(__file__).with_name("tutorial_script.py")


def digits_28() -> tuple[np.ndarray, np.ndarray]:
    """Images ``(n, 1, 28, 28)`` FP32 in [-0.42, 2.82], as the pixels of the tutorials' digits are normalised; classes
    INT64 ``(n,)``."""
    found: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.tensor(found.images[order], dtype=torch.float32)[:, None] / 16
    large = torch.nn.functional.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    return ((large - 0.1307) / 0.3081).numpy(), found.target[order].astype(np.int64)


def written(folder: Path, name: str, shape: tuple[int, ...]) -> dict[str, Path]:
    """The rows to learn from, those to judge by and those that no training sees, as files."""
    images, classes = digits_28()
    parts = {
        "test": slice(0, TEST_ROWS),
        "held_out": slice(TEST_ROWS, TEST_ROWS + HELD_OUT_ROWS),
        "train": slice(TEST_ROWS + HELD_OUT_ROWS, None),
    }
    files: dict[str, Path] = {}
    for part, rows in parts.items():
        files[part] = folder / f"{part}.safetensors"
        x = np.ascontiguousarray(images[rows].reshape(-1, *shape))
        save_file({name: x, "target:logits": classes[rows].copy()}, files[part])
    return files


def by_loop(net: str, files: dict[str, Path], seed: int) -> dict[str, float]:
    numbers = [str(one) for one in (EPOCHS, BATCH, RATE, seed)]
    given = [
        str(zoo_folder(net) / "model.py"),
        str(files["train"]),
        str(files["test"]),
        NETS[net][0],
        *numbers,
    ]
    done = subprocess.run([sys.executable, str(SCRIPT), *given], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def by_job(net: str, untrained: Store, files: dict[str, Path], seed: int, precision: str) -> dict[str, Any]:
    """A store and a server of its own: each job begins with the untrained net."""
    with tempfile.TemporaryDirectory() as place:
        store = Store(Path(shutil.copytree(untrained.root, Path(place) / "store")))
        numbers = {"n_epochs": EPOCHS, "batch_size": BATCH, "learning_rate": RATE, "precision": precision}
        with server(store, lambda line: None, net) as port:
            url, began = f"http://127.0.0.1:{port}", time.perf_counter()
            job = fine_tune(
                url, net, files["train"], validation=files["held_out"], seed=seed, hyperparameters=numbers,
                notify=lambda line: None,
            )  # fmt: skip
            number = int(job["fine_tuned_model"].partition("@")[2])
            await_version(port, number, lambda line: None, net)
            active = time.perf_counter() - began
            right, served = accuracy(port, net, files["test"])
    summary = job["summary"]
    return {
        "accuracy": right,
        "seconds": summary["seconds"],
        "to_active_seconds": active,
        "mib": summary["peak_memory_bytes"] / 2**20,
        "precision": summary["precision"],
        "served": served,
    }


def accuracy(port: int, net: str, file: Path) -> tuple[float, str]:
    rows, caller, right, precision = load_file(file), Caller(port, net), 0, ""
    name = NETS[net][0]
    for start in range(0, TEST_ROWS, ASKED):
        answer, headers = caller.infer({name: rows[name][start : start + ASKED]})
        wanted = rows["target:logits"][start : start + ASKED]
        right += int((answer["logits"].argmax(-1) == wanted).sum())
        precision = headers["halfeven-precision"]
    caller.close()
    return right / TEST_ROWS, precision


def middle(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure; of words the first."""
    return {
        key: round(statistics.median(one[key] for one in found), 3) if not isinstance(value, str) else value
        for key, value in found[0].items()
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        for net, (name, shape) in NETS.items():
            files, store = written(Path(place), name, shape), Store(Path(place) / net)
            convert(zoo_folder(net), store, Options(forms=("torch",)))
            print(
                json.dumps({"net": net, "loop": middle([by_loop(net, files, s) for s in SEEDS])}), flush=True
            )
            for precision in PRECISIONS:
                found = middle([by_job(net, store, files, seed, precision) for seed in SEEDS])
                print(json.dumps({"net": net, "job": found, "asked": precision}), flush=True)


if __name__ == "__main__":
    main()
