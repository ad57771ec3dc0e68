"""The state that a training leaves for the next one; no other training takes it up."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.batch_loop import BatchLoop
from halfeven.serve.finetune.training.loop.step_loop import StepLoop
from halfeven.serve.finetune.training.loop.training_terms import Settings, Stopped
from halfeven.serve.finetune.training.warm_state import state_for_the_next, take_up
from safetensors.torch import save_file
from torch import Tensor, nn

ROWS = 16
SETTINGS = Settings(n_epochs=2, batch_size=8, precision="fp16", seed=3, learning_rate=1e-2)


def one_net(**more: Any) -> Loop:
    torch.manual_seed(1)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), torch.rand(ROWS, 4)
    settings = Settings(**{**vars_of(SETTINGS), **more})
    return Loop(net, lambda rows: net(x[rows]).float().square().mean(), ROWS, settings)


def vars_of(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def gan(width: int = 8, optimizer: str = "AdamW") -> StepLoop:
    torch.manual_seed(2)
    nets = {
        "model": nn.Linear(4, 4),
        "critic": nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)),
        "features": nn.Linear(4, 2).requires_grad_(False),
    }
    x = torch.rand(ROWS, 4)
    losses = {
        "critic": lambda rows: (
            (nets["critic"](x[rows]) - nets["critic"](nets["model"](x[rows]))).float().mean()
        ),
        "generator": lambda rows: nets["critic"](nets["model"](x[rows])).float().mean(),
    }
    declared = {
        "optimizers": {
            "critic": {"nets": ["critic"], "learning_rate": 1e-2, "optimizer": optimizer},
            "generator": {"nets": ["model"], "learning_rate": 1e-2},
        },
        "steps": [{"optimizer": "critic"}, {"optimizer": "generator"}],
    }
    return StepLoop(nets, declared, losses, ROWS, SETTINGS)


def kept(loop: BatchLoop, folder: Path, what: str) -> tuple[dict[str, Tensor], Path]:
    for _ in loop.run():
        pass
    state = state_for_the_next(loop, what)
    save_file(state, path := folder / "state.safetensors")
    return state, path


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("make", [one_net, gan])
@pytest.mark.parametrize("what", ["nets", "all"])
def test_the_next_training_begins_with_what_this_one_left(make: Any, what: str, tmp_path: Path) -> None:
    loop = make()
    state, path = kept(loop, tmp_path, what)
    beside, optimizers = [
        {name for name in state if name.startswith(kind)} for kind in ("net:", "optimizer:")
    ]
    assert {name.split(":")[1] for name in beside} == ({"critic"} if make is gan else set())
    assert bool(optimizers) == (what == "all")
    following = make()
    model = {name: one.clone() for name, one in following.model.state_dict().items()}
    take_up(following, path, what)
    assert same(state_for_the_next(following, what), state)
    assert same(following.model.state_dict(), model), "the model's own weights are those of the version"
    assert {one.rate for one in following.learners.values()} != {0.0} and following.done == 0
    for _ in following.run():
        pass


def test_no_state_and_that_of_other_nets_or_optimizers_are_refused_by_name(tmp_path: Path) -> None:
    def refusal(loop: BatchLoop, path: Path | None, what: str = "all") -> str:
        with pytest.raises(Stopped) as caught:
            take_up(loop, path, what)
        return f"{caught.value.code}: {caught.value.message}"

    assert refusal(gan(), None, "nets").startswith("NO_TRAINING_STATE: ") and "nets" in refusal(
        gan(), None, "nets"
    )
    _, path = kept(gan(), tmp_path, "all")
    assert "the net 'critic' has '0.bias' [6], and what was kept is [8]" in refusal(gan(width=6), path)
    assert "the optimizer 'critic' is SGD of 6 parameters" in (said := refusal(gan(optimizer="SGD"), path))
    assert said.startswith("OTHER_TRAINING_STATE: ") and "what was kept is the state of AdamW" in said
    assert "the optimizer is AdamW of 6 parameters" in refusal(one_net(), path)
    take_up(one_net(), None, "none")


@pytest.mark.parametrize(
    ("optimizer", "one", "other", "lacking"),
    [
        ("AdamW", {}, {"amsgrad": True}, "max_exp_avg_sq"),
        ("SGD", {"momentum": 0.9}, {}, "nothing of each parameter, and what was kept has momentum_buffer"),
        ("RMSprop", {"momentum": 0.5}, {"momentum": 0.5, "centered": True}, "grad_avg"),
    ],
)
def test_a_state_that_lacks_what_an_argument_needs_is_refused_by_its_name(
    optimizer: str, one: dict[str, Any], other: dict[str, Any], lacking: str, tmp_path: Path
) -> None:
    _, path = kept(one_net(optimizer=optimizer, optimizer_args=one), tmp_path, "all")
    take_up(one_net(optimizer=optimizer, optimizer_args=one), path, "all")
    with pytest.raises(Stopped, match=lacking) as caught:
        take_up(one_net(optimizer=optimizer, optimizer_args=other), path, "all")
    assert caught.value.code == "OTHER_TRAINING_STATE"


def momentum_in_the_last_group(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[-1]["momentum"] = 0.9
    return torch.optim.SGD(groups, lr=1e-2)


class NeedsItsAttribute(torch.optim.SGD):
    """An optimizer of the operator's, whose attribute a copy does not have."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, lr=1e-2, momentum=0.9)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, momentum_in_the_last_group, NeedsItsAttribute])
def test_the_state_of_an_optimizer_of_the_operator_is_taken_up(make: Any, tmp_path: Path) -> None:
    state, path = kept(one_net(make_optimizer=make), tmp_path, "all")
    take_up(following := one_net(make_optimizer=make), path, "all")
    assert state and same(state_for_the_next(following, "all"), state)
