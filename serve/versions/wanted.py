"""The version of a model in the store that is to be served, before any order about traffic, and its spec for one
load."""

from dataclasses import replace

from ...models.errors import BadInput
from ...models.spec.spec import ModelSpec
from ...models.store.store import Store, Version
from ..batching.interface import LoadConfig


def wanted_version(store: Store, name: str, live: int | None, serves: bool) -> Version | None:
    """The live version; while there is none and nothing ``serves``, the newest one whose half was refused: its FP32
    original serves.

    A version whose weights a gate refused, or that waits for its promotion, never serves, in no precision.
    """
    if live is not None:
        return store.named_by_alias(name, live)
    if serves:
        return None
    for number in reversed(store.numbers(name)):
        version = store.version(name, number)
        gate = version.manifest.get("gate")
        if not version.awaits_promotion and (gate is None or gate["passed"]):
            return version
    return None


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
