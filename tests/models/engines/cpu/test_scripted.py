"""Programs without Python's lock: the same bits, nobody beside them waits, and an error says what torch said."""

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from halfeven.models.engines.cpu.in_place import write_in_place
from halfeven.models.engines.cpu.one_product import make_one_product
from halfeven.models.engines.cpu.packed import pack_weights
from halfeven.models.engines.cpu.scripted import without_the_lock
from halfeven.models.engines.cpu.setup import WITHOUT_LOCK, CpuSetup
from halfeven.models.engines.staged_engine import joined
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.index_ranges.input_ranges import with_ranges
from halfeven.models.program import runnable, walk
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from tests.control_flow import CONTROL_FLOW
from tests.corpus import CORPUS, captured, fresh, of_a_run
from tests.nets import NETS, captured_net
from tests.programs import Original, exported_as_it_is, original
from tests.slow import slow_but

CPU = torch.device("cpu")
SCRIPTED = CpuSetup(passes=frozenset((WITHOUT_LOCK,)))


def as_served(found: Original) -> GraphModule:
    """The program with all that an engine on a CPU does to it before."""
    module = runnable(found.program)
    pack_weights(module)
    write_in_place(module)
    make_one_product(module)
    return module


def assert_same_bits(module: GraphModule, inputs: list[Tensor]) -> None:
    with torch.inference_mode():
        expected = module(*[tensor.clone() for tensor in inputs])
        came = without_the_lock(module)(*[tensor.clone() for tensor in inputs])
    assert len(came) == len(expected)
    for one, other in zip(came, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(torch.isnan(one), torch.isnan(other))
        assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", sorted(NETS))
def test_a_net_answers_the_same_bits(name: str, rows: int) -> None:
    net = NETS[name]
    module = as_served(captured_net(name))
    assert without_the_lock(module) is not module
    assert_same_bits(module, list(net.inputs(rows).values()))


@pytest.mark.parametrize("name", slow_but((), of_a_run()))
def test_a_model_of_the_corpus_answers_the_same_bits_and_only_control_flow_stays_in_python(name: str) -> None:
    module = as_served(captured(name))
    has_bodies = any(isinstance(node.target, torch._ops.HigherOrderOperator) for _, node in walk(module))
    assert (without_the_lock(module) is module) == has_bodies
    assert_same_bits(module, list(fresh(name, min(3, CORPUS[name].max_batch_size), seed=31).values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONTROL_FLOW))
def test_control_flow_is_left_to_python(name: str) -> None:
    net = CONTROL_FLOW[name]
    module = runnable(original(net.build(), net.inputs(8)).program)
    assert without_the_lock(module) is module


class Steps(nn.Module):
    """A hundred operations in a row."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(50):
            x = torch.sin(x) + x
        return x


class Counting(nn.Module):
    """A hundred operations that change what they were given: how far it is can be seen in memory."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x.add_(1.0)
        return x * 2.0


@pytest.fixture
def unforced() -> Iterator[None]:
    """No thread has to give Python's lock away before it wants to."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.usefixtures("unforced")
def test_a_program_runs_to_its_end_while_another_thread_keeps_pythons_lock() -> None:
    module = runnable(exported_as_it_is(Counting(), {"x": torch.zeros(8, 1)}).program)
    run, x = without_the_lock(module), torch.zeros(1, 1)
    seen, began = x.numpy(), threading.Event()

    def compute() -> None:
        began.set()
        run(x)

    thread = threading.Thread(target=compute)
    thread.start()
    began.wait()
    until = time.monotonic() + 10.0
    while seen[0, 0] != 100.0 and time.monotonic() < until:  # nothing here gives the lock away
        pass
    reached = int(seen[0, 0])
    thread.join()
    assert reached == 100


@pytest.mark.usefixtures("unforced")
def test_requests_are_joined_under_one_lock() -> None:
    parts = [np.zeros((1, 5000), np.float32) for _ in range(50)]
    for _ in range(20):
        began, done = threading.Event(), list[bool]()

        def join(began: threading.Event = began, done: list[bool] = done) -> None:
            began.set()
            joined(parts)
            done.append(True)

        thread = threading.Thread(target=join)
        thread.start()
        began.wait()  # and for the lock, which nobody takes from the other thread
        ended = bool(done)
        thread.join()
        assert ended, "it gave the lock away on the way, and had to wait for it again"


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4)

    def forward(self, index: Tensor) -> Tensor:
        return self.rows(index)


def test_an_error_says_what_torch_said_and_the_next_batch_is_answered() -> None:
    net = original(Table(), {"index": torch.arange(8).reshape(8, 1)})
    ranged = with_ranges(net.spec, runnable(net.program))  # with it the kernels alone refuse, on a CPU
    engine = TorchEngine(net.program, "fp32", CPU, SCRIPTED, spec=ranged)
    with pytest.raises(RuntimeError) as caught:
        engine.run([[np.array([[12]])]])
    assert str(caught.value) == "index out of range in self"
    assert engine.run([[np.array([[9]])]])[0].shape == (1, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [True, False])
def test_torchscript_of_others_on_the_thread_is_optimised_as_before(wanted: bool) -> None:
    module = runnable(original(Steps(), {"x": torch.randn(8, 4)}).program)
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(wanted)
    try:
        without_the_lock(module)(torch.randn(2, 4))
        assert torch._C._get_graph_executor_optimize() == wanted
    finally:
        torch._C._set_graph_executor_optimize(before)


@pytest.mark.slow
def test_what_torchscript_does_not_know_stays_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    module = runnable(original(Steps(), {"x": torch.randn(8, 4)}).program)
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.sin.default:
            node.target = torch.sin  # no operator of the dispatcher's
    module.recompile()
    assert without_the_lock(module) is module


class Checked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.ops.aten._assert_async.msg((x < 100.0).all(), "too large")
        return x + 1.0


def test_a_program_that_asserts_something_of_a_value_still_does() -> None:
    engine = TorchEngine(original(Checked(), {"x": torch.randn(8, 4)}).program, "fp32", CPU, SCRIPTED)
    assert engine.run([[np.zeros((2, 4), np.float32)]])[0].tolist() == [[1.0] * 4] * 2
    with pytest.raises(RuntimeError, match="too large"):
        engine.run([[np.full((2, 4), 200.0, np.float32)]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("number", [1e8, 1e-9, -3, 0.1, 2])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_number_beside_a_tensor_gives_the_same_bits(
    in_place: bool, op: str, number: float, dtype: torch.dtype
) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    target = getattr(torch.ops.aten, op + "_" * in_place).Tensor
    graph.output((graph.call_function(target, (x, number)),))
    module = GraphModule(nn.Module(), graph)
    assert without_the_lock(module) is not module
    assert_same_bits(module, [torch.randn(9, 5).to(dtype)])
    assert_same_bits(module, [torch.zeros(3, 1).to(dtype)])  # 0 times what is infinite in half is no number
    if op != "div" and not isinstance(number, float):
        assert_same_bits(module, [torch.arange(9).to(torch.int32)])
    if not in_place:
        assert_same_bits(module, [torch.arange(9)])
