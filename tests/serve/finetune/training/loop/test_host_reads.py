"""The host runs ahead of a device. Reads of a tensor's numbers make it wait, and are counted here on a CPU."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.batch_loop import batches
from halfeven.serve.finetune.training.loop.half_model import HalfModel
from halfeven.serve.finetune.training.loop.learner import learner_of
from halfeven.serve.finetune.training.loop.step_loop import StepLoop
from halfeven.serve.finetune.training.loop.training_terms import (
    GRADIENT_OVERFLOW,
    NON_FINITE_LOSS,
    Settings,
)
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.serve.finetune.training.loop.pair import SETTINGS as OF_A_PAIR
from tests.serve.finetune.training.loop.pair import Pair, declared

ROWS = 64
X, Y = torch.randn(ROWS, 8), torch.randn(ROWS, 2)
ADAMW = torch.optim.AdamW


@dataclass
class Counted:
    reads: int = 0
    casts: int = 0


class _Lists(TorchFunctionMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted.reads += func is Tensor.tolist
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, counted: Counted, weights: set[int]) -> None:
        super().__init__()
        self.counted, self.weights = counted, weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted.reads += func is torch.ops.aten._local_scalar_dense.default
        self.counted.casts += func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.weights
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(module: nn.Module) -> Iterator[Counted]:
    """Reads of numbers (`item`, `bool`, `tolist`), and casts of the module's weights."""
    counted = Counted()
    weights = {one.data_ptr() for one in module.parameters()}
    with _Lists(counted), _Operations(counted, weights):
        yield counted


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is that of a CUDA device, which a CPU has as well."""

    def made(*given: Any, **named: Any) -> torch.optim.Optimizer:
        return ADAMW(*given, **{**named, "fused": True})

    monkeypatch.setattr(torch.optim, "AdamW", made)


def loop_of(
    level: str,
    precision: str = "fp16",
    most: int = 32,
    runs_ahead: bool = True,
    spoilt: float = 0.0,
    device: str = "cpu",
) -> Loop:
    """``most``: rows of one pass; ``spoilt`` is added to one number of the second batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
    x, y = X.to(device), Y.to(device)
    forward = HalfModel(net, torch.float16) if level == "O2" else net
    settings = Settings(batch_size=16, precision=precision, opt_level=level, init_scale=256.0, n_epochs=2)
    calls = 0

    def loss(rows: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        there = rows if device == "cpu" else rows.pin_memory().to(device, non_blocking=True)
        answer = forward(x[there])
        gap = (answer[0] if isinstance(answer, tuple) else answer).float() - y[there]
        return gap.square().mean() + (spoilt * gap.sum() if calls == 2 else 0.0)

    loop = Loop(net, loss, ROWS, settings, device, parts_of=lambda batch: batch.split(most))
    loop.passes.runs_ahead = runs_ahead
    return loop


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("most", [16, 4])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_reads_the_device_two_times_however_many_passes_it_has(
    level: str, precision: str, most: int
) -> None:
    loop = loop_of(level, precision, most)
    steps = loop.run()
    next(steps)
    with counting(loop.module) as counted:
        record = next(steps)
    assert counted.reads == 2 and not record.skipped and math.isfinite(record.loss)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("spoilt", "cause", "most"), [(1e30, GRADIENT_OVERFLOW, 5), (math.inf, NON_FINITE_LOSS, 1)]
)
def test_only_a_step_whose_gradients_overflow_reads_the_scale_too(
    spoilt: float, cause: str, most: int
) -> None:
    loop = loop_of("O1", spoilt=spoilt)
    steps = loop.run()
    next(steps)
    with counting(loop.module) as counted:
        record = next(steps)
    assert record.cause == cause and counted.reads <= most


@pytest.mark.usefixtures("fused")
def test_several_optimizers_read_the_device_two_times_each() -> None:
    pair = Pair()
    loop = StepLoop(pair.nets, declared(), pair.losses(), len(pair.x), OF_A_PAIR)
    for step in loop.in_order:
        step.passes.runs_ahead = True
    steps = loop.run()
    next(steps)
    with counting(loop.module) as counted:
        next(steps)
    assert counted.reads == 2 * len(loop.in_order)


@pytest.mark.parametrize("spoilt", [0.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_to_read_later_changes_no_bit_of_what_is_learnt_skipped_and_recorded(
    level: str, spoilt: float
) -> None:
    loops = [loop_of(level, runs_ahead=ahead, most=8, spoilt=spoilt) for ahead in (False, True)]
    records = [list(loop.run()) for loop in loops]
    assert str(records[0]) == str(records[1]) and any(one.skipped for one in records[0]) == bool(spoilt)
    for name, one in loops[0].module.state_dict().items():
        assert torch.equal(one, loops[1].module.state_dict()[name]), name


def test_o2_casts_a_weight_one_time_in_a_step_and_learns_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = loop_of("O2", most=4)
    steps = loop.run()
    next(steps)
    with counting(loop.module) as counted:
        next(steps)
    assert counted.casts == 4, "two linear layers with a bias each; BatchNorm stays as it is"
    list(steps)
    monkeypatch.setattr(HalfModel, "_half", lambda self, one: one.to(self.dtype))
    other = loop_of("O2", most=4)
    list(other.run())
    for name, one in loop.module.state_dict().items():
        assert torch.equal(one, other.module.state_dict()[name]), name


def test_the_optimizer_is_one_kernel_on_cuda_and_as_it_was_on_a_cpu() -> None:
    assert learner_of(nn.Linear(2, 2), Settings(), 1).optimizer.defaults["fused"] is None
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        there = nn.ParameterList([torch.empty(2, 2, device="cuda")])
        optimizer = learner_of(there, Settings(), 1).optimizer
    assert optimizer.defaults["fused"] is True


def test_the_rows_of_the_next_step_of_an_epoch_are_asked_for_before_the_host_waits() -> None:
    loop, asked = loop_of("O1"), list[tuple[int, list[int]]]()
    loop.on_next = lambda batch: asked.append((loop.done, batch.tolist()))
    seen = [rows.tolist() for _, rows in batches(ROWS, loop.settings)]
    list(loop.run())
    per_epoch = ROWS // 16
    expected = [(step, seen[step + 1]) for step in range(2 * per_epoch) if (step + 1) % per_epoch]
    assert asked == expected


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_on_cuda_waits_two_times(level: str) -> None:
    loop = loop_of(level, device="cuda")
    steps = loop.run()
    next(steps)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(one.message) for one in caught) == 2
