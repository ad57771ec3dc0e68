"""Forward and backward passes over a batch, the undoing of a pass that made a buffer not finite, and the search for the
rows that did. Needs torch alone."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from .emulated_half import emulated_context
from .ranks import ALONE, Ranks
from .recurrent import recurrent_context
from .saturation import Saturation
from .setting_names import EMULATED, most_quarantined
from .training_terms import (
    DTYPES,
    NO_ROWS,
    NON_FINITE_BUFFER,
    NON_FINITE_LOSS,
    Settings,
    Stopped,
)

LossOf = Callable[[Tensor], Tensor]
PartsOf = Callable[[Tensor], Sequence[Tensor]]


NO_GRADIENT = (
    "the loss does not depend on any parameter that learns, so there is no gradient. Does forward run under "
    "torch.no_grad or inference_mode, or detach what it computes? Take that out of the model's code, and convert again"
)
IsBad = Callable[[Tensor], bool]  # whether a pass over these rows alone makes the loss or a buffer not finite


def whole(batch: Tensor) -> Sequence[Tensor]:
    """A batch in one part."""
    return [batch]


@dataclass(frozen=True)
class Passed:
    """The mean ``loss`` of a batch, the ``scale`` of its gradients, and the fault of the loss or of a buffer (None: no
    fault)."""

    loss: float
    scale: float
    cause: str | None


@dataclass
class Passes:
    """Forward and backward passes over a batch, part by part; where there are several ``ranks``, over the parts of this
    one. ``good``: rows of the last step that was taken; ``batch``: those of the last step.

    ``runs_ahead``: the host runs ahead of the device, and each number that it reads makes it wait; so it reads one time
    for a batch. ``meanwhile`` is called before that, while the device computes.
    """

    module: nn.Module
    loss_of: LossOf
    parts_of: PartsOf
    scaler: torch.amp.GradScaler
    settings: Settings
    kind: str
    sound: set[str]
    ranks: Ranks = ALONE
    good: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    batch: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    meanwhile: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.runs_ahead = self.kind != "cpu"
        self._saturation = Saturation()

    def run(self, batch: Tensor) -> Passed:
        """Gradients are added up in the parameters; those of a loss that is not finite are of no use."""
        if len(batch) < min(2, self.settings.batch_size):
            return Passed(math.nan, self.scaler.get_scale(), NO_ROWS)
        total = torch.zeros((), device=self.kind)
        # Made here: this process may have no part of the first batch.
        scale = self.scaler.scale(torch.ones((), device=self.kind))
        for part in self.ranks.share(self.parts_of(batch)):
            with self.forward_context():
                loss = self.loss_of(part) * (part.numel() / len(batch))
            if not loss.requires_grad:
                raise Stopped("USER_CODE", NO_GRADIENT)
            total = total + loss.detach()
            if not self.runs_ahead and not is_finite(total):
                break
            with self.backward_context():
                self.scaler.scale(loss).backward()
        total, sound = self.ranks.agree(total, self.buffers_are_finite())
        self.meanwhile()
        loss, is_sound, scaled = torch.stack([total.double(), sound.double(), scale.double()]).tolist()
        if not is_finite(loss):
            return Passed(loss, scaled, NON_FINITE_LOSS)
        return Passed(loss, scaled, None if is_sound else NON_FINITE_BUFFER)

    def forward_context(self, precision: str | None = None) -> AbstractContextManager[None]:
        """Around a forward: in the precision of the training, or in another one."""
        return autocast_of(self._settings_in(precision), self.kind, self.module, self._saturation)

    def forward_again(self) -> AbstractContextManager[None]:
        """Around a forward that is run again without its loss: nothing is learnt of it about the loss."""
        return autocast_of(self.settings, self.kind, self.module)

    def backward_context(self, precision: str | None = None) -> AbstractContextManager[Any]:
        return emulated_context(self._settings_in(precision), self.kind)

    def _settings_in(self, precision: str | None) -> Settings:
        return self.settings if precision is None else replace(self.settings, precision=precision)

    def culprits(self, batch: Tensor) -> Tensor:
        """The rows that spoil the loss or a buffer. Parameters, buffers and random numbers are as before."""
        with torch.random.fork_rng(), torch.no_grad():
            return culprits(self.spoils, batch, self.good)

    def spoils(self, rows: Tensor) -> bool:
        before = snapshot(self.module)
        with self.forward_context():
            losses = [self.loss_of(part) for part in self.parts_of(rows)]
        spoilt = not all(map(is_finite, losses)) or not self.buffers_are_finite()
        restore(before)
        return spoilt

    def buffers_are_finite(self) -> Tensor:
        """A boolean tensor of no axes: true if all buffers that were finite at first still are."""
        named = self.module.named_buffers()
        buffers = [
            one for name, one in named if name in self.sound and one.is_floating_point() and one.numel()
        ]
        if not buffers:
            return torch.ones((), dtype=torch.bool, device=self.kind)
        return get_total_norm(buffers, math.inf).isfinite()  # of all their numbers, the largest


class Quarantine:
    """The rows that are left out in the training of a file of so many ``rows``; of these ``left_out`` were left out
    already when the file was read, and count too. Raises Stopped where they become too many."""

    def __init__(self, rows: int, left_out: int = 0) -> None:
        self.rows = torch.empty(0, dtype=torch.int64)
        self.most, self._left_out = most_quarantined(rows) - left_out, left_out

    def kept(self, batch: Tensor) -> Tensor:
        return batch[~torch.isin(batch, self.rows)] if len(self.rows) else batch

    def take(self, rows: Tensor) -> tuple[int, ...]:
        self.rows = torch.cat([self.rows, rows])
        if len(self.rows) > self.most:
            already = f" beside the {self._left_out} that could not be learnt from" if self._left_out else ""
            raise Stopped(
                "TOO_MANY_QUARANTINED",
                f"{len(self.rows)} rows make the loss or a buffer not finite, and at most {self.most} are left "
                f"out{already}. "
                "Look for extreme values in the data, train in bf16 or fp32, or lower the learning rate.",
            )
        return tuple(rows.tolist())


@contextmanager
def autocast_of(
    settings: Settings, device: str, module: nn.Module, saturation: Saturation | None = None
) -> Iterator[None]:
    """The autocast of a job's precision around a forward of ``module`` and its loss: off in fp32, and where the model
    itself is in half (O2). A sigmoid before the loss is FP32; ``saturation`` knows of the loss whether there is one."""
    precision, kind = settings.precision, torch.device(device).type
    dtype, wanted = DTYPES[precision], precision != "fp32" and settings.opt_level == "O1"
    needs_kernels = wanted and precision != EMULATED
    with (
        torch.amp.autocast(kind, dtype=dtype, enabled=wanted),
        recurrent_context(module, kind, dtype, needs_kernels),
        emulated_context(settings, kind),
        (saturation or Saturation()).followed() if precision != "fp32" else nullcontext(),
    ):
        yield


def is_finite(value: Tensor | float) -> bool:
    """True if a tensor with one element, or a number that was read from one, is finite."""
    return math.isfinite(float(value))  # a fifth of the time of `torch.isfinite`, three times a step


Snapshot = list[tuple[nn.Module, str, Tensor, Tensor]]


def snapshot(module: nn.Module) -> Snapshot:
    """Every buffer: its owner, its name, the tensor itself and its values."""
    owners = [(owner, name) for owner in module.modules() for name in owner._buffers]
    found = [(owner, name, owner._buffers[name]) for owner, name in owners]
    return [(owner, name, buffer, buffer.clone()) for owner, name, buffer in found if buffer is not None]


def restore(before: Snapshot) -> None:
    """Undo what a forward did to the buffers, in place or by putting another tensor there."""
    with torch.no_grad():
        for owner, name, buffer, values in before:
            owner._buffers[name] = buffer.copy_(values)


def culprits(is_bad: IsBad, batch: Tensor, good: Tensor) -> Tensor:
    """The rows of a batch that make the loss or a buffer not finite. Each suspect is passed together with good rows,
    because BatchNorm cannot compute the variance of one row.

    ``good``: rows known to be harmless; where there are none, two are looked for in the batch. Nothing is found where
    that fails, or where only several rows together do harm. About log2(rows) passes for each culprit.
    """
    if len(batch) == 1:
        return batch
    if not len(good):
        good = next((pair for pair in batch.split(2) if len(pair) == 2 and not is_bad(pair)), batch[:0])
        batch = batch[~torch.isin(batch, good)]
    return torch.sort(_among(is_bad, batch, good)).values if len(good) else batch[:0]


def _among(is_bad: IsBad, suspects: Tensor, good: Tensor) -> Tensor:
    if not len(suspects) or not is_bad(torch.cat([suspects, good])):
        return suspects[:0]
    if len(suspects) == 1:
        return suspects
    return torch.cat([_among(is_bad, half, good) for half in suspects.tensor_split(2)])
