"""A model folder whose code is captured, or whose program is given, made ready for the road."""

from collections.abc import Mapping
from typing import Any

from ...models.capture.capture import capture
from ...models.errors import CaptureFailed
from ...models.folder.package import ModelFolder
from ..inputs.samples import Samples
from ..proof.subject import Subject
from ..torch.forms import ProgramForms
from .generated import in_range, with_smaller_integers


def captured_subject(
    asked: ModelFolder,
    samples: Samples,
    origin: Mapping[str, Any],
    forms: tuple[str, ...],
    search: bool | None,
    device: str,
) -> tuple[Subject, ProgramForms]:
    """The captured program with its forms. Only the capture finds the size of a table, which the generated samples may
    exceed. Raises as `capture` does."""
    captured = with_smaller_integers(
        asked.spec, samples, lambda tried, _: capture(asked, tried.arrays), CaptureFailed
    )
    subject = Subject(
        program=captured.program,
        spec=captured.spec,
        samples=in_range(samples, asked.spec, captured.spec),
        precision=asked.precision,
        forms=forms,
        source=asked.guessed or asked.folder,
        origin=origin,
        notes=(*asked.notes, *captured.notes),
        search=search,
        device=device,
    )
    return subject, ProgramForms(subject)
