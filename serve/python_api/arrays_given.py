"""Arrays as a caller of the Python API has them (numpy's or torch's), and as all else takes them (numpy's)."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...exporters.inputs.samples import TARGET
from ...models.errors import BadInput, BadSamples, BadSetting
from ...models.files.tensor_file import save_tensors
from ...models.spec.datatypes import DATATYPES, name_of
from ...models.store.store import Store
from ..versions.versions_in_store import store_at

Given: TypeAlias = Any  # a numpy array, a torch tensor, or what numpy makes an array of
Arrays: TypeAlias = dict[str, np.ndarray]


def given_store(given: object) -> Store:
    """The store that the caller named. Raises BadSetting for what is no path of one: a misspelt one would be served
    without a model."""
    if not isinstance(given, str | os.PathLike):
        raise BadSetting(
            f"expected a half, as halfeven.convert gives it, or the path of a store, got {type(given).__name__}"
        )
    if not (folder := Path(given)).is_dir():
        raise BadSetting(f"there is no store {folder}: `save` of a half, or `halfeven convert`, makes one")
    return store_at(folder)


def is_tensor(value: Any) -> bool:
    """True if the value is torch's. Where torch was never imported, no value is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_numpy(value: Given, name: str = "") -> np.ndarray:
    """C-contiguous; a tensor's numbers are copied from its device where they are not on the CPU. Raises BadInput, which
    names the tensor, for what is no array of numbers or truth values."""
    try:
        array = _dense(value) if is_tensor(value) else np.asarray(value, order="C")
    except (ValueError, TypeError, RuntimeError) as error:
        raise _no_numbers(name, type(value).__name__, str(error).partition("\n")[0]) from None
    if name_of(array.dtype) not in DATATYPES:
        raise _no_numbers(name, type(value).__name__, f"its datatype is {array.dtype}")
    return array


def _dense(tensor: Any) -> np.ndarray:
    from ...models.engines.arrays import to_numpy

    return to_numpy(tensor.detach().cpu().contiguous())


def _no_numbers(name: str, came: str, why: str) -> BadInput:
    which = f"tensor '{name}'" if name else "an array"
    return BadInput(
        f"{which}: expected numbers or truth values, every row of one shape (pad rows that are shorter); got {came}: "
        f"{why}"
    )


def by_name(
    names: list[str], given: tuple[Given, ...], named: Mapping[str, Given], what: str
) -> dict[str, Given]:
    """The inputs of a call by name. They were given in order, by name, or as one dictionary. Raises BadInput."""
    if len(given) == 1 and isinstance(given[0], Mapping) and not named:
        return dict(given[0])
    if len(given) > len(names) or not set(names[: len(given)]).isdisjoint(named):
        raise BadInput(
            f"{what} takes the inputs {', '.join(names)}, each once: got {len(given)} in order "
            f"and {sorted(named)} by name"
        )
    return dict(zip(names, given, strict=False)) | dict(named)


def rows_in(file: Path, inputs: Mapping[str, Given], targets: Mapping[str, Given]) -> Arrays:
    """Write inputs and targets as samples and training rows have them; gives them by their names in the file."""
    named = dict(inputs) | {TARGET + name: value for name, value in targets.items()}
    if odd := [name for name in inputs if not isinstance(name, str)]:
        raise BadSamples(f"samples: expected the name of an input (a string) as each key, got {odd[0]!r}")
    arrays = {name: as_numpy(value, name) for name, value in named.items()}
    if empty := [name for name, array in arrays.items() if array.ndim and not len(array)]:
        raise BadSamples(f"tensor '{empty[0]}': expected at least one row, got none (first axis = samples)")
    save_tensors(file, {name: np.ascontiguousarray(array) for name, array in arrays.items()})
    return arrays
