"""Generated samples for models whose integers are found to be smaller than usual: by the model itself, or by trying."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ...models.errors import BadSamples, HalfevenError
from ...models.spec.spec import ModelSpec
from ..inputs.samples import Samples
from ..inputs.synthetic import generate

GENERATED = 32
# Ranges (least, largest) of generated integers, tried in this order if the model fails with the usual range.
SMALLER_IDS = ((0, 31), (0, 7), (1, 1), (0, 0))
T = TypeVar("T")


def with_smaller_integers(
    spec: ModelSpec,
    samples: Samples,
    attempt: Callable[[Samples, tuple[int, int] | None], T],
    failed: type[HalfevenError],
) -> T:
    """The result of ``attempt`` on the samples. If ``attempt`` raises ``failed`` and the samples were generated, it is
    called again on samples with smaller integers (`SMALLER_IDS`): a generated integer may be an index beyond a small
    table, a start or a size. ``attempt`` gets the samples and the range of all integers (None: as they were)."""
    try:
        return attempt(samples, None)
    except failed:
        if samples.source != "generated" or all(tensor.type.is_float for tensor in spec.inputs):
            raise
        for ids in SMALLER_IDS:
            with suppress(failed):
                return attempt(generate(spec, GENERATED, ids=ids), ids)
        raise


def range_of(ids: tuple[int, int]) -> str:
    low, high = ids
    return f"{low}" if low == high else f"{low} to {high}"


def in_range(samples: Samples, asked: ModelSpec, exact: ModelSpec) -> Samples:
    """The samples, checked against the ranges that were found; generated ones are made again within them."""
    if [tensor.range for tensor in asked.inputs] == [tensor.range for tensor in exact.inputs]:
        return samples
    if samples.source == "generated":
        return generate(exact, GENERATED)
    exact.check_values([samples.arrays[tensor.name] for tensor in exact.inputs], BadSamples)
    return samples
