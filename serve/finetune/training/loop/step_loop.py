"""A training with several optimizers, one step for each, as model.toml declares them (`declared_steps`). Needs torch
alone.

In a step only its optimizer's parameters learn: no gradient of its loss reaches another net's, and what another net
answers inside needs no detach. Steps that share a scaler have the same scale throughout an iteration; a step whose
gradients are not finite is skipped alone, and its scaler is updated once, behind the last step. Source: PyTorch's AMP
examples, "Working with Multiple Models, Losses, and Optimizers"; a scaler by itself is Apex's ``loss_id``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .....models.folder.loss_and_optimizer_names import DEFAULT, OPTIMIZERS
from .amp import fell, grad_scaler, update
from .batch_loop import BatchLoop, alone
from .learner import Learner, learner_of
from .passes import LossOf, PartsOf, Passes, restore, snapshot, whole
from .ranks import ALONE, Ranks
from .training_terms import Settings, StepRecord, Stopped

MODEL, SHARED = "model", "shared"


@dataclass(frozen=True)
class Step:
    """``name``: of its optimizer; ``scaler``: the name of its scaler."""

    name: str
    learner: Learner
    scaler: str
    passes: Passes


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of one step; the fields are those of StepRecord."""

    loss: float
    grad_norm: float | None
    cause: str | None
    learning_rate: float
    scale: float


class StepLoop(BatchLoop):
    """``nets``: by name, ``model`` among them. ``losses``: the loss of each optimizer's step by the optimizer's name.
    ``declared``: ``optimizers`` and ``steps`` as model.toml has them. Raises Stopped where a parameter has two
    optimizers."""

    def __init__(
        self, nets: Mapping[str, nn.Module], declared: Mapping[str, Any], losses: Mapping[str, LossOf], rows: int,
        settings: Settings, device: str = "cpu", parts_of: PartsOf = whole,
        ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        optimizers, steps, self.nets = declared["optimizers"], declared["steps"], nets
        self.main = next(name for name, one in optimizers.items() if MODEL in one["nets"])
        asked, settings = settings, settings_of_optimizer(settings, optimizers[self.main])
        module = nn.ModuleDict({f"{name}_net": net for name, net in nets.items()})
        super().__init__(module, nets[MODEL], rows, settings, device, ranks)
        self.learners = {
            name: learner_of(
                nn.ModuleList(nets[net] for net in one["nets"]),
                settings_of_optimizer(asked, one),
                self.steps,
            )
            for name, one in optimizers.items()
        }
        check_owners(module, self.learners)
        scalers = {one["optimizer"]: one.get("scaler", SHARED) for one in steps}
        self.scalers = {
            name: grad_scaler(self.kind, settings, self.steps) for name in dict.fromkeys(scalers.values())
        }
        self.in_order = [
            Step(
                name,
                self.learners[name],
                scaler,
                Passes(
                    module,
                    losses[name],
                    parts_of,
                    self.scalers[scaler],
                    settings,
                    self.kind,
                    self.sound,
                    ranks,
                ),
            )
            for name, scaler in scalers.items()
        ]
        self.in_order[-1].passes.meanwhile = self.fetch_next
        for step in self.in_order:
            self.diagnose(step.learner, step.passes)

    def step(self, epoch: int, batch: Tensor) -> StepRecord:
        """Every declared step once, in order, then one update of each scaler. The record's figures are those of the
        model's own step."""
        taken = {step.name: self._taken(step, batch) for step in self.in_order}
        asked = {step.scaler for step in self.in_order if taken[step.name].grad_norm is not None}
        causes = {
            name: [taken[step.name].cause for step in self.in_order if step.scaler == name] for name in asked
        }
        for name in asked:
            update(self.scalers[name], self.settings.scale_floor, *causes[name])
        for step in self.in_order:
            one, of_scaler = taken[step.name], causes.get(step.scaler, [])
            step.learner.patience.count(one.cause, fell(self.scalers[step.scaler], one.scale, *of_scaler))
        if self.average is not None and taken[self.main].cause is None:
            self.average.take()
        main = taken[self.main]
        others = [f"{one.cause} in {name}" for name, one in taken.items() if one.cause]
        cause = main.cause or next(iter(others), None)
        figures = (main.loss, main.scale, main.grad_norm, cause is not None, cause, main.learning_rate)
        return StepRecord(self.done + 1, epoch, *figures, losses={name: taken[name].loss for name in taken})

    def _taken(self, step: Step, batch: Tensor) -> Taken:
        scaler, norm = self.scalers[step.scaler], None
        rate, before = step.learner.rate, snapshot(self.module)
        step.learner.clear()
        step.passes.batch = batch
        with alone(step.learner.weights, self.weights):
            passed = step.passes.run(batch)
        cause = passed.cause
        if cause is None:
            self.ranks.add_up(step.learner.weights)
            norm, cause = step.learner.take(scaler)
        if cause is not None:
            restore(before)
        return Taken(passed.loss, norm, cause, rate, passed.scale)


def settings_of_optimizer(settings: Settings, optimizer: Mapping[str, Any]) -> Settings:
    """The settings with those that an optimizer declares for itself."""
    own = {"optimizer": DEFAULT, **{name: value for name, value in optimizer.items() if name != "nets"}}
    arguments = [name for name in OPTIMIZERS[own["optimizer"]] if name in own and name != "betas"]
    own["optimizer_args"] = {name: own.pop(name) for name in arguments}
    if "betas" in own:
        own["betas"] = tuple(own["betas"])
    return replace(settings, **own)


def check_owners(module: nn.Module, learners: Mapping[str, Learner]) -> None:
    """Raises Stopped where two optimizers would change one parameter: nets of the operator's code may share some."""
    names = {id(one): name for name, one in module.named_parameters()}
    owners: dict[int, str] = {}
    for name, learner in learners.items():
        for weight in learner.weights:
            if (other := owners.setdefault(id(weight), name)) != name:
                raise Stopped(
                    "PARAMETER_IN_TWO_OPTIMIZERS",
                    f"the optimizers '{other}' and '{name}' would both change the parameter '{names[id(weight)]}': "
                    "their nets share it. Build each net with parameters of its own, or give both nets to one "
                    "optimizer in model.toml",
                )
