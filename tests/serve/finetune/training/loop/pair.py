"""Two nets that learn in steps of their own."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from halfeven.serve.finetune.training.loop.step_loop import StepLoop
from halfeven.serve.finetune.training.loop.training_terms import Settings
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import l1_loss

ROWS = 48
SETTINGS = Settings(
    n_epochs=3, batch_size=8, precision="fp16", schedule="constant", warmup_ratio=0.0, weight_decay=0.0, seed=3,
    growth_interval=1000,
)  # fmt: skip
CLIP = {"model": 0.3, "critic": 0.05}


def declared(separate: bool = False, first: str = "critic") -> dict[str, Any]:
    """The step of ``first`` comes before the other."""
    steps = [
        {"optimizer": name, "loss": "gan.py:loss"} for name in sorted(CLIP, key=lambda name: name != first)
    ]
    if separate:
        steps = [{**step, "scaler": step["optimizer"]} for step in steps]
    rates = {"model": 0.02, "critic": 0.01}
    optimizers = {
        name: {"nets": [name], "learning_rate": rates[name], "betas": [0.5, 0.999], "clip_norm": CLIP[name]}
        for name in CLIP
    }
    return {"nets": {"critic": {}}, "optimizers": optimizers, "steps": steps}


class Pair:
    """A generator, a critic and their losses; gradients of the calls ``overflows`` are infinite. FP32 throughout, so
    that a scale by a power of two changes no bit."""

    def __init__(self, overflows: Mapping[str, set[int]] | None = None) -> None:
        self.overflows, self.calls = overflows or {}, dict.fromkeys(CLIP, 0)
        self.nets: dict[str, nn.Module] = {
            "model": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)),
            "critic": nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)),
        }
        self.x, self.y = torch.randn(ROWS, 3), torch.randn(ROWS, 2)

    def twin(self) -> "Pair":
        other = copy.copy(self)
        other.nets, other.calls = copy.deepcopy(self.nets), dict.fromkeys(CLIP, 0)
        return other

    def of_critic(self, rows: Tensor) -> Tensor:
        """The loss of the critic, without detach: the loop has to see to that."""
        real, made = self.judged(rows, self.y[rows]), self.judged(rows, self.nets["model"](self.x[rows]))
        return bce(real, torch.ones_like(real)) + bce(made, torch.zeros_like(made))

    def of_model(self, rows: Tensor) -> Tensor:
        painted = self.nets["model"](self.x[rows])
        judged = self.judged(rows, painted)
        return bce(judged, torch.ones_like(judged)) + 3 * l1_loss(painted, self.y[rows])

    def judged(self, rows: Tensor, painted: Tensor) -> Tensor:
        return self.nets["critic"](torch.cat([self.x[rows], painted], 1))

    def losses(self) -> dict[str, Callable[[Tensor], Tensor]]:
        return {
            "model": self.injected("model", self.of_model),
            "critic": self.injected("critic", self.of_critic),
        }

    def injected(self, name: str, loss_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def loss(rows: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                found = loss_of(rows)
            if self.calls[name] in self.overflows.get(name, ()):
                found.register_hook(lambda gradient: gradient * math.inf)
            self.calls[name] += 1
            return found

        return loss

    def loop(self, separate: bool = False, first: str = "critic") -> StepLoop:
        return StepLoop(self.nets, declared(separate, first), self.losses(), ROWS, SETTINGS)

    def weights(self) -> list[Tensor]:
        return [weight.detach().clone() for net in self.nets.values() for weight in net.parameters()]
