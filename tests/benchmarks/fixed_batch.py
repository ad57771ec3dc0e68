"""Requests per second of models that were made for one row: as they came, and with their batch made free.

    python -m tests.benchmarks.fixed_batch [--rounds 4] [--seconds 3] [--callers 8]

A convolutional net with a large linear layer (an AlexNet in small), and two layers of LSTM of the size that transducers
predict with, whose states have the batch on axis 1: ONNX files with a batch of 1. Each stands twice in one server, with
``max_batch_size`` 1 and 8. So many callers of one row each ask them alternately. The last line on stdout is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
from halfeven.exporters.conversion.convert import convert
from halfeven.models.store.store import Store
from halfeven.serve.bench.command import Plan, bench
from torch import Tensor, nn

from tests.benchmarks.server_process import free_port, process
from tests.model_folders import tensor, write_folder

LAYERS, STEPS, WIDTH = 2, 4, 640


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 32, 5, 4, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()
        )
        self.wide, self.score = nn.Linear(64 * 8 * 8, 2048), nn.Linear(2048, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(torch.relu(self.wide(self.image(x).reshape(1, -1))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.score = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, (h, c) = self.lstm(x, (h, c))
        return self.score(hidden[:, -1]), h, c


def state(name: str) -> dict[str, Any]:
    return tensor(name, "FP32", [LAYERS, -1, WIDTH], batch_axis=1)


MODELS = {
    "convolutional": (
        Convolutional,
        [tensor("x", "FP32", [-1, 3, 64, 64])],
        [tensor("y", "FP32", [-1, 100])],
    ),
    "recurrent": (
        Recurrent,
        [tensor("x", "FP32", [-1, STEPS, WIDTH]), state("h"), state("c")],
        [tensor("y", "FP32", [-1, 10]), state("hn"), state("cn")],
    ),
}


def publish(name: str, rows: int, store: Store, where: Path) -> str:
    """The model's name in the store: its file takes batches of 1, and ``rows`` are asked for."""
    made, inputs, outputs = MODELS[name]
    folder = write_folder(
        where / f"{name}-{rows}", "", inputs=inputs, outputs=outputs, source="model.onnx", max_batch_size=rows,
        precision={"level": "O0"},
    )  # fmt: skip
    (folder / "model.py").unlink()
    example = tuple(torch.randn([abs(size) for size in entry["shape"]]) for entry in inputs)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            made().eval(), example, input_names=[one["name"] for one in inputs],
            output_names=[one["name"] for one in outputs], dynamo=True, verbose=False,
        )  # fmt: skip
    assert program is not None
    onnx.save(program.model_proto, folder / "model.onnx")
    converted = convert(folder, store)
    print(converted.version, *converted.facts["notes"])
    return folder.name


def wait_until_ready(port: int, seconds: float = 300.0) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=30).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"the server is not ready after {seconds:g} s")


def measure(rounds: int, seconds: float, callers: int) -> dict[str, Any]:
    plan = Plan(concurrency=(callers,), seconds=seconds, warmup_s=0.5)
    found: dict[str, Any] = {"callers": callers}
    with tempfile.TemporaryDirectory() as name:
        store = Store(Path(name) / "store")
        models = {each: {rows: publish(each, rows, store, Path(name)) for rows in (1, 8)} for each in MODELS}
        serve = ["halfeven.serve.cli.main", "serve", "--store", str(store.root), "--device", "cpu"]
        with process(serve, Path(name), free_port()) as port:
            wait_until_ready(port)
            for each, names in models.items():
                rates: dict[int, list[float]] = {1: [], 8: []}
                for _ in range(rounds):
                    for rows, model in names.items():
                        stage = bench(f"http://127.0.0.1:{port}", model, plan, notify=lambda _: None)[
                            "stages"
                        ][0]
                        rates[rows].append(stage["per_second"])
                middle = {rows: statistics.median(each) for rows, each in rates.items()}
                found[each] = {"per_second": middle, "ratio": middle[8] / middle[1], "each": rates}
                print(f"{each}: {middle[1]:,.0f} a second as it came, {middle[8]:,.0f} freed")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--callers", type=int, default=8)
    asked = parser.parse_args()
    print(json.dumps(measure(asked.rounds, asked.seconds, asked.callers)))
