"""Errors of order, lifetime and fault handling, planted in engines, memory, batches and threads: each breaks a claim.

The staging's own are in `tests/models/engines/test_on_simulated_gpu.py`. Claims are tests, or scenes on the simulated
device.
"""

import random
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines import cuda_graphs, faults, onnx_on_cuda, torch_engine
from halfeven.models.engines.cuda_graphs import Graphs
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.index_guard import GuardedLaunch
from halfeven.models.engines.onnx_engine import OnnxEngine
from halfeven.models.engines.onnx_on_cuda import BoundRuns
from halfeven.models.engines.staging import CudaStreams, Staging
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import BadRequest, EngineFailed
from halfeven.models.spec.filled_lengths import Lengths
from halfeven.serve.batching.arrivals import Arrivals
from halfeven.serve.batching.engine_runner import EngineRunner
from halfeven.serve.batching.execution import Execution
from halfeven.serve.batching.request_queue import Request, RequestQueue
from halfeven.serve.batching.scheduler import BatchScheduler
from halfeven.serve.versions.loading import warming
from torch import Tensor, nn

from tests.models.engines import test_cuda_graphs as graphs
from tests.models.engines import test_on_simulated_gpu as on_gpu
from tests.models.engines import test_onnx_on_simulated_gpu as onnx_on_gpu
from tests.models.engines import test_recorded_races as races
from tests.patience import PATIENCE_S
from tests.planting import broken, plant
from tests.programs import Original, original
from tests.serve.batching import test_lengths as lengths
from tests.serve.batching import test_memory_in_flight as in_memory
from tests.serve.batching import test_on_late_device as on_late_device
from tests.serve.batching.by_hand import ByHand
from tests.serve.batching.stage import prepared, rows_of, spec
from tests.serve.versions.loading import test_graph_choice as graph_choice
from tests.simulated_gpu import SimulatedGpu
from tests.simulated_gpu.onnx_session import onnx_runtime_on
from tests.slow import drawn

pytestmark = pytest.mark.slow  # each plants its error and then makes the claim again
CPU = torch.device("cpu")
SEEDS = range(6)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * 2 + 0


class Looked(nn.Module):
    """A net whose index is computed, so that it may be out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, 0].long())


@cache
def program(net: type[nn.Module]) -> Original:
    return original(net(), {"x": torch.rand(8, 4)})


@cache
def onnx_file() -> Path:
    return onnx_on_gpu.write_net(Path(tempfile.mkdtemp()) / "net.onnx")


# Claims.


@cache
def original_net() -> Original:
    return original(on_gpu.Net(), {"x": torch.randn(8, on_gpu.WIDTH)})


def onnx_engines_answer_right(**placed: Any) -> None:
    for seed in SEEDS:
        with SimulatedGpu(random.Random(seed), on_gpu.PACES[seed % 3]) as gpu, onnx_runtime_on(gpu):
            with pytest.MonkeyPatch.context() as monkeypatch:
                if placed:
                    onnx_on_gpu.placed(monkeypatch, **placed)
                there = OnnxEngine(onnx_file(), "fp16", gpu.device)
            here, waits = OnnxEngine(onnx_file(), "fp16", CPU), len(gpu.operations.waits)
            wrong = on_gpu.trial(gpu, there, here, [on_gpu.rows(n) for n in (2, 3, 1, 4)])
            assert [fault for fault in wrong if not placed or "waited" not in fault] == []
            assert placed or len(gpu.operations.waits) == waits


def on_each_seed(claim: Callable[..., object], *arguments: Any) -> None:
    for seed in SEEDS:
        with SimulatedGpu(random.Random(seed), on_gpu.PACES[seed % 3]) as gpu:
            claim(*arguments, gpu)


def recorded_batches_are_right() -> None:
    on_each_seed(
        graphs.test_recorded_batches_two_in_flight_are_right_and_the_host_waits_for_nothing, original_net()
    )


def recorded_batches_of_deep_nets_are_right() -> None:
    assert [races.wrong(races.net(3, 0), (4,), 2, seed) for seed in range(12)] == [0] * 12


def recordings_of_memory_that_is_gone_are_not_replayed() -> None:
    on_each_seed(
        graphs.test_larger_batches_than_were_recorded_are_computed_and_the_recordings_are_not_mistaken_for_them,
        original_net(),
    )


def replays_keep_their_memory() -> None:
    on_each_seed(graphs.test_a_replay_takes_no_memory_and_no_one_else_gets_its_memory)


def closed_engines_harm_no_recording() -> None:
    on_each_seed(
        graphs.test_an_engine_that_is_closed_harms_no_recording_of_another_and_gives_its_memory_back,
        original_net(),
    )


def no_stream_is_lent_twice() -> None:
    graphs.test_without_a_stream_of_its_own_nothing_is_recorded(original_net())


def recordings_leave_others_their_memory() -> None:
    on_each_seed(
        graphs.test_a_recording_takes_no_cached_memory_of_others_unless_there_is_no_other, original_net()
    )


def a_failed_capture_harms_no_batch() -> None:
    on_each_seed(graphs.test_what_a_device_cannot_record_is_computed_and_harms_no_batch, original_net())


def a_failed_capture_does_not_fail_the_load() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        graph_choice.test_a_capture_that_fails_never_fails_the_load("cannot be emptied", monkeypatch)


def what_adds_in_any_order_is_recorded() -> None:
    graphs.test_a_program_that_adds_in_any_order_is_recorded_and_said_by_name("scatter_add")


def a_launch_that_fails_in_the_middle_harms_no_other() -> None:
    assert [fault for seed in SEEDS for fault in on_gpu.short_of_memory(original_net(), seed)] == []


def a_replay_that_differs_is_not_used() -> None:
    with SimulatedGpu(random.Random(0)) as gpu:
        graphs.test_a_replay_that_differs_from_the_program_is_not_used(original_net(), gpu)


def what_needs_the_host_is_not_recorded() -> None:
    graphs.test_a_program_that_needs_the_host_is_not_recorded_and_goes_on_as_it_is(
        lambda x: x * x.nonzero().sum(), "nonzero"
    )


def weights_made_at_load_are_there() -> None:
    for seed in SEEDS:
        with SimulatedGpu(random.Random(seed), pace=0.0) as gpu:
            assert on_gpu.computed_when_loaded(gpu) == []


def every_slot_is_warm() -> None:
    with SimulatedGpu(random.Random(0)) as gpu:
        there = TorchEngine(program(Doubled).program, "fp32", gpu.device)
        there.warm_up([rows_of(1, 2)])
        fresh = gpu.memory.fresh
        for one in [there.launch([rows_of(1, 2)]) for _ in range(there.in_flight)]:
            one.wait()
        assert gpu.memory.fresh == fresh


def an_index_out_of_range_is_refused() -> None:
    with SimulatedGpu(random.Random(0)) as gpu:
        there = TorchEngine(program(Looked).program, "fp32", gpu.device)
        assert len(there.run([rows_of(7)])) == 1
        with pytest.raises(BadRequest):
            there.run([rows_of(8)])
        launched = there.launch([rows_of(3)])
        gpu.queues.pace = 0.0
        launched = there.launch([rows_of(3)])
        launched.synchronize()  # type: ignore[attr-defined]
        assert all(not queue for queue in gpu.queues._queues.values()), "the waiting thread rings too early"


def on_hand(seed: int, net: type[nn.Module] = Doubled) -> tuple[SimulatedGpu, Callable[[], ByHand]]:
    gpu = SimulatedGpu(random.Random(seed), pace=0.3)

    def make() -> ByHand:
        return ByHand(Blocking(TorchEngine(program(net).program, "fp32", gpu.device)))

    return gpu, make


class Blocking(Engine):
    """An engine whose batches say where the device thread waited for one that had not arrived."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.form, self.precision, self.device, self.in_flight = "torch", "fp32", "cuda:0", engine.in_flight
        self.under_way = self.calls = 0
        self.faults: list[str] = []

    def run(self, parts: Any) -> list[np.ndarray]:
        self.calls += 1
        return self._engine.run(parts)

    def launch(self, parts: Any) -> "_Launched":
        self.calls += 1
        if self.under_way == self.in_flight:
            self.faults.append("a batch is launched without a free slot")
        return _Launched(self, self._engine.launch(parts))


@dataclass(eq=False)
class _Launched:
    engine: Blocking
    launched: Any
    arrived: bool = field(default=False)

    def __post_init__(self) -> None:
        self.engine.under_way += 1

    def synchronize(self) -> None:
        self.launched.synchronize()
        self.arrived = True

    def wait(self) -> list[np.ndarray]:
        self.engine.under_way -= 1
        if not self.arrived:
            self.engine.faults.append("the device thread blocks")
        return self.launched.wait()


def batches_by_hand_are_answered() -> None:
    for seed in SEEDS:
        gpu, make = on_hand(seed)
        with gpu:
            hand = make()
            for first in range(0, 20, 5):
                hand.send(*[rows_of(first + n) for n in range(5)])
                hand.turn()
            hand.finish()
            assert hand.answered == {n: [[2.0 * n]] for n in range(20)}
            assert hand.scheduler.prepared.engine.faults == []  # type: ignore[attr-defined]


def a_swap_leaves_nothing_under_way() -> None:
    gpu, make = on_hand(0)
    with gpu:
        hand = make()
        hand.send(*[rows_of(n) for n in range(4)])
        for _ in range(2):
            hand.turn()
        old = hand.scheduler.prepared.engine
        assert old.under_way == 2  # type: ignore[attr-defined]
        hand.scheduler.swap(prepared(make().scheduler.prepared.engine, "2"), spec(rows=2))
        assert old.under_way == 0 and set(hand.answered) == set(range(4))  # type: ignore[attr-defined]


def a_lost_device_answers_nothing_more() -> None:
    gpu, make = on_hand(0)
    with gpu:
        hand = make()
        hand.send(rows_of(1))
        hand.finish()
        gpu.fail(2)
        hand.send(*[rows_of(n) for n in range(6)])
        hand.finish()
        assert hand.lost is not None and "illegal memory access" in hand.lost
        failed = [hand.answered[n] for n in range(1, 7)]
        assert all(isinstance(one, EngineFailed) and "is lost" in str(one) for one in failed)
        engine: Any = hand.scheduler.prepared.engine
        calls = engine.calls
        hand.send(rows_of(1))
        hand.finish()
        assert "is lost" in str(hand.answered[7]) and engine.calls == calls


def an_unknown_fault_is_asked_about() -> None:
    gpu, make = on_hand(0)
    with gpu:
        hand = make()
        hand.send(rows_of(1))
        hand.finish()
        gpu.fail(1, "something that no list has")
        hand.send(rows_of(2))
        hand.finish()
        assert hand.lost is not None


def one_bad_request_fails_alone() -> None:
    gpu, make = on_hand(0, Looked)
    with gpu:
        hand = make()
        hand.send(rows_of(1), rows_of(9), rows_of(2), rows_of(3))
        hand.finish()
        assert isinstance(hand.answered[1], BadRequest)
        assert all(isinstance(hand.answered[n], list) for n in (0, 2, 3)) and hand.lost is None


def memory_for_one_and_a_half_batches() -> None:
    in_memory.test_the_real_engine_on_a_device_with_memory_for_one_and_a_half_batches()


def known_is_not_tried() -> None:
    in_memory.test_rows_that_fit_alone_leave_no_ceiling_and_the_next_such_batch_is_not_begun_beside_another(
        Path(tempfile.mkdtemp())
    )


def a_lack_seen_at_the_wait_is_tried_alone() -> None:
    in_memory.test_a_lack_of_memory_seen_at_the_wait_is_tried_alone_once_the_batch_behind_has_ended()


def warm_up_finds_what_fits() -> None:
    in_memory.test_warm_up_keeps_a_bucket_that_fits_alone_and_measures_with_a_batch_in_every_slot()


def warm_up_has_every_wire_datatype() -> None:
    on_late_device.test_after_the_warm_up_no_bucket_in_any_slot_and_datatype_takes_memory_or_blocks()


def the_waiting_thread_rings_after_each_batch_and_survives_an_error() -> None:
    arrivals, held, order = Arrivals("test"), threading.Event(), list[str]()
    rung = [threading.Event() for _ in range(2)]

    def failing() -> None:
        assert held.wait(PATIENCE_S)
        order.append("ended")
        raise RuntimeError("the device's error")

    # A thread that ends never rings
    hook, threading.excepthook = threading.excepthook, lambda _: rung[0].set()
    try:
        arrivals.watch(failing, lambda: (order.append("rung"), rung[0].set()))  # type: ignore[arg-type, func-returns-value]
        held.set()
        assert rung[0].wait(PATIENCE_S) and order == ["ended", "rung"]
        arrivals.watch(lambda: None, rung[1].set)
        assert rung[1].wait(PATIENCE_S)
    finally:
        arrivals.stop()
        threading.excepthook = hook


class Lent:
    """A value's address without the value: nothing keeps its memory."""

    def __init__(self, value: Any) -> None:
        self.gpu, self._facts = value.gpu, (value.tensor_size_in_bytes(), value.data_ptr())

    def tensor_size_in_bytes(self) -> int:
        return self._facts[0]

    def data_ptr(self) -> int:
        return self._facts[1]


@dataclass(frozen=True)
class Planted:
    """``old`` in the function's source becomes ``new``; then the claim must not hold."""

    function: Any
    old: str
    new: str
    claim: Callable[[], object]


on_cpu = partial(onnx_engines_answer_right, CPU=[("Relu", "positive")])
ERRORS = {
    "an engine does not wait for what was made at load": Planted(
        TorchEngine._stage, "streams.adopt()", "pass", weights_made_at_load_are_there
    ),
    "only one slot is warmed up": Planted(
        torch_engine.run_in_every_slot, "range(engine.in_flight)", "range(1)", every_slot_is_warm
    ),
    "the flags of indices are taken for an output": Planted(
        TorchEngine.launch, "staged if self._guard is None else GuardedLaunch(staged, self._guard)", "staged",
        an_index_out_of_range_is_refused,
    ),
    "a guarded batch is not waited for": Planted(
        GuardedLaunch.synchronize, "self.launched.synchronize()", "pass", an_index_out_of_range_is_refused
    ),
    "ONNX Runtime has a stream of its own": Planted(
        onnx_on_cuda.provider_settings, '"user_compute_stream": str(stream),', "", onnx_engines_answer_right
    ),
    "ONNX Runtime waits for each run": Planted(
        BoundRuns.__init__, '"0" if waits else "1"', '"0"', onnx_engines_answer_right
    ),
    "a node on the CPU begins before its input is there": Planted(
        BoundRuns.__call__, "binding.synchronize_inputs()", "pass", on_cpu
    ),
    "an output of ONNX Runtime is given back while it is copied": Planted(
        onnx_on_cuda.tensor_of, "_Memory(value)", "_Memory(Lent(value))", onnx_engines_answer_right
    ),
    "a recording is replayed for memory that the slot has let go": Planted(
        cuda_graphs._key, "tensor.data_ptr()", "0", recordings_of_memory_that_is_gone_are_not_replayed
    ),
    "a recording is replayed for another batch size": Planted(
        cuda_graphs._key, "tuple(tensor.shape)", "()", recorded_batches_are_right
    ),
    "every batch is recorded anew": Planted(
        TorchEngine.record, "finally:\n        self._compute = self._replayed", "finally:\n        pass",
        recorded_batches_are_right,
    ),
    "all slots share a pool": Planted(
        TorchEngine._graphs_of_slot, "self._graphs[self._staging.slot]", "self._graphs[0]",
        recorded_batches_of_deep_nets_are_right,
    ),
    "a recording's outputs are of no pool": Planted(
        Graphs._capture, "outputs = self._compute(*inputs)\n            graph.capture_end()",
        "outputs = self._compute(*inputs)\n            graph.capture_end()\n            del outputs; "
        "outputs = [one.clone() for one in self._compute(*inputs)]",
        replays_keep_their_memory,
    ),
    "all engines share a capture stream": Planted(
        Graphs.__init__, "streams.take()", "streams.__dict__.setdefault('shared', streams.take())",
        closed_engines_harm_no_recording,
    ),
    "batches are captured in the stream that computes": Planted(
        Graphs.__init__, "streams.take()", "streams._streams['compute']", closed_engines_harm_no_recording
    ),
    "a stream is lent twice": Planted(
        CudaStreams.take, "if stream.cuda_stream in self._addresses:", "if False:", no_stream_is_lent_twice
    ),
    "a stream is given back before its graphs are reset": Planted(
        Graphs.close, "graph.reset()", "_FAILED.append(graph)", closed_engines_harm_no_recording
    ),
    "a recording takes the memory that other versions keep": Planted(
        Graphs._capture, "graph = torch.cuda.CUDAGraph()", "graph = torch.cuda.CUDAGraph(); torch.cuda.empty_cache()",
        recordings_leave_others_their_memory,
    ),
    "a lack of memory for a recording is not tried again without what others keep": Planted(
        Graphs.record, "if not out_of_memory(error):", "if True:", recordings_leave_others_their_memory
    ),
    "a failed capture is not ended": Planted(
        Graphs._capture, "self._end_failed(graph, inputs[0].device)", "pass", a_failed_capture_harms_no_batch
    ),
    "a failed capture leaves the allocator in the middle of it": Planted(
        Graphs._end_failed, "torch._C._cuda_endAllocateToPool(device.index or 0, self._pool)", "pass",
        a_failed_capture_harms_no_batch,
    ),
    "the pool of a failed capture is never given back": Planted(
        Graphs._end_failed, "torch._C._cuda_releasePool(device.index or 0, self._pool)", "pass",
        a_failed_capture_harms_no_batch,
    ),
    "the pool of a failed capture is used again": Planted(
        Graphs._end_failed, "self._pool = torch.cuda.graph_pool_handle()", "pass", a_failed_capture_harms_no_batch
    ),
    "the next batch gets the error of a failed capture": Planted(
        Graphs._end_failed, "torch.ones(1, device=device).add_(1)", "pass", a_failed_capture_harms_no_batch
    ),
    "a cache that cannot be emptied fails the load": Planted(
        faults.give_back_cached_memory, "except Exception as error:", "except ZeroDivisionError as error:",
        a_failed_capture_does_not_fail_the_load,
    ),
    "a recording is not compared with the program": Planted(
        Graphs.record, "if not all(agrees(*pair, self._agreement) for pair in zip(outputs, expected, strict=True)):",
        "if False:", a_replay_that_differs_is_not_used,
    ),
    "every program may differ within the gate": Planted(
        cuda_graphs.agreement_of, " if in_any_order else 0.0", "", a_replay_that_differs_is_not_used
    ),
    "equal bits are asked of what adds in any order": Planted(
        cuda_graphs.agreement_of, "if in_any_order", "if False", what_adds_in_any_order_is_recorded
    ),
    "a launch that fails in the middle keeps its slot": Planted(
        Staging._abandon, "finally:\n        self.release(slot)", "finally:\n        pass",
        a_launch_that_fails_in_the_middle_harms_no_other,
    ),
    "what needs the host is recorded": Planted(
        TorchEngine.record, "if self.host_reads:", "if False:", what_needs_the_host_is_not_recorded
    ),
    "a batch is launched without a free slot": Planted(
        BatchScheduler._may_go_ahead, "len(self._under_way) < self._depth", "len(self._under_way) <= self._depth",
        batches_by_hand_are_answered,
    ),
    "the newest batch is landed first": Planted(
        BatchScheduler.land, "popleft()", "pop()", batches_by_hand_are_answered
    ),
    "the device thread is not rung at the end of a batch": Planted(
        BatchScheduler._watch, "self._device.ring()", "pass", batches_by_hand_are_answered
    ),
    "a batch that computes is not noted": Planted(
        BatchScheduler._watch, "one.computing = True", "pass", batches_by_hand_are_answered
    ),
    "a swap leaves the old version's batches under way": Planted(
        BatchScheduler.finish_begun, "while self.land():\n        pass", "pass", a_swap_leaves_nothing_under_way
    ),
    "a lost device is not noted": Planted(
        EngineRunner._fault, "lost=lost", "lost=False", a_lost_device_answers_nothing_more
    ),
    "requests behind a lost device are run": Planted(
        Execution.finish, "if self.condition.lost is not None:", "if False:", a_lost_device_answers_nothing_more
    ),
    "a fault without a name is taken for the request's": Planted(
        faults.device_answers, "return False", "return True", an_unknown_fault_is_asked_about
    ),
    "a failed batch is not divided": Planted(
        Execution._after_failure, "if not condition.worth_dividing():", "if True:", one_bad_request_fails_alone
    ),
    "a lack of memory is taken for any fault": Planted(
        EngineRunner._fault, "memory=out_of_memory(error)", "memory=False", memory_for_one_and_a_half_batches
    ),
    "out of memory is not tried alone": Planted(
        EngineRunner.finish, "run.beside and _ran_out(run)", "False", memory_for_one_and_a_half_batches
    ),
    "what has to be alone does not wait for the others": Planted(
        EngineRunner._alone_on_the_device,
        "self._wait(other)",
        "pass",
        a_lack_seen_at_the_wait_is_tried_alone,
    ),
    "a batch that was waited for is run once more": Planted(
        EngineRunner._alone_on_the_device,
        "other.ended = True",
        "pass",
        a_lack_seen_at_the_wait_is_tried_alone,
    ),
    "what did not fit beside another is tried there again": Planted(
        EngineRunner._may_go_beside, "run.filled <= self._beside.rows(_row_elements(run.items))", "True",
        known_is_not_tried,
    ),
    "the warm-up measures one batch where two are in flight": Planted(
        torch_engine.run_in_every_slot, "range(engine.in_flight)", "range(1)", warm_up_finds_what_fits
    ),
    "the warm-up leaves out the wire's datatype": Planted(
        warming._warm_up, "sent is not None", "False", warm_up_has_every_wire_datatype
    ),
    "the waiting thread rings before the end": Planted(
        Arrivals._live, "with suppress(Exception):\n            synchronize()\n        arrived()",
        "arrived()\n        with suppress(Exception):\n            synchronize()",
        the_waiting_thread_rings_after_each_batch_and_survives_an_error,
    ),
    "the waiting thread ends with a batch's error": Planted(
        Arrivals._live, "with suppress(Exception):\n            synchronize()", "synchronize()",
        the_waiting_thread_rings_after_each_batch_and_survives_an_error,
    ),
    "filled-up places are not masked": Planted(
        Lengths._fill, "0 if is_mask else ", "",
        lengths.test_requests_of_different_lengths_are_one_batch_and_each_gets_its_own_places,
    ),
    "answers of filled-up rows are not cut": Planted(
        Request.own, "lengths.cut(outputs, arrays)", "outputs",
        lengths.test_requests_of_different_lengths_are_one_batch_and_each_gets_its_own_places,
    ),
    "a swap leaves lengths joined that the new version does not join": Planted(
        RequestQueue.join_lengths, "lengths == self._lengths", "True",
        lengths.test_a_swap_joins_what_waits_as_the_new_version_allows,
    ),
    "a request that is to be alone is joined by other lengths": Planted(
        RequestQueue.form, "batch.requests[0].alone", "False",
        lengths.test_of_one_length_and_alone_nothing_is_filled_up_and_without_lengths_nothing_is_joined,
    ),
    "a batch of several lengths is filled up to its first row's": Planted(
        BatchScheduler._fill_up, "longest_of(list(came))", "next(iter(came))",
        lengths.test_requests_of_different_lengths_are_one_batch_and_each_gets_its_own_places,
    ),
    "a CUDA device gets batches of any length": Planted(
        BatchScheduler._fill_up, 'startswith("cuda")', 'startswith("tpu")',
        lengths.test_on_a_cuda_device_every_batch_has_one_of_the_lengths,
    ),
}  # fmt: skip
OF_THIS_RUN = drawn(2, [*ERRORS])


def is_of_others(claim: Any) -> bool:
    """True if the claim is a test of another file or asks one: that test is run there."""
    code = getattr(claim, "__code__", None)
    return code is not None and any(name.startswith("test_") for name in (code.co_name, *code.co_names))


CLAIMS = [one for one in dict.fromkeys(ERRORS[name].claim for name in OF_THIS_RUN) if not is_of_others(one)]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: getattr(claim, "__name__", "on the CPU"))
def test_a_claim_holds_without_a_planted_error(claim: Callable[[], object]) -> None:
    claim()


@pytest.mark.parametrize("name", OF_THIS_RUN)
def test_a_planted_error_breaks_its_claim(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ERRORS[name]
    plant(monkeypatch, one.function, one.old, one.new, Lent=Lent)
    assert broken(one.claim)
