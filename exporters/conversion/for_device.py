"""A version of the store converted once more for one device: planned by its kernels and proven on it."""

from dataclasses import replace
from typing import Any

import torch

from ...models.store.store import FOR_DEVICE, LIVE, Store, Version
from ..proof.maker import Notify
from ..torch.forms import ProgramForms
from .retrain import subject_of
from .road import travel


def planned_for(version: Version, store: Store, device: torch.device, notify: Notify) -> Version:
    """The new version: it becomes active where ``version`` is, or where nothing is. Raises CannotConvert, as `travel`.

    Only for a version with a captured program.
    """
    kept = {name: version.manifest[name] for name in ("source", "training") if name in version.manifest}
    origin: dict[str, Any] = {
        **kept,
        "parent": version.number,
        "lineage": {"by": FOR_DEVICE, "device": str(device)},
        "fingerprint": None,
        "awaits_promotion": True,
    }
    subject = replace(subject_of(version), device=str(device), origin=origin)
    made = travel(subject, ProgramForms(subject), store, notify)
    active = store.live_number(version.name)
    if made.status == LIVE and active in (None, version.number):
        store.promote_over(active, made, by=FOR_DEVICE)
    return made
