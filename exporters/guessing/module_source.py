"""Guesses the model.toml of what only a child may open: an exported program, a transformers folder, a module."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ...models.batch_axis import array_batch_first
from ...models.capture.capture import Limits, describe
from ...models.datatypes import DATATYPES
from ...models.errors import BadFolder
from ...models.spec import Dim, ModelSpec, TensorSpec
from .given_samples import laid_out
from .guess import Guess

_EXAMPLES = 8
_LARGE = 256 << 20  # bytes


def guess_module(
    folder: Path,
    source: str,
    name: str,
    samples: Mapping[str, np.ndarray] | None = None,
    weights: str | None = None,
) -> Guess:
    """``source`` and ``weights`` as model.toml writes them; ``samples``: example inputs, which ``file.py:function``
    needs.

    Raises CaptureFailed where the code cannot be run, BadFolder for a dtype that is not served.
    """
    with tempfile.TemporaryDirectory(prefix="halfeven-init-") as scratch:
        file = Path(scratch) / "samples.safetensors"
        if samples is not None:
            save_file(_examples(samples), file)
        state = str(folder / weights) if weights else None
        found = describe(folder, source, list(samples or ()), file, Limits(), state)
    spec = ModelSpec(
        name,
        tuple(_tensor(entry, folder / source) for entry in found["inputs"]),
        tuple(_tensor(entry, folder / source) for entry in found["outputs"]),
        max_batch_size=found["max_batch_size"],
    )
    doubts = {(tensor.name, "kind"): "by its name" for tensor in spec.outputs if tensor.kind != "tensor"}
    doubts |= {(tensor, key): why for tensor, key, why in found["doubts"]}
    given = None if samples is None else _as_samples(samples, spec, found["whole"])
    notes = tuple(
        f"output '{output}' is left out: {kind} is no tensor; where callers need what is in it, let source build a "
        "module around the model that gives its tensors"
        for output, kind in found.get("left_out", {}).items()
    )
    return Guess(spec, source, doubts, notes, weights, given)


def _examples(samples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The samples, or the first of them where they are large; which of their axes is the batch is not known yet."""
    large = sum(array.nbytes for array in samples.values()) > _LARGE
    return {
        key: np.asarray(array[:_EXAMPLES] if large else array, order="C") for key, array in samples.items()
    }


def _as_samples(samples: Mapping[str, np.ndarray], spec: ModelSpec, whole: bool) -> Mapping[str, np.ndarray]:
    """As samples.safetensors has them. ``whole``: all that was given is one sample."""
    if whole:
        return {name: array[None] for name, array in samples.items()}
    axes = {tensor.name: tensor.batch_axis for tensor in spec.inputs}
    return laid_out(
        {name: array_batch_first(array, axes.get(name, 0)) for name, array in samples.items()}, spec
    )


def _tensor(entry: Mapping[str, Any], where: Path) -> TensorSpec:
    names = {str(datatype.torch): name for name, datatype in DATATYPES.items()}
    if entry["dtype"] not in names:
        raise BadFolder(f"{where}: '{entry['name']}' is of {entry['dtype']}, which is not served: expected one of "
                        f"{', '.join(names)}")  # fmt: skip
    shape = tuple(Dim.parse(item) for item in entry["shape"])
    kind = "logits" if entry["name"] == "logits" else "tensor"
    return TensorSpec(
        entry["name"], names[entry["dtype"]], shape, kind, batch_axis=entry.get("batch_axis", 0)
    )
