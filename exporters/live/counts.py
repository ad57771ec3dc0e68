"""The operations of a live model, counted in one run below the autocast layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...models.engines.fp32_islands import HALVES
from ..policy.operations import Counted, Operations
from ..question import Arrays

_CASTS = (torch.ops.aten.to, torch.ops.aten._to_copy)


@dataclass(slots=True)
class Counts:
    """Ops with a floating result, those of them with a half one, and casts between floating dtypes."""

    nodes: int = 0
    half_nodes: int = 0
    casts: int = 0


def count(run: Callable[[], object]) -> Counts:
    """Count the ops of one run; views and copies in the same dtype are no ops."""
    counts = Counts()
    with _Counting(counts):
        run()
    return counts


def module_operations(run: Callable[[], object], inputs: Arrays) -> Operations:
    """The operations of any execution of a module, estimated from ``run``, an execution on ``inputs``."""
    counted = Counted()
    with _Estimating(counted):
        run()
    return counted.estimate(sum(array.size for array in inputs.values()))


class _Estimating(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [value.shape for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        given = [value.shape for value in tree_leaves(result) if isinstance(value, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        self._counted.add(name, read, [] if func.is_view else given)
        return result


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        dtypes = {
            value.dtype
            for value in tree_leaves(result)
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        if not dtypes:
            return result
        if func.overloadpacket in _CASTS:
            self._counts.casts += args[0].is_floating_point() and args[0].dtype not in dtypes
        elif not func.is_view:
            self._counts.nodes += 1
            self._counts.half_nodes += bool(dtypes & set(HALVES))
        return result
