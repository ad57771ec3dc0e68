"""A failed capture is told: the construct, the user's line, what to do; a NaN with the node that made it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.capture import child as capture_child
from halfeven.models.capture import failures
from halfeven.models.capture.agreement import check
from torch import Tensor, nn
from torch._dynamo.exc import UncapturedHigherOrderOpError

ROWS = 8
Forward = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """A Linear(4, 4) and a forward of the test's."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def request(outputs: int = 1, max_batch_size: int = 8) -> dict[str, Any]:
    return {
        "inputs": [{"name": "x", "dims": [[1, None], [4, 4]]}],
        "outputs": [f"y{i}" for i in range(outputs)],
        "max_batch_size": max_batch_size,
        "folder": str(Path(__file__).parent),
        "path": [],
        "memory_limit_bytes": 0,
    }


def described(
    forward: Forward, samples: Tensor | None = None, folder: Path = Path(__file__).parent, **settings: Any
) -> str:
    """The child's words about a module that it cannot capture."""
    asked = {**request(**settings), "folder": str(folder)}
    flat = capture_child.Flat(Net(forward).eval().requires_grad_(False), asked)
    given = [torch.randn(ROWS, 4) if samples is None else samples]
    with torch.no_grad():
        try:
            program = capture_child.export(torch, flat, given, asked)
            check(torch, flat, program, given, asked)
        except Exception as error:
            return failures.described(error, asked)["error"]
    raise AssertionError("it was captured")


def branches(net: Net, x: Tensor) -> Tensor:
    if x.sum() > 0:  # decides
        return net.linear(x)
    return x


def asserts(net: Net, x: Tensor) -> Tensor:
    assert (x > -1e9).all()  # decides
    return net.linear(x)


def reads_a_number(net: Net, x: Tensor) -> Tensor:
    count = int(x[0, 0].item())  # decides
    return net.linear(x)[:, :count]


def calls_numpy(net: Net, x: Tensor) -> Tensor:
    return net.linear(torch.tensor(np.tanh(x)))  # decides


def writes_a_number_out(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    return y.reshape(3, 4)  # decides


def makes_a_list(net: Net, x: Tensor) -> Tensor:
    return net.linear(x) + torch.zeros(len(x.tolist()), 1)  # decides


def writes_a_device(net: Net, x: Tensor) -> Tensor:
    return net.linear(x.cuda())  # decides


def writes_a_dtype(net: Net, x: Tensor) -> Tensor:
    return net.linear(x.half())  # decides


def gives_two_shapes(net: Net, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sum(), lambda y: y.cos(), (x,))  # decides


def looks_at_memory(net: Net, x: Tensor) -> Tensor:
    return net.linear(x) * x.data_ptr()  # decides


def makes_sparse(net: Net, x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse(), net.linear.weight)  # decides


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CUDA")
@pytest.mark.parametrize(
    ("forward", "construct", "remedy", "theirs"),
    [
        (
            branches,
            "a decision that depends on a tensor's values",
            "torch.where",
            "data-dependent expression",
        ),
        (asserts, "an assertion about a tensor's values", "take it out of forward", "data-dependent"),
        (
            reads_a_number,
            "read from a tensor's values (.item())",
            "take it from a shape",
            "specialized integer",
        ),
        (calls_numpy, "a NumPy call on a tensor", "torch's own function", ".numpy() is not supported"),
        (writes_a_number_out, "a free size that the code turns into a constant", "x.shape", "constant (3)"),
        (makes_a_list, "a free size that the code turns into a constant", ".tolist()", "constant (3)"),
        (writes_a_device, "a device written into the code", "x.device", "cuda"),
        (writes_a_dtype, "a half dtype written into the code", ".to(weight.dtype)", "same dtype"),
        (gives_two_shapes, "torch.cond whose two branches", "make both branches give the same", "torch.cond"),
        (looks_at_memory, "a kernel that torch.export cannot look into", "torch's own", "data pointer"),
        (makes_sparse, "something that torch.export cannot trace", "change it", "_to_sparse"),
    ],
)
def test_a_construct_that_cannot_be_captured_is_told_with_its_line_and_a_way_out(
    forward: Forward, construct: str, remedy: str, theirs: str
) -> None:
    message = described(forward)
    code = Path(__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(code) if line.startswith(f"def {forward.__name__}("))
    number = next(i for i in range(start, len(code)) if "# decides" in code[i]) + 1
    sentence = message.splitlines()[0]
    assert construct in sentence and remedy in sentence and 'form = "live"' in sentence, message
    assert f" at {__file__}:{number} (`" in sentence, message
    assert theirs in message.partition("\n")[2], message


def test_a_construct_inside_a_library_is_told_with_the_librarys_line(tmp_path: Path) -> None:
    sentence = described(branches, folder=tmp_path).splitlines()[0]
    assert "a decision" in sentence and f" at {__file__}:" in sentence and "x.sum() > 0" in sentence


def test_an_error_of_the_users_own_is_told_in_its_own_words() -> None:
    def raises(net: Net, x: Tensor) -> Tensor:
        raise ValueError("of mine")

    assert described(raises) == "ValueError: of mine"


def overflows(net: Net, x: Tensor) -> Tensor:
    y = (x * 1000).exp()
    return net.linear(y / y.sum(-1, keepdim=True))


def masks_a_whole_row(net: Net, x: Tensor) -> Tensor:
    masked = x.masked_fill(x == x, -torch.inf)
    return masked.softmax(-1)


def takes_a_log(net: Net, x: Tensor) -> Tensor:
    return (-1 - net.linear(x + net.get_buffer("mask").softmax(-1)[0]).abs()).log()


def multiplies_a_mask(net: Net, x: Tensor) -> Tensor:
    return net.linear(x) + (x > 0).float() * -torch.inf


def mends_one_and_makes_another(net: Net, x: Tensor) -> Tensor:
    mended = torch.where(x > 0, x.log(), 0.0)
    return net.linear(mended) + x.sqrt()


@pytest.mark.parametrize(
    ("forward", "maker"),
    [
        (overflows, r"'exp' \(aten.exp.default\).* is the first to give Inf, which 'div' turns into NaN"),
        (masks_a_whole_row, r"'softmax' \(aten.softmax.int\).* is the first to give NaN"),
        (takes_a_log, r"'log' \(aten.log.default\).* is the first to give NaN"),
        (mends_one_and_makes_another, r"'sqrt' \(aten.sqrt.default\).* is the first to give NaN"),
        (multiplies_a_mask, r"'mul' \(aten.mul.Tensor\).* is the first to give NaN"),
    ],
)
def test_a_nan_of_the_modules_own_is_told_with_the_node_that_made_it(forward: Forward, maker: str) -> None:
    message = described(forward, torch.randn(ROWS, 4).abs() + torch.tensor([-9.0, 1.0, 1.0, 1.0]) * 3)
    assert "the FP32 model itself does not answer: output 'y0' is NaN for sample 0" in message
    assert re.search(maker, message), message
    assert f"{__file__}:" in message


def test_only_the_samples_that_are_nan_are_named() -> None:
    samples = torch.rand(ROWS, 4) + 1
    samples[2] = -1
    message = described(lambda net, x: x.log(), samples)
    assert "output 'y0' is NaN for sample 2; 'log'" in message


@pytest.mark.slow
def test_a_weight_and_an_input_that_hold_a_nan_are_to_blame_themselves() -> None:
    def spoilt(net: Net, x: Tensor) -> Tensor:
        return net.linear(x)

    samples = torch.randn(ROWS, 4)
    samples[0, 1] = torch.nan
    assert "for sample 0; the input 'x' holds NaN" in described(spoilt, samples)
    asked = request()
    net = Net(spoilt).eval().requires_grad_(False)
    net.linear.bias[2] = torch.nan
    flat, samples = capture_child.Flat(net, asked), [torch.randn(ROWS, 4)]
    with torch.no_grad(), pytest.raises(capture_child.Refused, match=r"the weight '.*linear.bias' holds NaN"):
        check(torch, flat, capture_child.export(torch, flat, samples, asked), samples, asked)


def test_masks_of_minus_infinity_and_infinite_answers_are_no_fault() -> None:
    def masked(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = net.linear(x)
        return (scores.unsqueeze(1) + net.get_buffer("mask")).softmax(-1), scores.masked_fill(
            x > 0, -torch.inf
        )

    asked = request(outputs=2)
    flat = capture_child.Flat(Net(masked).eval().requires_grad_(False), asked)
    samples = [torch.randn(ROWS, 4)]
    with torch.no_grad():
        program = capture_child.export(torch, flat, samples, asked)
        facts = check(torch, flat, program, samples, asked)
    assert facts == {"notes": [], "max_batch_size": 8}


class _OnlyAt(nn.Module):
    """A module that torch's compiler gives up on at batch sizes other than ``sizes``."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting() or x.shape[0] in self.sizes:
            return x * 2
        raise UncapturedHigherOrderOpError("cannot be compiled")


@pytest.mark.parametrize(("sizes", "left_out"), [((2, 3, 8), [1]), ((3,), [1, 2, 8]), ((1, 2, 8), None)])
def test_a_size_at_which_torch_cannot_run_the_module_is_left_out_but_never_that_of_the_capture(
    sizes: tuple[int, ...], left_out: list[int] | None
) -> None:
    asked = request()
    flat, samples = capture_child.Flat(_OnlyAt(*sizes).eval(), asked), [torch.randn(ROWS, 4)]
    program = capture_child.export(torch, flat, samples, asked)
    if left_out is None:
        with pytest.raises(UncapturedHigherOrderOpError):
            check(torch, flat, program, samples, asked)
    else:
        facts = check(torch, flat, program, samples, asked)
        assert [re.findall(r"batch size (\d+)", note) for note in facts["notes"]] == [
            [str(n)] for n in left_out
        ]
