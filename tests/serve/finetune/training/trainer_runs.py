"""The trainer as a process of its own: a job's request, and the lines that it reports."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfeven.serve.finetune.training import trainer
from safetensors.torch import save_file
from torch import Tensor

from tests.patience import PATIENCE_S

TRAINER = trainer.__name__
Line = dict[str, Any]


def job(folder: Path, data: Mapping[str, Tensor], inputs: list[str], output: str, loss: str) -> Line:
    (folder / "out").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in data.items()}, folder / "data.safetensors")
    return {
        "source": None, "program": None, "weights": "", "data": str(folder / "data.safetensors"),
        "rows": list(range(0, len(data[inputs[0]]), 2)), "inputs": [{"name": name, "dims": []} for name in inputs],
        "outputs": [output], "losses": {output: loss}, "max_batch_size": 32, "precision": "fp32",
        "device": "cpu", "threads": 1, "priority": "low", "memory_limit_bytes": 0, "seed": 7,
        "hyperparameters": {"n_epochs": 2, "batch_size": 16, "learning_rate": 0.003, "growth_interval": None},
        "out": str(folder / "out"),
    }  # fmt: skip


@contextmanager
def started(request: Line) -> Iterator[subprocess.Popen[str]]:
    file = Path(request["out"]).parent / "request.json"
    file.write_text(json.dumps(request))
    pipe = subprocess.PIPE
    command = [sys.executable, "-PB", "-m", TRAINER, str(file)]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(request: Line) -> tuple[list[Line], str]:
    """Every line of stdout, which must all be JSON objects, and stderr. The control pipe stays open throughout."""
    with started(request) as process:
        assert process.stdout and process.stderr
        lines = [json.loads(line) for line in process.stdout]
        errors = process.stderr.read()
        assert process.wait(PATIENCE_S) == (1 if lines and lines[-1]["type"] == "failed" else 0), errors
    return lines, errors
