"""The command line run in this process, and a model that some of its tests convert."""

import json
from pathlib import Path
from typing import Any

from halfeven.serve.cli.main import app
from typer.testing import CliRunner

from tests.model_folders import samples_of, tensor, write_folder

# The squares of what comes out of `wide` are far above 65,504; what goes on is small again.
OVERFLOWS = """
import torch
from torch import nn

class Norm(nn.Module):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1.0).sqrt()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(16, 32)
        self.norm = Norm()
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.norm(self.wide(x) * 2000.0))

def build():
    torch.manual_seed(3)
    return Net()
"""


def run(*words: object) -> tuple[int, dict[str, Any], str]:
    """(exit code, the last line on stdout as JSON, what a person reads on stderr)."""
    done = CliRunner().invoke(app, [str(word) for word in words] + ["--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    lines = done.stdout.strip().splitlines()
    return done.exit_code, json.loads(lines[-1]) if lines else {}, done.stderr


def overflowing(path: Path) -> Path:
    ins, outs = [tensor("x", "FP32", [-1, 16])], [tensor("y", "FP32", [-1, 4])]
    return write_folder(path, OVERFLOWS, inputs=ins, outputs=outs, samples=samples_of({"x": [16]}, 24))
