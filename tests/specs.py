"""Tensors of a model's spec, as `model.toml` writes them."""

from typing import Any

from halfeven.models.spec.spec import Dim, TensorSpec


def tensor(name: str, datatype: str, *shape: int | str, **more: Any) -> TensorSpec:
    """``more``: further fields, such as ``kind``."""
    return TensorSpec(name, datatype, tuple(Dim.parse(size) for size in shape), **more)
