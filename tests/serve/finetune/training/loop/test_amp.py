"""The training loop: what it learns, what it skips and keeps whole, and what goes wrong without its precautions."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop import amp, batch_loop, learner, passes
from halfeven.serve.finetune.training.loop.setting_names import growth_interval
from halfeven.serve.finetune.training.loop.training_terms import (
    GRADIENT_OVERFLOW,
    NON_FINITE_BUFFER,
    NON_FINITE_LOSS,
    Settings,
    StepRecord,
    Stopped,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss

FINITE = Settings(n_epochs=1, batch_size=8, precision="fp16", init_scale=256.0, seed=3)
ALWAYS_HUGE = 1e6  # a target whose MSE is finite in FP32 and whose gradient is not in half, at any scale ≥ 1


class Problem:
    """Learn a random linear map of 5 numbers to 3 through BatchNorm and dropout."""

    def __init__(self, rows: int = 64, dropout: float = 0.1) -> None:
        self.inputs = torch.randn(rows, 5)
        self.targets = self.inputs @ torch.randn(5, 3)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 3))
        self.seen: list[Tensor] = []
        self.before_backward: Callable[[], None] = lambda: None

    def loss(self, rows: Tensor) -> Tensor:
        self.seen.append(rows)
        return mse_loss(self.net(self.inputs[rows]).float(), self.targets[rows])

    def run(self, settings: Settings = FINITE, steps: int | None = None) -> list[StepRecord]:
        """All records, or those of the first few steps."""
        loop = amp.train(self.net, self.loss, len(self.inputs), settings)
        return list(loop) if steps is None else [next(loop) for _ in range(steps)]

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def poison(self, step: int, by: float = math.nan, settings: Settings = FINITE) -> None:
        """Make one row of that step's batch extreme; the order of the rows is known before the loop runs."""
        batch = [rows for _, rows in batch_loop.batches(len(self.inputs), settings)][step - 1]
        self.inputs[batch[0], 0] = by


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def all_finite(state: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_reduces_the_loss(precision: str) -> None:
    problem = Problem(dropout=0.0)
    settings = replace(FINITE, n_epochs=20, precision=precision, learning_rate=0.02)
    records = problem.run(settings)
    assert len(records) == 20 * 8 == batch_loop.total_steps(64, settings)
    first, last = (sum(record.loss for record in epoch) for epoch in (records[:8], records[-8:]))
    assert last < 0.5 * first
    assert {record.scale for record in records} >= ({1.0} if precision != "fp16" else {256.0})


def test_a_poisoned_batch_skips_one_step_and_leaves_every_bit_as_it_was() -> None:
    problem = Problem()
    problem.poison(step=3)
    loop = amp.train(problem.net, problem.loss, 64, FINITE)
    first, second = next(loop), next(loop)
    before = problem.state()
    third = next(loop)
    assert same(problem.state(), before)  # weights, running statistics and their counter
    assert (third.skipped, third.cause, third.grad_norm) == (True, NON_FINITE_LOSS, None)
    assert math.isnan(third.loss)
    rest = list(loop)
    assert not any(record.skipped for record in (first, second, *rest))
    assert not same(problem.state(), before)


def test_a_loss_that_is_not_finite_does_not_touch_the_scale() -> None:
    problem = Problem()
    problem.poison(step=2)
    assert [record.scale for record in problem.run()] == [256.0] * 8


def test_a_gradient_overflow_halves_the_scale_and_leaves_every_bit_as_it_was() -> None:
    problem = Problem()
    loop = amp.train(problem.net, problem.loss, 64, replace(FINITE, init_scale=2.0**40))
    before = problem.state()
    records = [next(loop), next(loop)]
    assert [record.cause for record in records] == [GRADIENT_OVERFLOW] * 2
    assert all(math.isfinite(record.loss) for record in records)
    assert [record.scale for record in records] == [2.0**40, 2.0**39]
    assert same(problem.state(), before)


@pytest.mark.parametrize("cause", [NON_FINITE_LOSS, GRADIENT_OVERFLOW])
def test_the_schedule_advances_on_taken_steps_only(cause: str) -> None:
    settings = replace(FINITE, n_epochs=4, schedule="cosine", warmup_ratio=0.0)
    problem = Problem()

    def loss(rows: Tensor) -> Tensor:
        true = problem.loss(rows)
        if len(problem.seen) not in (3, 4, 9):
            return true
        # 0, of infinite slope.
        return true * math.nan if cause == NON_FINITE_LOSS else true + (true * 0).sqrt()

    records = list(amp.train(problem.net, loss, 64, settings))
    assert [record.step for record in records if record.cause == cause] == [3, 4, 9]
    taken = 0
    for record in records:
        expected = settings.learning_rate * (0.5 + 0.5 * math.cos(math.pi * taken / len(records)))
        assert record.learning_rate == pytest.approx(expected, rel=1e-9)
        taken += not record.skipped


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clipping_acts_on_the_unscaled_gradients(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(rows=8, dropout=0.0)
    problem.net[1] = nn.Identity()
    clipped: list[Tensor] = []
    stepped = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *args: object, **kwargs: object) -> object:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        clipped.append(torch.nn.utils.get_total_norm(gradients))
        return stepped(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    loss = problem.loss(torch.arange(8))
    true_norm = torch.nn.utils.get_total_norm(torch.autograd.grad(loss, list(problem.net.parameters())))
    limit = true_norm.item() / 3
    (record,) = problem.run(replace(FINITE, init_scale=scale, clip_norm=limit))
    assert record.grad_norm == pytest.approx(true_norm.item(), rel=0.02)  # half arithmetic
    assert clipped[0].item() == pytest.approx(limit, rel=1e-3)


def test_the_floor_stops_a_collapsing_scale_with_its_reason_and_nothing_touched() -> None:
    problem = Problem()
    problem.targets[:] = ALWAYS_HUGE
    before, records = problem.state(), []
    with pytest.raises(Stopped, match=r"floor of 4.*bf16 or fp32.*inputs or targets") as stopped:
        for record in amp.train(problem.net, problem.loss, 64, replace(COLLAPSING, max_floor_hits=3)):
            records.append(record)
    assert stopped.value.code == "SCALE_COLLAPSE"
    assert [record.scale for record in records] == [16.0, 8.0, 4.0, 4.0, 4.0]
    assert all(record.cause == GRADIENT_OVERFLOW for record in records)
    assert same(problem.state(), before)


COLLAPSING = replace(FINITE, init_scale=16.0, scale_floor=4.0, n_epochs=40, learning_rate=1e-4)


def endless_then_clean(problem: Problem, endless: int) -> Callable[[Tensor], Tensor]:
    """A loss that is finite for some steps and has gradients that are not, at any scale; the true loss from then on."""

    def loss(rows: Tensor) -> Tensor:
        poison = (problem.net(problem.inputs[rows]).float().sum() * 0).sqrt()  # 0, and its slope is infinite
        return problem.loss(rows) + (poison if len(problem.seen) <= endless else 0)

    return loss


def no_floor(scaler: torch.amp.GradScaler, floor: float) -> None:
    """The scale as torch leaves it, with no floor."""


def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (learner, passes):
        monkeypatch.setattr(place, "is_finite", lambda value: True)
    monkeypatch.setattr(passes.Passes, "buffers_are_finite", lambda self: torch.tensor(True))


def run_past_the_collapse(problem: Problem) -> list[StepRecord]:
    """150 overflows take a scale of 16 below 2⁻¹²⁸, where 1/scale is infinite; the rest is clean."""
    loop = amp.train(problem.net, endless_then_clean(problem, endless=150), 64, COLLAPSING)
    return [next(loop) for _ in range(160)]


def test_without_the_floor_the_collapse_goes_on_and_clean_batches_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(amp, "hold_floor", no_floor)
    problem = Problem()
    records = run_past_the_collapse(problem)
    assert records[149].scale < 2.0**-127
    assert all(record.skipped and math.isfinite(record.loss) for record in records[150:])
    assert all_finite(problem.state())  # the finite check is the second line


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # it too asks who took a step
def test_without_the_floor_and_the_finite_check_a_clean_batch_writes_nan_into_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(amp, "hold_floor", no_floor)
    no_checks(monkeypatch)
    problem = Problem()
    before = {name: parameter.clone() for name, parameter in problem.net.named_parameters()}
    loop = amp.train(problem.net, endless_then_clean(problem, endless=150), 64, COLLAPSING)
    for _ in range(150):
        next(loop)
    assert same(dict(problem.net.named_parameters()), before)
    next(loop)  # the first clean batch
    assert not torch.isfinite(problem.state()["0.weight"]).any()


def test_without_the_restored_buffers_a_skipped_step_poisons_batch_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(amp, "restore", lambda before: None)
    problem = Problem()
    problem.poison(step=3, by=math.inf)
    with pytest.raises(Stopped, match=r"1\.running_mean") as stopped:
        problem.run()
    assert stopped.value.code == "NONFINITE_WEIGHTS"
    assert all_finite(dict(problem.net.named_parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_the_finite_check_one_poisoned_batch_ruins_the_weights(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_checks(monkeypatch)
    problem = Problem()
    problem.poison(step=3)
    with pytest.raises(Stopped) as stopped:
        problem.run(replace(FINITE, precision=precision))
    assert stopped.value.code == "NONFINITE_WEIGHTS"
    assert not torch.isfinite(problem.state()["0.weight"]).any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_row_with_a_finite_loss_that_spoils_a_buffer_skips_its_step(precision: str) -> None:
    """1e30 before BatchNorm: the loss and every gradient are finite, the variance of the batch is not."""
    problem = spoiling_a_buffer()
    records = problem.run(replace(FINITE, precision=precision))
    assert [record.cause for record in records if record.skipped] == [NON_FINITE_BUFFER]
    assert all(math.isfinite(record.loss) for record in records)
    assert all_finite(problem.state())


def test_without_the_check_of_the_buffers_such_a_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes.Passes, "buffers_are_finite", lambda self: torch.tensor(True))
    problem = spoiling_a_buffer()
    with pytest.raises(Stopped, match=r"0\.running_var") as stopped:
        problem.run(replace(FINITE, precision="fp32"))
    assert stopped.value.code == "NONFINITE_WEIGHTS"


def spoiling_a_buffer() -> Problem:
    problem = Problem(dropout=0.0)
    problem.net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    problem.poison(step=3, by=1e30)
    return problem


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("by", [math.nan, math.inf, 1e30])
def test_rows_that_spoil_a_step_are_named_left_out_and_the_step_is_taken(precision: str, by: float) -> None:
    settings = replace(FINITE, precision=precision, bad_rows="quarantine", n_epochs=3)
    problem = Problem(dropout=0.3)
    bad = {3, 17, 18, 40}
    for row in bad:
        problem.inputs[row, row % 5] = by
    records = []
    for record in amp.train(problem.net, problem.loss, 64, settings):
        records.append(record)
        assert all_finite(problem.state())
    assert sorted(row for record in records for row in record.quarantined) == sorted(bad)
    assert not any(record.skipped for record in records)
    assert all(record.epoch == 0 for record in records if record.quarantined), "once, then they are left out"


def test_a_step_whose_rows_were_quarantined_is_the_step_without_them() -> None:
    """Looking for the rows leaves weights and buffers as they were."""
    settings = replace(FINITE, precision="fp32", bad_rows="quarantine")
    problem = Problem(dropout=0.0)
    alone = copy.deepcopy(problem)
    batch = next(rows for _, rows in batch_loop.batches(64, settings))
    alone.inputs, problem.inputs[batch[2]] = problem.inputs.clone(), math.nan
    problem.run(settings, steps=1)
    optimizer = torch.optim.AdamW(alone.net.parameters(), settings.learning_rate, weight_decay=0.01)
    alone.loss(torch.cat([batch[:2], batch[3:]])).backward()
    nn.utils.clip_grad_norm_(alone.net.parameters(), settings.clip_norm)
    optimizer.step()
    for name, tensor in problem.state().items():
        torch.testing.assert_close(tensor, alone.state()[name], rtol=0, atol=2e-5, msg=name)


def test_too_many_bad_rows_end_the_job() -> None:
    problem = Problem()
    problem.inputs[::5] = math.nan
    with pytest.raises(Stopped) as stopped:
        problem.run(replace(FINITE, bad_rows="quarantine"))
    assert stopped.value.code == "TOO_MANY_QUARANTINED"


def test_a_batch_in_parts_has_the_gradients_of_the_whole_batch() -> None:
    torch.manual_seed(1)
    problem = Problem(dropout=0.0)
    problem.net = nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    other = copy.deepcopy(problem)
    settings = replace(FINITE, precision="fp32", batch_size=13, n_epochs=2)
    whole = problem.run(settings)
    parts = list(amp.train(other.net, other.loss, 64, settings, parts_of=lambda batch: batch.split(3)))
    assert [record.loss for record in parts] == pytest.approx([record.loss for record in whole], abs=1e-6)
    for name, tensor in problem.state().items():
        torch.testing.assert_close(tensor, other.state()[name], rtol=0, atol=1e-6, msg=name)


def test_parts_of_a_batch_need_the_memory_of_one() -> None:
    """Counted: the bytes that autograd keeps at once for the backward passes."""

    def most_kept(parts: int) -> int:
        problem = Problem(rows=32 * parts, dropout=0.0)
        problem.net = nn.Sequential(
            nn.Linear(5, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3)
        )
        kept, most = 0, 0

        class Kept:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal kept, most
                self.tensor, self.bytes = tensor, tensor.nbytes
                kept += self.bytes
                most = max(most, kept)

            def __del__(self) -> None:
                nonlocal kept
                kept -= self.bytes

        settings = replace(FINITE, precision="fp32", batch_size=32 * parts)
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda one: one.tensor):
            list(
                amp.train(
                    problem.net, problem.loss, 32 * parts, settings, parts_of=lambda batch: batch.split(32)
                )
            )
        return most

    assert 0 < most_kept(8) <= 1.2 * most_kept(1)


def test_biases_and_norms_do_not_decay() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LayerNorm([4, 4]), nn.Linear(4, 3))
    net[3].weight.requires_grad_(False)
    decaying, spared = learner.parameter_groups(net, 0.1)
    assert [one is net[0].weight for one in decaying["params"]] == [True] and decaying["weight_decay"] == 0.1
    assert len(spared["params"]) == 6 and spared["weight_decay"] == 0.0
    assert not any(one is net[3].weight for one in spared["params"]), "frozen"


def test_tables_of_positions_and_scales_do_not_decay_and_rows_and_columns_of_layers_do() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed, self.gamma = nn.Parameter(torch.ones(1, 9, 4)), nn.Parameter(torch.ones(1, 1, 4))
            self.weight, self.composed = nn.Parameter(torch.ones(1, 4, 1, 1)), nn.Parameter(torch.ones(4, 4))
            self.position_embeddings, self.tokens = nn.Embedding(9, 4), nn.Embedding(7, 4)
            self.one, self.point = nn.Linear(4, 1), nn.Conv2d(4, 1, 1)

    own = Own()
    decaying, _ = learner.parameter_groups(own, 0.1)
    names = {id(one): name for name, one in own.named_parameters()}
    found = {names[id(one)] for one in decaying["params"]}
    assert found == {"composed", "tokens.weight", "one.weight", "point.weight"}


def test_a_buffer_that_forward_replaces_is_put_back_too() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, inputs: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)  # another tensor, not an update in place
            return self.linear(inputs)

    problem = Problem()
    problem.net = nn.Sequential(Average())
    problem.poison(step=2)
    problem.run()
    mean = problem.net[0].mean
    assert torch.isfinite(mean).all()  # type: ignore[arg-type]
    assert mean.abs().sum() > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_data_that_poison_every_step_end_the_job_with_bad_data_and_nothing_touched(precision: str) -> None:
    problem = Problem()
    problem.inputs[:, 0] = math.nan
    before = problem.state()
    with pytest.raises(Stopped, match=r"never finite.*inputs and targets") as stopped:
        problem.run(replace(FINITE, precision=precision, n_epochs=10, max_floor_hits=6))
    assert stopped.value.code == "BAD_DATA"
    assert len(problem.seen) == 6
    assert same(problem.state(), before)


def test_a_loss_that_stops_being_finite_is_called_divergence() -> None:
    problem = Problem()

    def loss(rows: Tensor) -> Tensor:
        return problem.loss(rows) * (1.0 if len(problem.seen) < 5 else math.inf)

    with pytest.raises(Stopped, match=r"no longer is.*learning rate") as stopped:
        list(amp.train(problem.net, loss, 64, replace(FINITE, precision="fp32", n_epochs=10)))
    assert stopped.value.code == "DIVERGED"


def test_a_job_too_short_for_the_bound_fails_if_no_step_was_taken() -> None:
    problem = Problem()
    problem.inputs[:] = math.nan
    with pytest.raises(Stopped, match="not one step was taken") as stopped:
        problem.run(replace(FINITE, max_floor_hits=1000))
    assert stopped.value.code == "BAD_DATA"


def test_a_mask_of_minus_infinity_is_no_damage() -> None:
    problem = Problem()
    problem.net.register_buffer("mask", torch.full((3,), -math.inf))
    assert len(problem.run()) == 8


def test_a_network_whose_loss_knows_no_parameter_is_named_so() -> None:
    problem = Problem()
    unrelated = torch.zeros(1, requires_grad=True)
    with pytest.raises(Stopped, match="no parameter received a gradient"):
        list(amp.train(problem.net, lambda rows: unrelated.sum(), 64, FINITE))


@pytest.mark.parametrize("code", [nn.Embedding(9, 4, sparse=True), nn.EmbeddingBag(9, 4, sparse=True)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_table_with_sparse_gradients_is_named_with_the_line_to_write(
    code: nn.Module, precision: str
) -> None:
    net, x = nn.Sequential(code, nn.Flatten(), nn.LazyLinear(2)), torch.randint(0, 9, (16, 3))
    net(x)
    settings = replace(FINITE, precision=precision)
    with pytest.raises(Stopped, match=r"parameters \[\[9, 4\]\] are sparse.*sparse=False") as stopped:
        list(amp.train(net, lambda rows: net(x[rows]).float().square().mean(), 16, settings))
    assert stopped.value.code == "SPARSE_GRADIENTS"


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_is_named_with_what_to_do(without: Callable[[], Any]) -> None:
    problem = Problem()
    problem.net.forward = without()(problem.net.forward)
    with pytest.raises(Stopped, match=r"no gradient. Does forward run under torch.no_grad") as stopped:
        problem.run()
    assert stopped.value.code == "USER_CODE"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_are_refused_before_an_optimizer_rounds_its_changes_away(dtype: torch.dtype) -> None:
    problem = Problem()
    problem.net[3].to(dtype)
    with pytest.raises(Stopped, match=r"'3.weight' is (b?float16)\), and an optimizer needs") as stopped:
        problem.run()
    assert stopped.value.code == "HALF_WEIGHTS"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_seed_gives_the_same_weights_bit_for_bit_and_another_seed_others(precision: str) -> None:
    start = Problem()
    initial = start.state()

    def trained(seed: int) -> dict[str, Tensor]:
        start.net.load_state_dict(initial)
        start.run(replace(FINITE, seed=seed, precision=precision))
        return start.state()

    first, again, other = trained(11), trained(11), trained(12)
    assert same(first, again)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_the_order_of_the_rows_depends_on_seed_and_epoch_alone() -> None:
    settings = replace(FINITE, n_epochs=3)
    one = [rows.tolist() for _, rows in batch_loop.batches(20, settings)]
    torch.rand(7)  # the global state does not matter
    assert one == [rows.tolist() for _, rows in batch_loop.batches(20, settings)]
    epochs = [[row for batch in one[at : at + 3] for row in batch] for at in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("size", [1, 2, 3, 32, 64])
@pytest.mark.parametrize("rows", [1, 2, 3, 32, 33, 64, 65, 97])
def test_batches_are_even_and_never_leave_one_row_alone(rows: int, size: int) -> None:
    batches = batch_loop.evenly(torch.arange(rows), size)
    lengths = [len(batch) for batch in batches]
    assert torch.cat(list(batches)).tolist() == list(range(rows))
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= size or (size, max(lengths)) == (2, 3)
    assert size == 1 or rows == 1 or min(lengths) > 1


def test_the_scale_grows_in_short_jobs_too() -> None:
    assert [growth_interval(steps) for steps in (10, 2_000, 10_000, 10**6)] == [20, 200, 1000, 2000]
    problem = Problem()
    records = problem.run(replace(FINITE, n_epochs=4, growth_interval=10, init_scale=4.0))
    assert [record.scale for record in records[:21:10]] == [4.0, 8.0, 16.0]


def test_a_scaler_that_switches_itself_off_is_an_error_not_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp.GradScaler, "is_enabled", lambda self: False)
    with pytest.raises(RuntimeError, match="no gradient scaler"):
        amp.grad_scaler("cpu", FINITE, 10)


@pytest.mark.parametrize(
    "bad",
    [
        {"scale_floor": 0.0},
        {"init_scale": 2.0**-20},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"init_scale": math.nan},
    ],
)
def test_scales_that_torch_would_take_and_cannot_work_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"scale_floor|growth_factor"):
        replace(FINITE, **bad)  # type: ignore[arg-type]
