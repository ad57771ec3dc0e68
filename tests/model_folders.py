"""Small model folders, written where a test wants them.

from tests.model_folders import samples_of, tensor, write_folder

folder = write_folder(tmp_path / "net", LINEAR, max_batch_size=8, precision={"level": "O3"})
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

LINEAR = """
import torch
from torch import nn

def build():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
"""


def tensor(name: str, datatype: str, shape: Sequence[int | str], **more: Any) -> dict[str, Any]:
    """One entry of ``[[inputs]]`` or ``[[outputs]]``."""
    return {"name": name, "datatype": datatype, "shape": list(shape), **more}


def write_folder(
    path: Path,
    source_code: str = LINEAR,
    /,
    *,
    inputs: Sequence[Mapping[str, Any]] = (tensor("x", "FP32", [-1, 4]),),
    outputs: Sequence[Mapping[str, Any]] = (tensor("y", "FP32", [-1, 3]),),
    samples: Mapping[str, np.ndarray] | None = None,
    weights: Mapping[str, torch.Tensor] | str | None = None,
    files: Mapping[str, str] | None = None,
    extra_toml: str = "",
    **settings: Any,
) -> Path:
    """A model folder at ``path`` (its name is the model's, unless ``name=``).

    ``settings`` are keys of model.toml: a plain value stands at the top, a dictionary becomes a table
    (``precision={"level": "O3"}``). ``extra_toml`` is put at the end as it is. ``files``: other text files
    by name. ``samples`` and ``weights`` become safetensors files; ``weights`` as a string is the key's value.
    """
    path.mkdir(parents=True, exist_ok=True)
    settings = {"name": path.name, "source": "model.py:build", **settings}
    if isinstance(weights, str):
        settings["weights"] = weights
    (path / "model.toml").write_text(_toml(settings, inputs, outputs) + extra_toml)
    for name, text in {"model.py": source_code, **(files or {})}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    if samples is not None:
        arrays = {name: np.ascontiguousarray(array) for name, array in samples.items()}
        save_file(arrays, path / "samples.safetensors")
    if isinstance(weights, Mapping):
        save_tensors({name: t.contiguous() for name, t in weights.items()}, path / "weights.safetensors")
    return path


def samples_of(
    shapes: Mapping[str, Sequence[int]], count: int = 8, seed: int | None = None
) -> dict[str, np.ndarray]:
    """Normal FP32 samples: ``shapes`` are those of one sample. A fresh draw, unless ``seed`` is given."""
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal((count, *shape)).astype(np.float32) for name, shape in shapes.items()
    }


def _toml(
    settings: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]
) -> str:
    tables = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {_value(value)}" for key, value in settings.items() if key not in tables]
    for heading, entries in (("[[inputs]]", inputs), ("[[outputs]]", outputs)):
        for entry in entries:
            lines += ["", heading, *(f"{key} = {_value(value)}" for key, value in entry.items())]
    for key, table in tables.items():
        lines += ["", f"[{key}]", *(f"{name} = {_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are TOML words too
    return json.dumps(value)
