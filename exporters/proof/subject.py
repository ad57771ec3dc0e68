"""The subject of a conversion: an FP32 program, the options for its half, and where both come from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.folder.package import Precision
from ...models.spec.spec import ModelSpec
from ..inputs.samples import Samples
from .prove import Answers

if TYPE_CHECKING:
    from torch.export import ExportedProgram

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class FurtherVerdict:
    """A further judgement of forms that passed the gate (the score of a fine-tuned model): verdict and numbers."""

    passed: bool
    reason: str
    numbers: Mapping[str, Any]


Further = Callable[[Mapping[str, Answers]], FurtherVerdict]  # form → the converted artefact as a function


@dataclass(frozen=True, slots=True)
class Subject:
    """An FP32 program with its weights (None where it is not an exported program), and the options for its half.

    ``source``: the folder whose text is kept with the version, or the text of its model.toml where that is all.
    ``origin``: what the manifest says of where it comes from. ``further`` judges the proven forms once more
    (a fine-tuned model must also be good); where it refuses, the version is kept as refused. ``search``: look
    for kept nodes at O3 too, which otherwise means exactly what was asked; None: at no level. ``device``: the plan asks
    its kernels, and the proof runs on it. ``original_because``: why nothing is made half although it was asked for;
    empty otherwise. ``beside``: files that are kept with the version. ``fp32_outputs``: all that they are computed from
    stays in FP32.
    """

    program: "ExportedProgram | None"
    spec: ModelSpec
    samples: Samples
    precision: Precision
    forms: tuple[str, ...]
    source: Path | str
    origin: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    further: Further | None = None
    search: bool | None = False
    device: str = CPU
    original_because: str = ""
    beside: Sequence[Path] = ()
    fp32_outputs: frozenset[str] = frozenset()

    def served_original(self, because: str) -> "Subject":
        """This subject with no node in half, for the reason ``because``."""
        return replace(self, precision=replace(self.precision, level="O0"), original_because=because)

    @property
    def exported(self) -> "ExportedProgram":
        """The program, of a subject that has one."""
        assert self.program is not None
        return self.program
