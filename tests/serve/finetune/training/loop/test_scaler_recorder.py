# ruff: noqa: E501 (a table, one case a line)
"""The flight recorder of skipped steps: what it names, that it changes no bit, that a taken step costs no operation."""

import copy
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.half_model import HalfModel
from halfeven.serve.finetune.training.loop.overflow_search import Overflow, _Operations
from halfeven.serve.finetune.training.loop.scaler_recorder import MOST_RECORDS, ScalerRecorder
from halfeven.serve.finetune.training.loop.setting_names import EMULATED
from halfeven.serve.finetune.training.loop.training_terms import GRADIENT_OVERFLOW, Settings
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 6


class Times(nn.Module):
    """A factor in half: 1e-4 forward makes nothing infinite; 2e4 makes gradients so, backward."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Over(Times):
    def forward(self, x: Tensor) -> Tensor:
        return x / self.factor


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half() * x.half()


class Root(nn.Module):
    """A function as steep as a root near zero, in FP32; its gradient goes back to a half."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide - wide.detach() + 1e-8).sqrt().half()


class Masked(nn.Module):
    """An infinity of a mask is none of the overflows."""

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ x.transpose(-2, -1)).masked_fill(torch.eye(x.shape[-2]).bool(), float("-inf"))
        return torch.softmax(scores, -1).half() @ x.half()


class Sequences(nn.Module):
    """Rows of the batch times places: the linear layer sees them flat."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = strong(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, None].expand(-1, 3, -1).reshape(-1, 8)).reshape(len(x), 3, -1).mean(1)


def strong(layer: nn.Module) -> nn.Module:
    """The layer with all its weights set to 1, so that its products add up."""
    for one in layer.parameters():
        nn.init.ones_(one)
    return layer


def net_of(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(strong(nn.Linear(8, 8)), nn.Dropout(0.2), nn.Sequential(*layers), nn.Linear(8, 4))


def one_step(
    net: nn.Module, x: Tensor, weights: Tensor, scale: float, factor: float = 1.0
) -> tuple[ScalerRecorder, nn.Module]:
    """A step over ``x``; the loss counts each row by its weight."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    recorder = ScalerRecorder(net, scaler)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = (out.float().sum(1) * weights).sum() * factor
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return recorder, net


def row(number: int, value: float = 1.0, other: float = 0.0) -> Tensor:
    return torch.full((ROWS,), other).index_fill(0, torch.tensor([number]), value)


def input_with(number: int, value: float) -> Tensor:
    x = torch.rand(ROWS, 8) + 0.5
    x[number] = value
    return x


EVEN = torch.full((ROWS,), 1.0)
PLANTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Tensor, float, tuple[str, str, str, tuple[int, ...]]]] = {
    "forward, the first layer": (lambda: net_of(nn.Identity()), lambda: input_with(2, 6e4), EVEN, 8.0,
        ("0", "linear", "forward", (2,))),
    "forward, a product of its own": (lambda: nn.Sequential(Power(), nn.Linear(8, 4)), lambda: input_with(4, 400.0), EVEN, 8.0,
        ("0", "mul", "forward", (4,))),
    "forward, a convolution": (lambda: nn.Sequential(nn.Unflatten(1, (1, 8)), strong(nn.Conv1d(1, 2, 3)), nn.Flatten()),
        lambda: input_with(1, 6.5e4), EVEN, 8.0, ("1", "conv1d", "forward", (1,))),
    "forward, a layer within a layer": (lambda: nn.Sequential(nn.Sequential(nn.Identity(), strong(nn.Linear(8, 4)))),
        lambda: input_with(5, 6e4), EVEN, 8.0, ("0.1", "linear", "forward", (5,))),
    "forward, two rows": (lambda: net_of(nn.Identity()),
        lambda: input_with(2, 6e4).index_fill(0, torch.tensor([0]), 6.1e4), EVEN, 8.0, ("0", "linear", "forward", (0, 2))),
    "forward, places of a sequence": (Sequences, lambda: input_with(3, 6e4), EVEN, 8.0, ("inner", "linear", "forward", (3,))),
    "backward, a factor": (lambda: net_of(Times(1e-4), Times(2e4)), lambda: input_with(0, 1.0), row(3), 2.0**9,
        ("2.1", "mul (MulBackward0)", "backward", (3,))),
    "backward, a divisor": (lambda: net_of(Times(1e-4), Over(1e-4)), lambda: input_with(0, 1.0), row(1), 2.0**9,
        ("2.1", "div (DivBackward0)", "backward", (1,))),
    "backward, the cast of the loss": (lambda: net_of(nn.Identity()), lambda: input_with(0, 1.0), row(2), 2.0**17,
        ("the loss", "its gradient", "backward", (2,))),
    "backward, a weight's gradient": (lambda: nn.Sequential(nn.Linear(8, 4)), lambda: input_with(4, 300.0), EVEN, 2.0**12,
        ("0", "linear (AddmmBackward0)", "backward", (4,))),
    "backward, a weight's gradient by the sum alone": (lambda: nn.Sequential(nn.Linear(8, 4)), lambda: torch.full((ROWS, 8), 12.0),
        EVEN, 2.0**12, ("0", "linear (AddmmBackward0)", "backward", ())),
    "backward, a steep root": (lambda: net_of(Root(), Times(1.0)), lambda: input_with(0, 1.0), row(5), 2.0**15,
        ("2.0", "float (ToCopyBackward0)", "backward", (5,))),
    "backward behind a mask": (lambda: nn.Sequential(nn.Linear(8, 8), Masked(), Times(1e-4), Times(2e4)), lambda: input_with(0, 1.0), row(4), 2.0**9,
        ("3", "mul (MulBackward0)", "backward", (4,))),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_overflow_is_named_with_its_layer_its_operation_and_its_rows(name: str) -> None:
    build, inputs, weights, scale, expected = PLANTED[name]
    torch.manual_seed(7)
    recorder, _ = one_step(build(), inputs(), weights, scale)
    assert recorder.skipped == 1
    (overflow,) = recorder.records
    assert (overflow.layer, overflow.operation, overflow.direction, overflow.rows) == expected
    assert (overflow.step, overflow.scale) == (1, scale)
    assert overflow.layer in str(overflow) and all(str(one) in str(overflow) for one in overflow.rows)


def trained(watched: bool) -> tuple[list[Any], ScalerRecorder | None]:
    """Eight steps with dropout, BatchNorm, accumulation and overflows; the state at the end, bit for bit."""
    torch.manual_seed(3)
    net = nn.Sequential(
        strong(nn.Linear(8, 16)), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=3)
    recorder = ScalerRecorder(net, scaler) if watched else None
    for step in range(8):
        for part in range(2):
            x, y = torch.randn(5, 8), torch.randint(0, 4, (5,))
            if (step, part) == (6, 1):
                x[3] = 6e4
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    moments = [one for state in optimizer.state_dict()["state"].values() for one in state.values()]
    return [
        *net.state_dict().values(),
        *moments,
        torch.get_rng_state(),
        torch.tensor(scaler.get_scale()),
    ], recorder


def test_no_bit_changes_with_the_recorder_on_and_a_part_of_a_batch_is_told() -> None:
    plain, _ = trained(watched=False)
    watched, recorder = trained(watched=True)
    assert [one.numpy().tobytes() for one in plain] == [one.numpy().tobytes() for one in watched]
    assert recorder is not None and recorder.skipped >= 2
    (overflow,) = [one for one in recorder.records if one.step == 7]
    assert (overflow.layer, overflow.direction, overflow.rows) == ("0", "forward", (3,))


LEARNT: dict[str, list[Tensor]] = {}


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_a_step_that_is_taken_runs_no_operation_more_and_keeps_nothing() -> None:
    counts = []
    for watched in (False, True):
        net = net_of(nn.ReLU())
        optimizer, scaler = (
            torch.optim.SGD(net.parameters(), lr=0.1),
            torch.amp.GradScaler("cpu", init_scale=8.0),
        )
        recorder = ScalerRecorder(net, scaler if watched else None)
        recorder = recorder if watched else recorder.close()
        with Counted() as counted:
            for _ in range(3):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = net(torch.ones(ROWS, 8)).float().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        counts.append(counted.operations)
        if recorder is not None:
            assert not recorder._passes and recorder.skipped == 0
    assert counts[0] == counts[1]


def test_records_are_bounded_and_after_close_nothing_is_watched() -> None:
    net = nn.Sequential(nn.Linear(8, 4))
    optimizer, scaler = (
        torch.optim.SGD(net.parameters(), lr=0.0),
        torch.amp.GradScaler("cpu", init_scale=2.0**40),
    )
    with ScalerRecorder(net, scaler) as recorder:
        for _ in range(MOST_RECORDS + 5):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.full((2, 8), 6e4)).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
            scaler.update(2.0**40)
    assert recorder.skipped == MOST_RECORDS + 5 and len(recorder.records) == MOST_RECORDS
    assert "step" not in vars(scaler) and not net._forward_hooks and not net._forward_pre_hooks


LARGE = Times(2e4)
GANS: dict[str, tuple[float, float, nn.Module, nn.Module, tuple[str, str] | None]] = {
    "nothing": (1e-3, 1e-3, nn.Identity(), LARGE, None),
    "the critic's own loss": (1.0, 1e-3, nn.Identity(), LARGE, ("critic", "critic.1")),
    "the generator's, in the critic": (1e-3, 1.0, nn.Identity(), LARGE, ("generator", "critic.1")),
    "the generator's, in its own layer": (1e-3, 1.0, LARGE, nn.Identity(), ("generator", "generator.1")),
    "the generator's own values": (1e-3, 1e-3, Over(1e-7), nn.Identity(), ("generator", "generator.1")),
}  # fmt: skip


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", GANS)
def test_of_two_optimizers_with_one_scaler_the_skipped_one_is_named(name: str, together: bool) -> None:
    """One step behind each backward, or both steps behind both."""
    of_critic, of_generator, inner, judging, expected = GANS[name]
    torch.manual_seed(7)
    generator, critic = nn.Sequential(nn.Linear(8, 8), inner), nn.Sequential(strong(nn.Linear(8, 8)), judging)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, generator)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    noise, real = torch.rand(ROWS, 8) * 1e-3, torch.rand(ROWS, 8) * 1e-3
    weights = [next(one.parameters()) for one in (critic, generator)]
    before = [one.detach().clone() for one in weights]
    with ScalerRecorder({"generator": generator, "critic": critic}, scaler) as recorder:
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                fake = generator(noise).nan_to_num(0.0, 0.0, 0.0)
            loss = critic(real).float().sum() * of_critic - critic(fake).float().mean() * 1e-3
        scaler.scale(loss).backward()
        if not together:
            scaler.step(optimizers[0])
        critic.requires_grad_(False)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = critic(generator(noise)).float().sum() * of_generator
        scaler.scale(loss).backward()
        critic.requires_grad_(True)
        for one in optimizers[0 if together else 1 :]:
            scaler.step(one)
        scaler.update()
        found = [(one.net, one.layer) for one in recorder.records]
    assert found == ([expected] if expected else []) and recorder.skipped == len(found)
    learnt = [not torch.equal(old, one) for old, one in zip(before, weights, strict=True)]
    assert learnt == [expected is None or expected[0] != net for net in ("critic", "generator")]
    assert not recorder._passes and "update" not in vars(scaler)
    assert not found or str(recorder.records[0]).startswith(f"the step of {found[0][0]} was skipped: the ")


def test_the_words_of_an_overflow_name_layer_operation_and_rows() -> None:
    overflow = Overflow(7, 1024.0, "body.2", "linear (AddmmBackward0)", "backward", (0, 3))
    assert str(overflow) == (
        "the gradients of body.2 left the range of half first, in linear (AddmmBackward0) in rows 0, 3"
    )


@pytest.mark.parametrize("watched", [False, True])
def test_a_step_of_our_own_loop_tells_the_row_and_learns_the_same(watched: bool) -> None:
    x, counts = torch.rand(32, 8, generator=torch.Generator().manual_seed(1)), torch.ones(32)
    counts[17] = 1e6
    settings = Settings(n_epochs=2, batch_size=8, precision="fp16", seed=4, init_scale=2.0**8)
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    loop = Loop(net, lambda rows: (net(x[rows]).float().sum(1) * counts[rows]).mean(), 32, settings)
    recorder = loop.recorder = ScalerRecorder(net) if watched else None
    records = list(loop.run())
    LEARNT.setdefault("plain", [one.clone() for one in net.state_dict().values()])
    assert [one.numpy().tobytes() for one in net.state_dict().values()] == [
        one.numpy().tobytes() for one in LEARNT["plain"]
    ]
    skipped = [one for one in records if one.cause == GRADIENT_OVERFLOW]
    assert skipped and not any(one.overflow for one in records if not one.skipped)
    if recorder is not None:
        assert {one.overflow for one in skipped} == {
            ("the gradients of the loss left the range of half first, in its gradient", (17,))
        }
        assert not recorder._passes


class Seen(TorchDispatchMode):
    """Notes the type of what each product of matrices or layers is given, below all other modes."""

    def __init__(self) -> None:
        super().__init__()
        self.given: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "convolution", "convolution_backward"):
            self.given.add((name, args[-1 if name == "mm" else 1].dtype))
        return func(*args, **(kwargs or {}))


def test_the_search_emulates_the_products_that_the_training_emulated() -> None:
    x, counts = torch.rand(16, 1, 8), torch.ones(16)
    counts[5] = 1e6
    settings = Settings(n_epochs=1, batch_size=8, precision=EMULATED, init_scale=2.0**8)
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 4))
    loop = Loop(net, lambda rows: (net(x[rows]).float().sum(1) * counts[rows]).mean(), 16, settings)
    loop.record_overflows(copy.deepcopy)
    with Seen() as seen:
        skipped = [one.overflow for one in loop.run() if one.cause == GRADIENT_OVERFLOW]
    assert skipped == [("the gradients of the loss left the range of half first, in its gradient", (5,))]
    assert {name for name, _ in seen.given} == {"mm", "addmm", "convolution", "convolution_backward"}
    assert {dtype for _, dtype in seen.given} == {torch.float32}


@pytest.mark.parametrize(("row_of_many", "most"), [(37, 13), (None, 3)])
def test_the_row_is_found_in_few_backward_passes(
    row_of_many: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One finds the operation; then two for each halving of the rows, and two where only their sum is too large."""
    passes, run = list[int](), _Operations._run

    def counted(given: Any, weights: Any) -> Any:
        passes.append(1)
        return run(given, weights)

    monkeypatch.setattr(_Operations, "_run", staticmethod(counted))
    x = torch.full((64, 8), 12.0 if row_of_many is None else 0.01)
    if row_of_many is not None:
        x[row_of_many] = 300.0
    weights = torch.full((64,), 1 / 32 if row_of_many is None else 1 / 8)
    recorder, _ = one_step(nn.Sequential(nn.Linear(8, 4)), x, weights, 2.0**12)
    assert [one.rows for one in recorder.records] == [() if row_of_many is None else (row_of_many,)]
    assert len(passes) <= most


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_an_overflow_of_a_half_model_is_named(level: str) -> None:
    settings = Settings(n_epochs=1, batch_size=ROWS, precision="fp16", opt_level=level, init_scale=2.0**9)
    net = net_of(Times(1e-4), Times(2e4))
    half, x = HalfModel(net, torch.float16, norms=level == "O2"), input_with(0, 1.0)
    half.look(x[:2])
    forward: Callable[[Tensor], Tensor] = cast("Any", half)  # one answer
    loop = Loop(net, lambda rows: (forward(x[rows]).float().sum(1) * row(3)[rows]).sum(), ROWS, settings)
    loop.record_overflows(half.copied)
    found = [one.overflow for one in loop.run()]
    words = "the gradients of 2.1 left the range of half first, in mul (MulBackward0)"
    assert found == [(words, (3,))]


def test_a_search_that_fails_says_why() -> None:
    net, x = net_of(nn.Identity()), input_with(0, 1.0)
    net.__dict__["lock"] = threading.Lock()  # it cannot be copied
    settings = Settings(n_epochs=1, batch_size=ROWS, precision="fp16", init_scale=2.0**20)
    loop = Loop(net, lambda rows: net(x[rows]).float().sum(), ROWS, settings)
    loop.record_overflows(copy.deepcopy)
    found = [one.overflow for one in loop.run()]
    words = "the search for where values left the range of half failed: TypeError: cannot pickle"
    assert found[0] is not None and found[0][0].startswith(words) and not found[0][1]
