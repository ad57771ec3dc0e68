"""The cost of the kernels of a half type on this processor: processor time in times of FP32's, for an answer alone and
for a training step, each asked as it is used (under autocast; a step in training mode, with its backward pass).

A kernel that exists for answers may be missing in training, and one that exists may be a reference implementation:
measured on a processor with AVX512-FP16, a training step of a convolution took 180 times as long in FP16 as in FP32.
Needs torch alone.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

Clock = Callable[[], float]
RUNS = 3  # after one that is not counted; the shortest counts
SLOW = 5.0  # times FP32's processor time: more is worth a word


class _States(nn.Module):
    """The states of a recurrent layer, without its last ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


# The layers that are timed, by the name that people know. They are small, because a reference kernel takes a hundred
# times as long.
KINDS: Mapping[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Linear(256, 256), torch.randn(64, 256)),
    "conv1d": lambda: (nn.Conv1d(32, 32, 5, padding=2), torch.randn(4, 32, 128)),
    "conv2d": lambda: (nn.Conv2d(16, 32, 3, padding=1), torch.randn(2, 16, 28, 28)),
    "grouped conv2d": lambda: (nn.Conv2d(16, 16, 3, padding=1, groups=4), torch.randn(2, 16, 28, 28)),
    "depthwise conv2d": lambda: (nn.Conv2d(16, 16, 3, padding=1, groups=16), torch.randn(2, 16, 28, 28)),
    "conv3d": lambda: (nn.Conv3d(4, 8, 3, padding=1), torch.randn(2, 4, 8, 14, 14)),
    "transposed conv2d": lambda: (nn.ConvTranspose2d(32, 16, 4, 2, 1), torch.randn(2, 32, 14, 14)),
    "lstm": lambda: (_States(nn.LSTM(16, 32, batch_first=True)), torch.randn(4, 8, 16)),
    "two-way lstm": lambda: (
        _States(nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True)),
        torch.randn(4, 8, 16),
    ),
    "gru": lambda: (_States(nn.GRU(16, 32, batch_first=True)), torch.randn(4, 8, 16)),
    "attention": lambda: (_Attention(), torch.randn(4, 16, 64)),
    "layer norm": lambda: (nn.LayerNorm(256), torch.randn(64, 256)),
}


_OF_LAYERS = {
    nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d",
    nn.ConvTranspose2d: "transposed conv2d", nn.LSTM: "lstm", nn.GRU: "gru", nn.MultiheadAttention: "attention",
}  # fmt: skip
_OF_OPERATORS = {
    "linear": "linear", "addmm": "linear", "conv1d": "conv1d", "conv2d": "conv2d", "conv3d": "conv3d",
    "conv_transpose2d": "transposed conv2d", "lstm": "lstm", "gru": "gru",
    "scaled_dot_product_attention": "attention",
}  # fmt: skip


def kinds_of(module: nn.Module) -> list[str]:
    """The kinds among the layers of a module, or among the operators of a captured program, in the order of `KINDS`."""
    found: set[str] = set()
    for part in module.modules():
        if isinstance(part, GraphModule):
            names = [str(node.target).split(".") for node in part.graph.nodes]
            found |= {
                _OF_OPERATORS[name[1]] for name in names if name[0] == "aten" and name[1] in _OF_OPERATORS
            }
        for layer, kind in _OF_LAYERS.items():
            if isinstance(part, layer):
                found.add(_grouped(part, kind) if isinstance(part, nn.Conv2d) else kind)
    return [kind for kind in KINDS if kind in found]


def _grouped(layer: nn.Conv2d, kind: str) -> str:
    if layer.groups == 1:
        return kind
    return f"depthwise {kind}" if layer.groups == layer.in_channels else f"grouped {kind}"


@dataclass(frozen=True, slots=True)
class Cost:
    """Times FP32's processor time; None where there is no kernel, and ``fault`` is then what torch says."""

    answer: float | None
    training: float | None
    fault: str = ""

    @property
    def slow_to_train(self) -> bool:
        return self.training is None or self.training > SLOW

    def __str__(self) -> str:
        answer, training = (
            "no kernel" if one is None else f"{one:.2g}" for one in (self.answer, self.training)
        )
        return answer if answer == training else f"{answer} (training {training})"


@cache
def costs_here(dtype: torch.dtype) -> Mapping[str, Cost]:
    """The costs of every kind on this processor, measured once in a process; about a second."""
    return kernel_costs(dtype)


def kernel_costs(
    dtype: torch.dtype, kinds: Collection[str] = tuple(KINDS), clock: Clock = time.process_time
) -> dict[str, Cost]:
    """The costs of ``kinds`` in ``dtype``. The caller's generator is as before."""
    with torch.random.fork_rng(devices=()), one_thread():
        torch.manual_seed(0)
        return {kind: _cost(*KINDS[kind](), dtype, clock) for kind in kinds}


def _cost(module: nn.Module, x: Tensor, dtype: torch.dtype, clock: Clock) -> Cost:
    answer, no_answer = _times(module.eval(), x, dtype, False, clock)
    training, no_training = _times(module.train(), x, dtype, True, clock)
    return Cost(answer, training, no_answer or no_training)


def _times(
    module: nn.Module, x: Tensor, dtype: torch.dtype, train: bool, clock: Clock
) -> tuple[float | None, str]:
    """Times FP32's, or None and the first line of what torch says."""
    try:
        half = _shortest(_run(module, x, dtype, train), clock)
    except RuntimeError as error:
        return None, str(error).strip().partition("\n")[0]
    return half / max(_shortest(_run(module, x, None, train), clock), 1e-9), ""


def _run(module: nn.Module, x: Tensor, dtype: torch.dtype | None, train: bool) -> Callable[[], None]:
    def run() -> None:
        module.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_(train)
        with (
            torch.set_grad_enabled(train),
            torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
        ):
            answer = module(given)
        if train:
            answer.float().pow(2).mean().backward()

    return run


def _shortest(run: Callable[[], None], clock: Clock) -> float:
    run()
    found: list[float] = []
    for _ in range(RUNS):
        began = clock()
        run()
        found.append(clock() - began)
    return min(found)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread inside: of several, those that wait for each other take processor time too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
