"""A Triton model repository and TorchServe archives, written where a test wants them."""

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import ModelProto

MODEL_FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)
"""


def triton_model(folder: Path, config: str | None, versions: Mapping[str, ModelProto]) -> Path:
    """A model of a repository: its folder's name is its name."""
    for number, model in versions.items():
        (folder / number).mkdir(parents=True)
        onnx.save(model, folder / number / "model.onnx")
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


def archive(path: Path, files: Mapping[str, bytes | str], **model: Any) -> Path:
    """A ``.mar`` as torch-model-archiver packs it; ``model`` are the manifest's keys."""
    manifest = {
        "createdOn": "23/11/2026 08:00:00",
        "runtime": "python",
        "model": {"modelName": path.stem, **model},
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("MAR-INF/MANIFEST.json", json.dumps({**manifest, "archiverVersion": "0.12.0"}))
        for name, data in files.items():
            packed.writestr(name, data)
    return path


def saved(thing: Any) -> bytes:
    """The bytes that torch.save writes for an object."""
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()
