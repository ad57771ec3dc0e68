"""The processor time of a conversion, by stage, of nets of real size and of small ones.

    python -m tests.benchmarks.conversion_cost [NET …] [--level O1] [--form both] [--limit 240] [--out FILE.json]

Nets: ``bert-base`` (109 M parameters, 128 ids), ``bert-base-free`` (2 to 128 ids), ``vit-b`` (86 M), all of
`transformers` with random weights of seed 0 and generated samples; ``bert-4``, ``bert-4-free`` (four blocks); ``small``
(ten models of the corpus), and any name of `tests/corpus`. Each is converted in a process of its own. Seconds of the
processor are those of that process and its children. The exit code is 1 where a net takes more than ``--limit`` of
them: 240, which is two minutes of two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.same_plans import converted
from tests.corpus import CORPUS

LARGE = ("bert-base", "vit-b")
SMALL = (
    "residual", "lstm", "zoo mlp", "zoo unet", "rms norm of large", "deep stack", "cosine head", "while loop",
    "zoo recommender", "mean of squares",
)  # fmt: skip
_TEXT = """
import torch
from transformers import BertConfig, BertModel

def build():
    torch.manual_seed(0)
    return BertModel(BertConfig(num_hidden_layers={blocks}, attn_implementation="sdpa"))
"""
_TEXT_TOML = """
name = "net"
source = "model.py:build"
max_batch_size = 32
[[inputs]]
name = "input_ids"
datatype = "INT64"
shape = [-1, {length}]
[[inputs]]
name = "attention_mask"
datatype = "INT64"
shape = [-1, {length}]
[[outputs]]
name = "last_hidden_state"
datatype = "FP32"
shape = [-1, {length}, 768]
[[outputs]]
name = "pooler_output"
datatype = "FP32"
shape = [-1, 768]
"""
_PICTURES = """
import torch
from transformers import ViTConfig, ViTForImageClassification

def build():
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(num_labels=1000))
"""
_PICTURES_TOML = """
name = "net"
source = "model.py:build"
max_batch_size = 32
[[inputs]]
name = "pixel_values"
datatype = "FP32"
shape = [-1, 3, 224, 224]
[[outputs]]
name = "logits"
datatype = "FP32"
shape = [-1, 1000]
kind = "logits"
"""
NETS: dict[str, tuple[str, str]] = {
    "bert-base": (_TEXT.format(blocks=12), _TEXT_TOML.format(length=128)),
    "bert-base-free": (_TEXT.format(blocks=12), _TEXT_TOML.format(length='"length=2..128"')),
    "bert-4": (_TEXT.format(blocks=4), _TEXT_TOML.format(length=128)),
    "bert-4-free": (_TEXT.format(blocks=4), _TEXT_TOML.format(length='"length=2..128"')),
    "vit-b": (_PICTURES, _PICTURES_TOML),
}


class Stages:
    """Processor seconds from each sentence of a conversion to the next, and what it says of proofs that failed."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.missed: list[str] = []
        self._stage, self._since = "start", _processor()

    def show(self, sentence: str) -> None:
        now = _processor()
        if "is not equal" in sentence:
            self.missed.append(sentence)
        self.spent[self._stage] = round(self.spent.get(self._stage, 0.0) + now - self._since, 2)
        self._stage, self._since = " ".join(sentence.split()[:3]), now


def _processor() -> float:
    return sum(os.times()[:4])


def measured(name: str, level: str, form: str) -> dict[str, Any]:
    """One conversion in this process."""
    stages, begun = Stages(), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        version = _conversion(name, level, form, Path(scratch))(stages.show)
        facts = version.manifest["forms"]
        outcome = {form: f"{one.get('half_nodes')}/{one.get('nodes')}" for form, one in facts.items()}
    stages.show("end")
    return {
        "net": name,
        "processor_s": round(sum(stages.spent.values()), 1),
        "wall_s": round(time.perf_counter() - begun, 1),
        "status": version.status,
        "half": outcome,
        "stages": stages.spent,
        "missed": stages.missed,
    }


def _conversion(name: str, level: str, form: str, folder: Path) -> Callable[[Callable[[str], None]], Any]:
    from halfeven.exporters.conversion.convert import Options, convert
    from halfeven.models.store.store import Store

    if name in CORPUS:
        return lambda show: converted("program", name, folder, notify=show)
    source, toml = NETS[name]
    (folder / "model.py").write_text(source)
    (folder / "model.toml").write_text(toml)
    forms = ("torch", "onnx") if form == "both" else (form,)
    return lambda show: convert(folder, Store(folder / "store"), Options(forms, level), show).version


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.conversion_cost")
    parser.add_argument("nets", nargs="*", default=list(LARGE), metavar="NET")
    parser.add_argument("--level", default="O1")
    parser.add_argument("--form", default="both", choices=("both", "torch", "onnx"))
    parser.add_argument("--limit", type=float, default=240.0, help="processor seconds of one net")
    parser.add_argument("--out", type=Path, help="results.json")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    nets = [one for name in asked.nets for one in (SMALL if name == "small" else (name,))]
    if asked.here:
        print(json.dumps(measured(nets[0], asked.level, asked.form)))
        return 0
    rows = list[dict[str, Any]]()
    for name in nets:
        command = [sys.executable, "-m", "tests.benchmarks.conversion_cost", "--here", name]
        command += ["--level", asked.level, "--form", asked.form]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1))
    return int(any(row["processor_s"] > asked.limit for row in rows))


if __name__ == "__main__":
    sys.exit(main())
