"""Guesses the model.toml of what only a child may open: an exported program, a transformers folder, a module."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...models.capture.capture import describe
from ...models.errors import BadFolder
from ...models.files.tensor_file import save_tensors
from ...models.spec.batch_axis import array_batch_first
from ...models.spec.datatypes import DATATYPES, name_of
from ...models.spec.spec import Dim, ModelSpec, TensorSpec
from ..inputs.samples import TARGET, as_fp32, check_in_fp32
from .batch_size import fitting_rows
from .guess import Guess

_EXAMPLES = 8
_ROWS = 2  # of a sample of a model that is not batched
_LARGE = 256 << 20  # bytes


def guess_module(
    folder: Path,
    source: str,
    name: str,
    samples: Mapping[str, np.ndarray] | None = None,
    weights: str | None = None,
    module: nn.Module | None = None,
) -> Guess:
    """``source`` and ``weights`` as model.toml writes them; ``samples``: example inputs, which ``file.py:function``
    needs and a transformers folder may have. ``module``: as in `ModelFolder`.

    Raises CaptureFailed where the code cannot be run, BadFolder for a dtype that is not served.
    """
    samples, widened = (None, []) if samples is None else _in_fp32(samples, module)
    with tempfile.TemporaryDirectory(prefix="halfeven-init-") as scratch:
        file = Path(scratch) / "samples.safetensors"
        if samples is not None:
            save_tensors(file, _examples(samples))
        state = str(folder / weights) if weights else None
        names = [key for key in samples or () if not key.startswith(TARGET)]
        found = describe(folder, source, names, file, state, module)
    rows, fewer = fitting_rows(found.get("row_bytes", 0), found["max_batch_size"])
    spec = ModelSpec(
        name,
        tuple(_tensor(entry, folder / source) for entry in found["inputs"]),
        tuple(_tensor(entry, folder / source) for entry in found["outputs"]),
        max_batch_size=rows,
    )
    doubts = {(tensor.name, "kind"): "by its name" for tensor in spec.outputs if tensor.kind != "tensor"}
    for tensor, key, why in [*found["doubts"], *([["", "max_batch_size", fewer]] if fewer else [])]:
        doubts[tensor, key] = "; ".join(filter(None, (doubts.get((tensor, key)), why)))
    given, dropped = (None, []) if samples is None else _as_samples(samples, spec, found.get("whole", False))
    notes = tuple(
        f"output '{output}' is left out: {kind} is no tensor; where callers need what is in it, let source build a "
        "module around the model that gives its tensors"
        for output, kind in found.get("left_out", {}).items()
    )
    return Guess(spec, source, doubts, (*widened, *dropped, *notes), weights, given)


def _in_fp32(
    samples: Mapping[str, np.ndarray], module: nn.Module | None
) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """The samples with inputs in half as FP32, because the original is in FP32, and a note on each. Inputs in FP64 are
    converted too, where the module is there and has no weight in FP64. Raises BadSamples for a number beyond FP32."""
    floats = {"FP16", "BF16"}
    if module is not None and not any(one.dtype == torch.float64 for one in module.state_dict().values()):
        floats |= {"FP64"}
    changed, notes = dict(samples), list[str]()
    for name, array in samples.items():
        given = name_of(array.dtype)
        if given in floats and not name.startswith(TARGET):
            changed[name] = as_fp32(array, "FP32")
            check_in_fp32(name, changed[name], "FP32")
            notes.append(f"the samples of '{name}' were {given} and are converted to FP32: callers send FP32")
    return changed, notes


def _examples(samples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The samples that the module is run with: all of them, or the first `_EXAMPLES` where they are large. Their batch
    axis is not known yet."""
    large = sum(array.nbytes for array in samples.values()) > _LARGE
    return {
        key: np.asarray(array[:_EXAMPLES] if large else array, order="C") for key, array in samples.items()
    }


def _as_samples(
    samples: Mapping[str, np.ndarray], spec: ModelSpec, whole: bool
) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """The samples in the layout of samples.safetensors, and a note on what is left out of them. ``whole``: the given
    arrays together are one sample. Otherwise each sample of a model that is not batched gets two rows or more: from a
    sample with one row the capture would take 1 for a fixed size.
    """
    axes = {tensor.name: tensor.batch_axis for tensor in spec.inputs}
    if spec.batched:
        return {name: array_batch_first(array, axes.get(name, 0)) for name, array in samples.items()}, []
    count = min(len(samples[name]) if samples[name].ndim else 1 for name in axes)
    lengths = {samples[name].shape[:1] for name in axes}
    with_rows = {f"{TARGET}{one.name}" for one in spec.outputs if one.shape and not one.shape[0].fixed}
    targets = {name for name in with_rows & samples.keys() if samples[name].shape[:1] in lengths}
    kept = {name: array for name, array in samples.items() if name in axes or name in targets}
    notes = [
        f"'{name}' is left out of the samples: expected as many rows as the inputs have, of an output with rows"
        for name in samples
        if name not in kept
    ]
    if whole or count < 2 * _ROWS:
        return {name: array[None] for name, array in kept.items()}, notes
    rows = max(_ROWS, count // _EXAMPLES)
    each = count // rows
    if rest := count - each * rows:
        notes.append(f"the samples are {each} with {rows} rows: the last {rest} of {count} are left out")
    return {
        name: array[: each * rows].reshape(each, rows, *array.shape[1:]) for name, array in kept.items()
    }, notes


def _tensor(entry: Mapping[str, Any], where: Path) -> TensorSpec:
    names = {str(datatype.torch): name for name, datatype in DATATYPES.items()}
    if entry["dtype"] not in names:
        advice = ""
        if "complex" in entry["dtype"]:
            advice = "; let forward give torch.view_as_real of it, and take torch.view_as_complex of what it is given"
        raise BadFolder(f"{where}: '{entry['name']}' is of {entry['dtype']}, which is not served: expected one of "
                        f"{', '.join(names)}{advice}")  # fmt: skip
    shape = tuple(Dim.parse(item) for item in entry["shape"])
    kind = "logits" if entry["name"] == "logits" else "tensor"
    return TensorSpec(
        entry["name"], names[entry["dtype"]], shape, kind, batch_axis=entry.get("batch_axis", 0)
    )
