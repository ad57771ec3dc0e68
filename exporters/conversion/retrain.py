"""A new version from new weights: the parent's captured program, precision settings and samples, on the same road.

There is no second capture: fine-tuning changes numbers, not the graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.export import ExportedProgram

from ...models.engines.torch_engine import original_program
from ...models.errors import BadInput, CannotConvert
from ...models.folder.package import Precision
from ...models.order.one_order import one_order
from ...models.store.store import Store, Version
from ..inputs.samples import Samples, stored_samples
from ..proof.maker import Notify
from ..proof.subject import Further, Subject
from ..torch.forms import ProgramForms
from .road import travel


def with_new_weights(
    parent: Version, weights: Path, store: Store, origin: Mapping[str, Any], further: Further, notify: Notify,
    samples: Samples | None = None, beside: Sequence[Path] = (),
) -> Version:  # fmt: skip
    """Convert ``parent`` with other FP32 weights: the version is live (and active, unless ``origin`` has
    ``awaits_promotion``), or kept as refused.

    ``weights`` is a safetensors file with every tensor of the parent. ``origin`` goes into the manifest
    (parent, lineage). ``further`` judges the proven forms and ``original``, the FP32 program, which serves where no
    half is faster. ``samples``: the version's, where they are not its parent's. ``beside``: files that it has too.

    Raises BadInput naming the tensor that does not fit or is not finite, OrderEnded.
    """
    with one_order() as order, order.bounds_this_process(f"the conversion of what was learnt from {parent}"):
        return _retrained(parent, weights, store, origin, further, notify, samples, beside)


def _retrained(
    parent: Version, weights: Path, store: Store, origin: Mapping[str, Any], further: Further, notify: Notify,
    samples: Samples | None, beside: Sequence[Path],
) -> Version:  # fmt: skip
    subject = subject_of(parent)
    subject = replace(subject, samples=samples or subject.samples)
    subject.exported.state_dict.update(_checked(subject.exported, weights))
    kept = {name: parent.manifest[name] for name in ("source", "training") if name in parent.manifest}
    asked = {**kept, "fingerprint": None, **origin}
    maker = ProgramForms(subject)
    subject = replace(
        subject,
        origin=asked,
        beside=beside,
        further=lambda proven: further({**proven, "original": maker.original()}),
    )
    return travel(subject, maker, store, notify)


def subject_of(version: Version) -> Subject:
    """A version of the store as the subject of a conversion, with the forms that were asked for then."""
    spec = version.spec()
    precision = version.read(
        "precision.json",
        lambda plan: Precision(plan["level"], plan["dtype"], tuple(plan["keep"]), plan["embeddings"]),
    )
    return Subject(
        program=original_program(version),
        spec=spec,
        samples=stored_samples(version),
        precision=precision,
        forms=tuple(version.manifest["forms"]),
        source=version.folder / "source",
        origin={},
    )


def _checked(program: ExportedProgram, weights: Path) -> dict[str, torch.Tensor]:
    try:
        state = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise CannotConvert(f"the new weights {weights} cannot be read: {error}") from error
    found: dict[str, torch.Tensor] = {}
    for name, old in program.state_dict.items():
        new = state.get(name)
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            came = "nothing" if new is None else f"{new.dtype} {list(new.shape)}"
            raise BadInput(f"the new weights: '{name}' must be {old.dtype} {list(old.shape)}, got {came}")
        if new.is_floating_point() and not bool(torch.isfinite(new).all()):
            raise BadInput(f"the new weights: '{name}' holds NaN or infinite values; the training diverged")
        is_parameter = isinstance(old, torch.nn.Parameter)
        found[name] = torch.nn.Parameter(new, requires_grad=False) if is_parameter else new
    return found
