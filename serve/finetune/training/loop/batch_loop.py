"""The batches of a training, one step after the other, and all that decides the next step. Needs torch alone.

What a step is, is said by `amp.py` (one loss and one optimizer) and `step_loop.py` (several).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, tee, zip_longest

import torch
from torch import Tensor, nn

from .learner import Learner
from .passes import Passes
from .ranks import ALONE, Ranks
from .scale_collapse import Diagnosis, Trial, trial_under_autocast
from .setting_names import batch_count
from .training_terms import Settings, StepRecord, Stopped, finite_names, named_tensors


class BatchLoop:
    """`loop_state.py` saves its state after any step and puts it into another loop over the same rows.

    ``module``: all that learns. ``averaged``: the model, of which an average may be published. ``done``: the steps that
    were made. ``on_epoch`` is called with the epoch of each step before the step. ``ranks``: the processes that take
    the steps together. ``trial`` and ``numbers`` are read where a training collapses (`scale_collapse.py`).
    ``learners`` and ``scalers`` are by name, and set by the subclass.
    """

    learners: Mapping[str, Learner]
    scalers: Mapping[str, torch.amp.GradScaler]

    def __init__(
        self, module: nn.Module, averaged: nn.Module, rows: int, settings: Settings, device: str, ranks: Ranks = ALONE
    ) -> None:  # fmt: skip
        torch.manual_seed(settings.seed)
        self.ranks = ranks
        self.on_epoch: Callable[[int], None] = lambda epoch: None
        self.on_next: Callable[[Tensor], None] = lambda batch: None
        self.trial: Trial = trial_under_autocast(averaged, device)
        self.numbers: Callable[[Sequence[int]], Sequence[int]] = lambda rows: rows
        self._next: Tensor | None = None
        self.module, self.rows, self.settings, self.done = module, rows, settings, 0
        self.model = averaged
        self.steps, self.kind = total_steps(rows, settings), torch.device(device).type
        self.sound, decay = finite_names(named_tensors(module)), settings.ema_decay
        self.average = Average(averaged, decay, finite_names(named_tensors(averaged))) if decay else None

    @property
    def weights(self) -> list[nn.Parameter]:
        """All parameters that learn."""
        return [weight for learner in self.learners.values() for weight in learner.weights]

    def run(self) -> Iterator[StepRecord]:
        """The steps that are left. The state may be saved whenever a record was given."""
        left, behind = tee(islice(batches(self.rows, self.settings), self.done, None))
        for (epoch, batch), following in zip_longest(left, islice(behind, 1, None)):
            self._next = following[1] if following and following[0] == epoch else None
            self._check()
            self.on_epoch(epoch)
            self.ranks.seed(self.settings.seed, self.done)
            record = self.step(epoch, batch)
            self.ranks.send_buffers(self.module)
            self.done += 1
            yield record

    def fetch_next(self) -> None:
        """The device computes a step: the rows of the one behind it may be fetched."""
        if self._next is not None:
            self.on_next(self._next)

    def diagnose(self, learner: Learner, passes: Passes) -> None:
        """Make the message of ``learner`` name the cause if its steps end in a collapse."""

        def sentence() -> str:
            with alone(learner.weights, self.weights):
                found = Diagnosis(passes, learner.weights, self.model, self.trial, self.numbers, passes.batch)
                return found.sentence()

        learner.patience.diagnose = sentence

    def step(self, epoch: int, batch: Tensor) -> StepRecord:
        """One step on the rows ``batch``."""
        raise NotImplementedError

    def state_of_rows(self) -> dict[str, Tensor]:
        """The state of single rows, for a checkpoint."""
        return {}

    def put_rows(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_of_rows` gave."""

    def published(self) -> AbstractContextManager[None]:
        """Inside, the module has the weights that would be published now: its own, or their average."""
        return nullcontext() if self.average is None else self.average.in_place()

    def finish(self) -> None:
        """Raises Stopped where no step was taken, or where the last ones were all skipped."""
        self._check()
        for name, learner in self.learners.items():
            with naming(name):
                learner.patience.at_the_end()

    def _check(self) -> None:
        for name, learner in self.learners.items():
            with naming(name):
                learner.patience.check(self.done)


@contextmanager
def alone(learning: Sequence[nn.Parameter], among: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, only the parameters ``learning`` require gradients; afterwards all of ``among`` do."""
    for weight in among:
        weight.requires_grad_(False)
    for weight in learning:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in among:
            weight.requires_grad_(True)


@contextmanager
def naming(optimizer: str) -> Iterator[None]:
    """Inside, the message of Stopped names the optimizer, where that has a name."""
    try:
        yield
    except Stopped as error:
        raise Stopped(
            error.code, f"optimizer '{optimizer}': {error.message}" if optimizer else error.message
        ) from error


def batches(rows: int, settings: Settings) -> Iterator[tuple[int, Tensor]]:
    """(epoch, row numbers); the order is a function of (seed, epoch) alone."""
    for epoch in range(settings.n_epochs):
        generator = torch.Generator().manual_seed((settings.seed * 1_000_003 + epoch) % 2**63)
        for batch in evenly(torch.randperm(rows, generator=generator), settings.batch_size):
            yield epoch, batch


def total_steps(rows: int, settings: Settings) -> int:
    return settings.n_epochs * len(evenly(torch.arange(rows), settings.batch_size))


def evenly(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Batches of at most ``size`` whose lengths differ by one at most, so that no row is dropped or weighs more.

    A single row is never left alone (BatchNorm has no variance of one row, and refuses) where ``size`` is not 1:
    for size 2 and an odd number of rows, one batch has 3.
    """
    return rows.tensor_split(batch_count(len(rows), size))


class Average:
    """The exponential moving average, over the steps that were taken, of the parameters that learn and of the floating
    buffers among ``sound``; each keeps its dtype.

    After step t the old average counts min(``decay``, (1+t)/(10+t)): the parent's weights soon count nothing.
    Source of that limit: tf.train.ExponentialMovingAverage (``num_updates``).
    """

    def __init__(self, module: nn.Module, decay: float, sound: Collection[str]) -> None:
        self._module, self._decay, self._sound = module, decay, sound
        self.taken = 0
        self.tensors: Mapping[str, Tensor] = {name: one.clone() for name, one in self._averaged().items()}

    def take(self) -> None:
        """Count the weights as they are now."""
        self.taken += 1
        keep = min(self._decay, (1 + self.taken) / (10 + self.taken))
        with torch.no_grad():
            for name, now in self._averaged().items():
                if self.tensors[name].shape == now.shape:
                    self.tensors[name].lerp_(now, 1 - keep)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module has the average inside, and its own weights again afterwards."""
        own = {name: one.clone() for name, one in self._averaged().items()}
        self.put_in()
        try:
            yield
        finally:
            self._copy(own)

    def put_in(self) -> None:
        self._copy(self.tensors)

    def _averaged(self) -> dict[str, Tensor]:
        found = {name: one.detach() for name, one in self._module.named_parameters() if one.requires_grad}
        buffers = self._module.named_buffers()
        return found | {name: one for name, one in buffers if name in self._sound and one.is_floating_point()}

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, one in self._averaged().items():
                if one.shape == tensors[name].shape:
                    one.copy_(tensors[name])
