"""Rows a second and peak memory of both nets: FP32, TF32, live autocast and our half, eager, recorded and in flight."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.models.program import on_device, runnable
from halfeven.serve.selftest.nets import answers_in_flight
from torch import Tensor

from tests.benchmarks import floors
from tests.benchmarks.gpu.nets import Net, batches, nets
from tests.benchmarks.gpu.phase import Phase

Way = Callable[[Tensor], object]


def measure(phase: Phase) -> None:
    use_true_fp32()
    torch.backends.mha.set_fastpath_enabled(False)  # else the FP32 net alone would be another program
    made = nets(phase)
    for rows in batches(phase):
        for net in made:
            phase.part("speed", partial(_one, phase, net, rows), needs_s=4.0, net=net.name, rows=rows)


def _one(phase: Phase, net: Net, rows: int) -> None:
    given = torch.from_numpy(net.draw(rows)).to(phase.device)
    # Each one lets go of its program, which would count in the others' peak.
    for measured in (_original, _half, _served):
        measured(phase, net, rows, given)


def _original(phase: Phase, net: Net, rows: int, given: Tensor) -> None:
    module: Any = net.module().to(phase.device)
    for name, way in (("live autocast", autocast(phase, module)), ("FP32", module), ("TF32", _tf32(module))):
        on_the_device(phase, net, rows, name, way, given)


def _half(phase: Phase, net: Net, rows: int, given: Tensor) -> None:
    half = half_of(phase, net)
    on_the_device(phase, net, rows, "half", half, given)
    if phase.cuda:
        on_the_device(phase, net, rows, "half, recorded", _replayed(half, given), given)


def half_of(phase: Phase, net: Net) -> Callable[[Tensor], Tensor]:
    """The half as it is, operation by operation; it may write over its input, so it gets a copy."""
    program = runnable(on_device(net.half, phase.device) if phase.cuda else net.half)
    return lambda given: program(given.clone())[0]


def autocast(phase: Phase, module: Way) -> Way:
    """A call of the module under autocast: in fp16 on CUDA, in bf16 on a CPU, where many operators have no fp16
    kernels."""
    dtype = torch.float16 if phase.cuda else torch.bfloat16

    def run(given: Tensor) -> object:
        with torch.autocast(phase.device.type, dtype=dtype):
            return module(given)

    return run


def _tf32(module: Way) -> Way:
    def run(given: Tensor) -> object:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            return module(given)
        finally:
            use_true_fp32()

    return run


def _replayed(half: Way, given: Tensor) -> Way:
    """A CUDA graph of torch alone: what recording can give at most."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with (
        torch.inference_mode(),
        torch.cuda.graph(
            graph, pool=torch.cuda.graph_pool_handle(), stream=stream, capture_error_mode="thread_local"
        ),
    ):
        half(given)
    return lambda _: graph.replay()


def on_the_device(phase: Phase, net: Net, rows: int, way: str, run: Way, given: Tensor, **more: Any) -> None:
    """Note the time and the memory of a batch on the device, without copies to and from it."""
    with torch.inference_mode(), phase.peak_mib() as peak:
        took = phase.device_ms(lambda: run(given))
        note(phase, net, rows, way, took, peak_mib=peak(), **more)


def _served(phase: Phase, net: Net, rows: int, _: Tensor) -> None:
    """The time of a batch through the engine, copies in and out included, as requests of one row each."""
    engine, parts = net.engine(phase.device), net.parts(rows)
    with phase.peak_mib() as peak:
        engine.warm_up(parts)
        note(phase, net, rows, "engine", phase.host_ms(lambda: engine.run(parts)), peak_mib=peak())
        if phase.cuda:
            engine.record(parts)
            took = phase.host_ms(lambda: engine.run(parts))
            note(phase, net, rows, "engine, recorded", took, peak_mib=peak())
    count = 20
    began = time.perf_counter()
    answers_in_flight(engine, [parts] * count)
    note(phase, net, rows, "engine, in flight", (time.perf_counter() - began) * 1e3 / count)
    engine.close()


def floor_of(net: Net, rows: int) -> tuple[int, int]:
    """The operations and the fewest bytes of a batch."""
    one = torch.from_numpy(net.draw(1))
    return floors.operations_and_bytes(
        floors.Net(net.build, lambda count: one.expand(count, *one.shape[1:])), rows
    )


def note(phase: Phase, net: Net, rows: int, way: str, ms: float, **more: Any) -> None:
    tflops, ceiling = floor_of(net, rows)[0] / ms / 1e9, phase.ceiling()
    share = {"share_of_product": tflops / ceiling} if ceiling else {}
    phase.facts.add("speed", net=net.name, rows=rows, way=way, ms=ms, rows_s=rows / ms * 1e3, **share, **more)
