"""Several optimizers and losses: beside hand-written loops, with overflows in either step, and through a checkpoint."""

import json
import math
from collections.abc import Mapping

import pytest
import torch
from halfeven.serve.finetune.training.loop import loop_state, step_loop
from halfeven.serve.finetune.training.loop.batch_loop import batches
from halfeven.serve.finetune.training.loop.step_loop import StepLoop
from halfeven.serve.finetune.training.loop.training_terms import Settings, Stopped
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.serve.finetune.training.loop.pair import CLIP, ROWS, SETTINGS, Pair, declared

OVERFLOWS = {"model": {4, 9}, "critic": {2, 9}}


def by_hand(pair: Pair, skipped: Mapping[str, set[int]]) -> None:
    """The two steps in FP32, without a scaler: gradients of each loss for its own net alone."""
    asked = declared()["optimizers"]
    optimizers = {
        name: torch.optim.AdamW(
            net.parameters(), asked[name]["learning_rate"], (0.5, 0.999), weight_decay=0.0
        )
        for name, net in pair.nets.items()
    }
    losses = {"critic": pair.of_critic, "model": pair.of_model}
    for number, (_, rows) in enumerate(batches(ROWS, SETTINGS)):
        for name, loss_of in losses.items():
            own = list(pair.nets[name].parameters())
            gradients = torch.autograd.grad(loss_of(rows), own)
            if number in skipped.get(name, ()):
                continue
            for weight, gradient in zip(own, gradients, strict=True):
                weight.grad = gradient
            clip_grad_norm_(own, CLIP[name])
            optimizers[name].step()


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("where", [(), ("critic",), ("model",), ("critic", "model")], ids=str)
def test_the_parameters_are_those_of_a_loop_by_hand_that_skips_the_same_steps(
    where: tuple[str, ...], separate: bool
) -> None:
    pair = Pair({name: OVERFLOWS[name] for name in where})
    twin, loop = pair.twin(), pair.loop(separate)
    records = list(loop.run())
    by_hand(twin, pair.overflows)
    assert all(torch.equal(*two) for two in zip(pair.weights(), twin.weights(), strict=True))
    hit: set[int] = set().union(*pair.overflows.values())
    assert [number for number, record in enumerate(records) if record.skipped] == sorted(hit)
    fell = {name: len(pair.overflows.get(name, ())) for name in CLIP} if separate else {"shared": len(hit)}
    scales = {name: scaler.get_scale() for name, scaler in loop.scalers.items()}
    assert scales == {name: 2.0 ** (16 - times) for name, times in fell.items()}, (
        "one update for each scaler and iteration"
    )


def test_under_autocast_it_is_pytorch_s_recipe_for_several_models_losses_and_optimizers() -> None:
    """https://docs.pytorch.org/docs/stable/notes/amp_examples.html, with overflows at the first scales."""
    pair = Pair()
    twin, ours = pair.twin(), declared()["optimizers"]
    losses = {"critic": pair.of_critic, "model": pair.of_model}
    settings = step_loop.replace(SETTINGS, init_scale=2.0**30)
    records = list(StepLoop(pair.nets, declared(), losses, ROWS, settings).run())

    scaler, taken = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000), 0
    optimizers = {
        name: torch.optim.AdamW(net.parameters(), ours[name]["learning_rate"], (0.5, 0.999), weight_decay=0.0)
        for name, net in twin.nets.items()
    }
    for _, rows in batches(ROWS, settings):
        for name, loss_of in (("critic", twin.of_critic), ("model", twin.of_model)):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(rows)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizers[name])
            clip_grad_norm_(twin.nets[name].parameters(), CLIP[name])
            scaler.step(optimizers[name])
        before = scaler.get_scale()
        scaler.update()
        taken += scaler.get_scale() == before
    assert all(torch.equal(*two) for two in zip(pair.weights(), twin.weights(), strict=True))
    assert 0 < sum(record.skipped for record in records) == len(records) - taken


@pytest.mark.parametrize("first", ["critic", "model"])
def test_no_gradient_of_the_second_loss_reaches_the_net_of_the_first_step(first: str) -> None:
    pair = Pair()
    loss_of = {"critic": pair.of_critic, "model": pair.of_model}[first]
    epoch, rows = next(batches(ROWS, SETTINGS))
    own = list(pair.nets[first].parameters())
    expected = torch.autograd.grad(loss_of(rows), own)
    pair.loop(first=first).step(epoch, rows)
    norm = torch.stack([one.norm() for one in expected]).norm()
    for weight, gradient in zip(own, expected, strict=True):
        clipped = gradient * min(1.0, CLIP[first] / float(norm))
        torch.testing.assert_close(weight.grad, clipped, rtol=1e-4, atol=1e-7)


def test_each_optimizer_clips_to_its_own_norm() -> None:
    pair = Pair()
    loop = pair.loop()
    record = next(loop.run())
    for name, net in pair.nets.items():
        norm = torch.stack(
            [weight.grad.norm() for weight in net.parameters() if weight.grad is not None]
        ).norm()
        assert float(norm) == pytest.approx(min(CLIP[name], math.inf), rel=1e-4)
    assert record.grad_norm is not None and record.grad_norm > CLIP["model"]


def test_an_optimizer_that_leaves_a_setting_out_has_the_default_and_not_the_models() -> None:
    pair, asked = Pair(), declared()
    asked["optimizers"]["model"] |= {"weight_decay": 0.1}
    asked["optimizers"]["critic"] = {"nets": ["critic"], "learning_rate": 0.01}
    learner = StepLoop(pair.nets, asked, pair.losses(), ROWS, Settings()).learners["critic"]
    group = learner.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"], learner.clip_norm) == ((0.9, 0.999), 0.01, 1.0)


def test_a_skipped_step_leaves_the_buffers_of_every_net() -> None:
    pair = Pair({"critic": {1}})
    pair.nets["critic"] = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    losses = pair.losses()
    after: list[Tensor] = []

    def noted(rows: Tensor) -> Tensor:
        after.append(pair.nets["critic"][1].running_mean.clone())  # type: ignore[index]
        return losses["model"](rows)

    steps = StepLoop(pair.nets, declared(), {**losses, "model": noted}, ROWS, SETTINGS).run()
    next(steps)
    kept = pair.nets["critic"][1].running_mean.clone()  # type: ignore[index]
    assert next(steps).cause == "gradient overflow in critic"
    assert torch.equal(after[1], kept) and not torch.equal(after[0], kept)


def test_a_loop_that_goes_on_from_a_checkpoint_has_the_same_bits() -> None:
    pair = Pair({"critic": {2, 15}, "model": {3}})
    pair.nets["model"].append(nn.Dropout(0.2))  # type: ignore[operator]
    twin = pair.twin()
    first = pair.loop(separate=True)
    records = first.run()
    for _ in range(10):
        next(records)
    tensors = loop_state.tensors_of(first)
    numbers = json.loads(json.dumps(loop_state.numbers_of(first)))
    left = list(records)
    second, twin.calls = twin.loop(separate=True), dict.fromkeys(CLIP, 10)
    loop_state.put_back(second, tensors, numbers)
    assert list(second.run()) == left and left[5].cause == "gradient overflow in critic"
    assert all(torch.equal(*two) for two in zip(pair.weights(), twin.weights(), strict=True))
    assert loop_state.numbers_of(first) == loop_state.numbers_of(second)


def test_a_step_that_is_never_taken_ends_the_job() -> None:
    pair = Pair({"critic": set(range(1000))})
    loop = StepLoop(
        pair.nets,
        declared(),
        pair.losses(),
        ROWS,
        step_loop.replace(SETTINGS, init_scale=1.0, scale_floor=1.0, max_floor_hits=4),
    )
    with pytest.raises(Stopped, match="optimizer 'critic': stopped at step 4") as caught:
        list(loop.run())
    assert caught.value.code == "SCALE_COLLAPSE"


def test_a_parameter_that_two_optimizers_would_change_is_refused() -> None:
    pair = Pair()
    pair.nets["critic"].append(pair.nets["model"][0])  # type: ignore[operator,index]
    with pytest.raises(
        Stopped, match=r"'model' and 'critic' would both change .*model_net\.0\.weight"
    ) as caught:
        pair.loop()
    assert caught.value.code == "PARAMETER_IN_TWO_OPTIMIZERS"


def test_the_average_is_that_of_the_model_over_its_own_steps() -> None:
    pair = Pair({"model": {2, 3}, "critic": {5}})
    loop = StepLoop(pair.nets, declared(), pair.losses(), ROWS, step_loop.replace(SETTINGS, ema_decay=0.9))
    records = list(loop.run())
    before = {name: net.state_dict()["0.weight"].clone() for name, net in pair.nets.items()}
    assert loop.average is not None and loop.average.taken == len(records) - 2
    with loop.published():
        same = {
            name: torch.equal(net.state_dict()["0.weight"], before[name]) for name, net in pair.nets.items()
        }
    assert same == {"model": False, "critic": True}
