"""A job learns bit for bit what a loop learns that is written by hand with torch alone, setting by setting, and a job
that is resumed somewhere learns the same bits."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop import loop_state
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.batch_loop import batches
from halfeven.serve.finetune.training.loop.losses import ClassWeights, class_loss, value_loss
from halfeven.serve.finetune.training.loop.training_terms import DTYPES, Settings
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import lr_scheduler

ROWS, EPOCHS, BATCH = 64, 6, 16
STEPS = EPOCHS * ROWS // BATCH
X = torch.randn(ROWS, 6)
CLASSES = torch.randint(0, 4, (ROWS,))
CLASSES[::5] = -100
SEVERAL = (torch.rand(ROWS, 4) < 0.3).float()
SOFT = torch.rand(ROWS, 4).softmax(-1)
By = Callable[[Any], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
        self.pos_embed, self.scale = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.ones(1, 1, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(x) + self.pos_embed[0]).relu() * self.scale[0])


@dataclass(frozen=True)
class Case:
    """``optimizer``, ``schedule`` and ``loss`` are written by hand with torch; ``settings`` asks the loop for them."""

    settings: dict[str, Any]
    optimizer: By = lambda groups: optim.AdamW(groups, 1e-2)
    schedule: By = lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loss: Callable[[Tensor, Tensor], Tensor] = field(
        default=lambda scores, y: functional.cross_entropy(scores, y % 4)
    )
    ours: Callable[[Tensor, Tensor], Tensor] | None = None
    parts: int = 1
    decay: float = 0.01


def of(name: str, /, decay: float = 0.0, **arguments: Any) -> Case:
    asked = {"optimizer": name, "optimizer_args": arguments, "weight_decay": decay}
    return Case(asked, lambda groups: getattr(optim, name)(groups, lr=1e-2, **arguments), decay=decay)


def rising(optimizer: Any, behind: By) -> Any:
    up = lr_scheduler.LinearLR(optimizer, 1 / 6, 1.0, 6)
    return lr_scheduler.SequentialLR(optimizer, [up, behind(optimizer)], [6])


def scheduled(name: str, schedule: By, **more: Any) -> Case:
    return Case({"schedule": name, **more}, schedule=schedule)


def by_class(name: str, own: Callable[[Tensor, Tensor], Tensor], **more: Any) -> Case:
    return Case({}, loss=own, ours=class_loss(name, ClassWeights(None, CLASSES), **more))


def smoothed(scores: Tensor, y: Tensor) -> Tensor:
    """The mean of torch's losses; torch's own mean adds up two sums, of which the gradients are rounded apart."""
    each = functional.cross_entropy(scores, y, label_smoothing=0.1, reduction="none")
    return each.sum() / (y != -100).sum()


CASES = {
    "AdamW": Case({}),
    "AdamW bf16": Case({"precision": "bf16"}),
    "AdamW fp32": Case({"precision": "fp32"}),
    "overflows": Case({"init_scale": 2.0**30}),
    "growth": Case({"init_scale": 512.0, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}),
    "amsgrad": of("AdamW", 0.1, amsgrad=True),
    "Adam": of("Adam", betas=(0.5, 0.9), eps=1e-6),
    "Adam, a loop for each parameter": of("Adam", foreach=False),
    "Adam fused": of("Adam", fused=True),
    "NAdam": of("NAdam", momentum_decay=0.01),
    "RAdam": of("RAdam", 0.01, decoupled_weight_decay=True),
    "Adamax": of("Adamax"),
    "Adagrad": of("Adagrad", lr_decay=0.01),
    "Adadelta": of("Adadelta", rho=0.8),
    "RMSprop": of("RMSprop", alpha=0.9, momentum=0.5, centered=True),
    "SGD": of("SGD", 0.01),
    "SGD with momentum": of("SGD", momentum=0.9, nesterov=True),
    "SGD, dampened": of("SGD", momentum=0.9, dampening=0.1),
    "one that a function makes": Case({"make_optimizer": optim.ASGD}, lambda groups: optim.ASGD(groups, lr=1e-2)),
    "linear": scheduled("linear", lambda one: lr_scheduler.LinearLR(one, 1.0, 0.0, STEPS)),
    "constant": scheduled("constant", lambda one: lr_scheduler.ConstantLR(one, 1.0, STEPS)),
    "warm-up": scheduled(
        "cosine", lambda one: rising(one, lambda it: lr_scheduler.CosineAnnealingLR(it, STEPS - 6)), warmup_ratio=0.25
    ),
    "one cycle": scheduled(
        "one_cycle", lambda one: lr_scheduler.OneCycleLR(one, 1e-2, total_steps=STEPS, pct_start=0.25),
        warmup_ratio=0.25,
    ),
    "step": scheduled(
        "step", lambda one: lr_scheduler.StepLR(one, STEPS // 4, 0.3), schedule_period=0.25, schedule_gamma=0.3
    ),
    "polynomial": scheduled("polynomial", lambda one: lr_scheduler.PolynomialLR(one, STEPS, 2.0)),
    "accumulation": Case({}, parts=4),
    "accumulation, overflows": Case({"init_scale": 2.0**28}, parts=2),
    "clipped": Case({"clip_norm": 0.01}),
    "average": Case({"ema_decay": 0.9}),
    "layer-wise rates": Case({"learning_rates": {"head.*": 0.1, "*.0.*": 0.5}}),
    "ignore_index": by_class("cross_entropy", functional.cross_entropy),
    "smoothed": by_class("cross_entropy", smoothed, smoothing=0.1),
    "soft labels": Case(
        {}, loss=lambda scores, y: functional.cross_entropy(scores, SOFT[: len(y)]),
        ours=lambda scores, y: class_loss("cross_entropy", ClassWeights(None, CLASSES))(scores, SOFT[: len(y)]),
    ),
    "pos_weight": Case(
        {},
        loss=lambda scores, y: functional.binary_cross_entropy_with_logits(
            scores, SEVERAL[: len(y)], pos_weight=torch.tensor([3.0, 1.0, 2.0, 1.0])
        ),
        ours=lambda scores, y: value_loss("bce_with_logits", [3.0, 1.0, 2.0, 1.0])(scores, SEVERAL[: len(y)]),
    ),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "n_epochs": EPOCHS, "batch_size": BATCH, "learning_rate": 1e-2, "warmup_ratio": 0.0, "seed": 3,
}  # fmt: skip


def loop_of(case: Case, net: Net) -> Loop:
    settings = Settings(**{**DEFAULTS, "growth_interval": 50, **case.settings})
    found = case.ours or case.loss

    def loss(rows: Tensor) -> Tensor:
        scores = net(X[rows])
        with torch.autocast("cpu", enabled=False):
            return found(scores.float(), CLASSES[rows])

    return Loop(net, loss, ROWS, settings, parts_of=lambda batch: batch.tensor_split(case.parts))


def groups_by_hand(case: Case, net: Net) -> list[dict[str, Any]]:
    decaying = ("body.0.weight", "head.weight")
    named = dict(net.named_parameters())
    factors: dict[str, float] = {"head": 0.1, "body.0": 0.5} if "learning_rates" in case.settings else {}
    groups = []
    for owner in ("", *factors):
        of_owner = [n for n in named if n.startswith(f"{owner}.")] if owner else [
            n for n in named if not any(n.startswith(f"{each}.") for each in factors)]  # fmt: skip
        for decays in (True, False):
            parameters = [named[name] for name in of_owner if (name in decaying) == decays]
            group: dict[str, Any] = {"params": parameters, "weight_decay": case.decay if decays else 0.0}
            groups.append(group | ({"lr": 1e-2 * factors[owner]} if owner else {}))
    return groups


def by_hand(case: Case, net: Net, settings: Settings) -> int:
    torch.manual_seed(settings.seed)
    optimizer = case.optimizer(groups_by_hand(case, net))
    schedule = case.schedule(optimizer)
    half, dtype = settings.precision == "fp16", DTYPES[settings.precision]
    scaler = torch.amp.GradScaler(
        "cpu", settings.init_scale, settings.growth_factor, settings.backoff_factor, settings.growth_interval or 1,
        enabled=half,
    )  # fmt: skip
    average, taken, skipped = {name: one.detach().clone() for name, one in net.state_dict().items()}, 0, 0
    for _, rows in batches(ROWS, settings):
        before = {name: one.clone() for name, one in net.named_buffers()}
        optimizer.zero_grad()
        for part in rows.tensor_split(case.parts):
            with torch.autocast("cpu", dtype, enabled=settings.precision != "fp32"):
                scores = net(X[part])
            loss = case.loss(scores.float(), CLASSES[part]) * (len(part) / len(rows))
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), settings.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        if norm.isfinite():
            schedule.step()
            taken += 1
            keep = min(settings.ema_decay, (1 + taken) / (10 + taken))
            with torch.no_grad():
                for name, one in net.state_dict().items():
                    if one.is_floating_point():
                        average[name].lerp_(one, 1 - keep)
        else:
            skipped += 1
            with torch.no_grad():
                for name, one in net.named_buffers():
                    one.copy_(before[name])
    if settings.ema_decay:
        counts = {name: one for name, one in net.state_dict().items() if not one.is_floating_point()}
        net.load_state_dict(average | counts)
    return skipped


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
# Torch looks for the optimizer's own step.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_loop_learns_the_bits_of_a_loop_by_hand_and_resumed_somewhere_the_same(name: str) -> None:
    case, net = CASES[name], Net()
    other, third = copy.deepcopy(net), copy.deepcopy(net)
    loop = loop_of(case, net)
    stop, kept = random.randrange(1, STEPS), ({}, "")
    skipped = 0
    for record in loop.run():
        skipped += record.skipped
        if loop.done == stop:
            kept = loop_state.tensors_of(loop), json.dumps(loop_state.numbers_of(loop))
    resumed = loop_of(case, third)
    loop_state.put_back(resumed, kept[0], json.loads(kept[1]))
    for _ in resumed.run():
        pass
    assert by_hand(case, other, loop.settings) == skipped and (skipped > 0 or "overflow" not in name)
    with loop.published(), resumed.published():
        for key, expected in other.state_dict().items():
            assert torch.equal(net.state_dict()[key], expected), key
            assert torch.equal(third.state_dict()[key], expected), f"{key}, resumed behind step {stop}"
