"""The sizes that a model's batches have, where they are filled up to fixed ones."""

from .spec import ModelSpec


def buckets_of(spec: ModelSpec, device: str) -> tuple[int, ...]:
    """The sizes in rows, ascending, that this model's batches have on this device; empty where any size does."""
    asked, most = spec.batching.buckets, spec.max_batch_size
    if asked == "auto":
        asked = tuple(2**power for power in range(most.bit_length())) if device.startswith("cuda") else ()
    if not spec.batched or not asked:
        return ()
    return (*[rows for rows in asked if rows < most], most)  # a load may have lowered the most
