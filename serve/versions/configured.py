"""A version's spec with the settings of one load (Triton's load with a ``config``)."""

from dataclasses import replace

from ...models.errors import BadInput
from ...models.spec import ModelSpec
from ..batching.interface import LoadConfig


def configured(spec: ModelSpec, config: LoadConfig | None) -> ModelSpec:
    """The spec with the settings of ``config``. Raises BadInput for one that the version cannot have."""
    if not config:
        return spec
    rows = config.get("max_batch_size", spec.max_batch_size)
    if rows == 0 and spec.batch_axes:  # as the model's own config says to Triton's clients
        rows = spec.max_batch_size
    if rows > spec.max_batch_size or (rows < 1 and spec.batched):
        raise BadInput(
            f"max_batch_size of '{spec.name}' was proven from 1 to {spec.max_batch_size}, got {rows}; more needs a "
            "new conversion with a larger max_batch_size in model.toml"
        )
    batching = replace(
        spec.batching,
        max_queue_delay_us=config.get("max_queue_delay_us", spec.batching.max_queue_delay_us),
        max_queue_size=config.get("max_queue_size", spec.batching.max_queue_size),
    )
    return replace(spec, max_batch_size=rows, batching=batching)
