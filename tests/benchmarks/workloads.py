"""The three models that peers are measured with, as model folders, and a store made of them.

    python -m tests.benchmarks.workloads STORE [--level O0] [--form torch] [--queue 1024]

tiny: MLP 64-256-10 (overhead). encoder: 6 × 384 transformer on 32 ids (compute). image: small residual net
on 3×64×64 (payload and compute). Input ``x``, output ``y``, FP32, random weights from seed 0.
"""

import argparse
from pathlib import Path

from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store

SOURCE = """
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocabulary=30522, width=384, heads=12, layers=6, inner=1536, longest=512):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.pos = nn.Embedding(longest, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, inner, dropout=0.0, activation="gelu", batch_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.enc(self.norm(self.tok(x) + self.pos(places))).mean(dim=1)


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.c1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.b1 = nn.BatchNorm2d(after)
        self.c2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.b2 = nn.BatchNorm2d(after)
        same = stride == 1 and before == after
        self.sc = None if same else nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        )

    def forward(self, x):
        around = x if self.sc is None else self.sc(x)
        x = torch.relu(self.b1(self.c1(x)))
        return torch.relu(self.b2(self.c2(x)) + around)


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.body = nn.Sequential(Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2), Block(128, 256, 2))
        self.fc = nn.Linear(256, 100)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).mean(dim=(2, 3)))


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def encoder():
    torch.manual_seed(0)
    return Encoder()


def image():
    torch.manual_seed(0)
    return Image()
"""
WORKLOADS = {
    "tiny": ("FP32", "[-1, 64]", "[-1, 10]"),
    "encoder": ("INT64", "[-1, 32]", "[-1, 384]"),
    "image": ("FP32", "[-1, 3, 64, 64]", "[-1, 100]"),
}


def write_folder(target: Path, name: str, form: str, level: str, queue: int = 1024) -> Path:
    """One workload as a model folder; at most ``queue`` requests wait."""
    datatype, inner, outer = WORKLOADS[name]
    folder = target / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(SOURCE)
    (folder / "model.toml").write_text(
        f'name = "{name}"\nsource = "model.py:{name}"\nform = "{form}"\nmax_batch_size = 32\n'
        f'[[inputs]]\nname = "x"\ndatatype = "{datatype}"\nshape = {inner}\n'
        f'[[outputs]]\nname = "y"\ndatatype = "FP32"\nshape = {outer}\n'
        f'[precision]\nlevel = "{level}"\n[batching]\nmax_queue_size = {queue}\n'
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--level", default="O0", help="O0 serves FP32; mixed_bfloat16 lets auto choose bf16")
    parser.add_argument("--form", default="torch")
    parser.add_argument("--queue", type=int, default=1024, help="max_queue_size")
    asked = parser.parse_args()
    forms = ("torch", "onnx") if asked.form == "auto" else (asked.form,)
    for name in WORKLOADS:
        folder = write_folder(asked.store / "folders", name, asked.form, asked.level, asked.queue)
        done = convert(folder, Store(asked.store), Options(forms=forms), print)
        print(done.version, done.facts["status"], done.facts["reason"])


if __name__ == "__main__":
    main()
