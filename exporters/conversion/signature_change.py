"""Says in words for callers how the signature of a model's new version differs from that of its last version."""

from ...models.errors import BadInput
from ...models.spec.spec import ModelSpec, TensorSpec
from ...models.store.store import Version


def check_signature(spec: ModelSpec, newest: Version | None, may_change: bool = False) -> None:
    """Raises BadInput where the newest version of the model has other inputs or outputs."""
    if newest is None or may_change or not (changed := signature_change(newest.spec(), spec)):
        return
    raise BadInput(
        f"'{spec.name}' has changed its signature since {newest}, so its callers would break: {changed}; give "
        "--new-signature to publish it nevertheless, or another name (--name NAME for a bare file)"
    )


def signature_change(old: ModelSpec, new: ModelSpec) -> str:
    """Each difference of the two signatures (`ModelSpec.signature`), the old side first; empty where there is none."""
    if old.signature() == new.signature():
        return ""
    found = []
    if old.batched != new.batched:
        found.append("batched became not batched" if old.batched else "not batched became batched")
    sides = (("input", old.inputs, new.inputs), ("output", old.outputs, new.outputs))
    for kind, mine, others in sides:
        found += _changes(kind, {t.name: _shown(t) for t in mine}, {t.name: _shown(t) for t in others})
    return "; ".join(found) or "the order of inputs or outputs changed"


def _changes(kind: str, old: dict[str, str], new: dict[str, str]) -> list[str]:
    both = [name for name in old if name in new and old[name] != new[name]]
    return [
        *(f"{kind} '{name}': {old[name]} became {new[name]}" for name in both),
        *(f"{kind} '{name}' ({old[name]}) is gone" for name in old if name not in new),
        *(f"{kind} '{name}' ({new[name]}) is new" for name in new if name not in old),
    ]


def _shown(tensor: TensorSpec) -> str:
    """The tensor as callers see it on the wire: its datatype, sizes and batch axis."""
    sizes = ",".join(map(str, tensor.wire_shape))
    wire = "" if tensor.wire is None else f" as {tensor.wire}"
    axis = f", batch on axis {tensor.batch_axis}" if tensor.batch_axis else ""
    return f"{tensor.datatype} [{sizes}]{wire}{axis}"
