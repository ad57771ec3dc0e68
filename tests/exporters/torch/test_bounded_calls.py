"""A program whose sizes or loops come from numbers answers its samples, and refuses inputs that ask for far more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.question import ELEMENTS_AT_LEAST, PASSES_AT_LEAST
from halfeven.exporters.torch.bounded_calls import Bounds, bounds_of, within
from halfeven.models.errors import NotRun
from halfeven.models.program import runnable
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.fx import GraphModule


def length(x: Tensor) -> Any:
    size = torch.exp(x.mean()).long().clamp_min(1).item()
    torch._check(size >= 0)
    return size


def passes(x: Tensor) -> Tensor:
    """As many as a number says: infinitely many for infinity."""
    most = torch.exp(x.mean())
    zero = torch.zeros(())
    return while_loop(lambda i, a: i < most, lambda i, a: (i + 1, torch.tanh(a)), (zero, x.clone()))[1]  # type: ignore[no-any-return]


GROWING: dict[str, Callable[[Tensor], Tensor]] = {
    "durations": lambda x: torch.repeat_interleave(x, torch.exp(x[:, 0]).long() + 1, dim=0),
    "a range": lambda x: torch.arange(length(x)) * x.mean(),
    "zeros": lambda x: torch.zeros(length(x), 4) + x.mean(0),
    "pairs": lambda x: (lambda n: (n[:, None] - n[None, :]) * x.mean())(torch.arange(length(x))),
    "a count": lambda x: torch.bincount(torch.exp(x[:, 0]).long()) * x.mean(),
    "another size": lambda x: nn.functional.interpolate(x[None, None], size=(length(x), 4))[0, 0],
}
FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[x[:, 0] > 0].sum(0) + x,
    "products": lambda x: torch.tanh(x @ x.mT),
}


class Net(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(x)


SPEC = ModelSpec(
    "net", (TensorSpec("x", "FP32", (Dim(8, 8), Dim(4, 4))),), (TensorSpec("y0", "FP32", ()),), 0
)


def program_of(name: str) -> tuple[GraphModule, Samples]:
    """A program that takes one matrix, and samples of numbers about 2."""
    x = torch.rand(6, 8, 4) + 1.5
    program = torch.export.export(Net((GROWING | FIXED | {"a loop": passes})[name]), (x[0],))
    return runnable(program), Samples({"x": x.numpy()})


def answers_of(module: GraphModule) -> Callable[[Any], dict[str, np.ndarray]]:
    def answer(arrays: Any) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            (answer,) = module(torch.from_numpy(arrays["x"]))
        return {"y0": answer.numpy()}

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GROWING, "a loop"])
def test_what_no_sample_needs_is_refused_before_it_is_made(name: str) -> None:
    module, samples = program_of(name)
    bounds = bounds_of(module, SPEC, samples)
    assert bounds is not None and bounds.elements >= ELEMENTS_AT_LEAST and bounds.calls >= PASSES_AT_LEAST
    plain, bounded = answers_of(module), within(bounds, answers_of(module))
    for _, arrays in samples.batches(0):
        np.testing.assert_array_equal(bounded(arrays)["y0"], plain(arrays)["y0"])
    with pytest.raises(NotRun, match=r"with these inputs, more than .* times as many as with any sample"):
        bounded({"x": np.full((8, 4), 30.0, np.float32)})


@pytest.mark.parametrize("name", FIXED)
def test_a_program_that_reads_no_size_is_not_bounded(name: str) -> None:
    module, samples = program_of(name)
    assert bounds_of(module, SPEC, samples) is None
    answers = answers_of(module)
    assert within(None, answers) is answers


@pytest.mark.slow
def test_a_loop_that_never_ends_is_refused_within_the_count_of_calls() -> None:
    module, _ = program_of("a loop")
    bounded = within(Bounds("net", 500, 10**6), answers_of(module))
    with pytest.raises(NotRun, match="'net' makes more than 500 calls of operations"):
        bounded({"x": np.full((8, 4), np.inf, np.float32)})
