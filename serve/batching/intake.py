"""What a batcher's door reads off a spec, once: plain numbers that every request is held against."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ...models.datatypes import name_of
from ...models.spec import ModelSpec
from .request_queue import Request, Shapes


@dataclass(frozen=True, slots=True)
class Intake:
    """Replaced as one when a spec changes, so that the door never mixes two.

    ``batch_rows``: more are split, more than ``max_rows`` refused; up to ``plain_rows`` there is nothing to be
    thought of where a caller has no terms. ``row_bytes``: of all inputs together, 0 where shapes differ.
    ``timeout_ns``: for requests that name none, 0 for ever. ``suspicious``: a version with other inputs became active
    once, and requests may come that were checked against the older one.
    """

    spec: ModelSpec
    max_rows: int
    batch_rows: int
    plain_rows: int
    row_bytes: int
    shapes_differ: bool
    timeout_ns: int
    suspicious: bool

    @classmethod
    def of(cls, spec: ModelSpec, suspicious: bool = False) -> "Intake":
        """Not batched: one request is one execution, its rows count as one."""
        inner = [t.shape[1:] if spec.batched else t.shape for t in spec.inputs]
        differ = any(not dim.fixed for shape in inner for dim in shape)
        sizes = [prod(dim.minimum for dim in shape) for shape in inner]
        row_bytes = sum(n * t.type.numpy.itemsize for n, t in zip(sizes, spec.inputs, strict=True))
        timeout_ns = spec.batching.timeout_ms * 1_000_000
        batch_rows = max(spec.max_batch_size, 1)
        plain = not suspicious and not timeout_ns and (spec.batched or not differ)
        return cls(
            spec,
            max_rows=spec.max_request_rows if spec.batched else 1,
            batch_rows=batch_rows,
            plain_rows=batch_rows if plain else 0,
            row_bytes=0 if differ else row_bytes,
            shapes_differ=differ,
            timeout_ns=timeout_ns,
            suspicious=suspicious,
        )

    def measured(self, arrays: Sequence[np.ndarray]) -> tuple[Shapes | None, int]:
        """What decides who may share a batch, and the bytes; None and 0 where nothing differs."""
        if not self.shapes_differ:
            return None, 0
        inner = 1 if self.spec.batched else 0
        return tuple(array.shape[inner:] for array in arrays), sum(array.nbytes for array in arrays)

    def fits(self, arrays: Sequence[np.ndarray]) -> bool:
        """Whether checked arrays were checked against this spec, or might have been."""
        return len(arrays) == len(self.spec.inputs) and all(
            tensor.fault(array.shape, name_of(array.dtype)) is None
            and (tensor.range is None or tensor.range.fault(array) is None)
            for tensor, array in zip(self.spec.inputs, arrays, strict=True)
        )

    def part_rows(self, request: Request, limit: int) -> int:
        """How large the parts of a large request are. Who wants one shape always gets one."""
        if request.alone:
            return self.batch_rows
        if most := self.spec.batching.max_batch_bytes:
            limit = min(limit, max(1, most // max(self.row_bytes or request.nbytes // request.rows, 1)))
        return limit
