"""The numbers of a spec that a batcher checks every request against, computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ...models.spec.datatypes import name_of
from ...models.spec.filled_lengths import Shapes
from ...models.spec.spec import ModelSpec
from .request_queue import Request


@dataclass(frozen=True, slots=True)
class Intake:
    """Replaced as one object when a spec changes, so that no request is checked against two specs.

    A request with more rows than ``batch_rows`` is split, one with more than ``max_rows`` refused. One with up to
    ``plain_rows`` and without terms needs no other check. ``row_bytes``: of all inputs of a row together, 0 where
    shapes differ. ``timeout_ns``: for requests that give none (0: no limit). ``suspicious``: a version with other
    inputs became active once, and requests may come that were checked against the older one.
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
        """The intake of a spec. Where the model is not batched, a request is one execution and counts as one row."""
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
        """The shapes, which requests must share to share a batch, and the bytes; None and 0 where shapes are fixed."""
        if not self.shapes_differ:
            return None, 0
        inner = 1 if self.spec.batched else 0
        return tuple(array.shape[inner:] for array in arrays), sum(array.nbytes for array in arrays)

    def fits(self, arrays: Sequence[np.ndarray]) -> bool:
        """True if the arrays pass the checks of this spec."""
        return len(arrays) == len(self.spec.inputs) and all(
            tensor.fault(array.shape, name_of(array.dtype)) is None
            and (valid is None or valid.fault(array) is None)
            for tensor, array, valid in zip(self.spec.inputs, arrays, self.spec.ranges(arrays), strict=True)
        )

    def part_rows(self, request: Request, limit: int) -> int:
        """The rows of each part of a large request. A request for deterministic answers always gets the same."""
        if request.alone:
            return self.batch_rows
        if most := self.spec.batching.max_batch_bytes:
            limit = min(limit, max(1, most // max(self.row_bytes or request.nbytes // request.rows, 1)))
        return limit
