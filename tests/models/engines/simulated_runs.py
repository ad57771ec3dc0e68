"""Batches of a net on the simulated GPU, held against the CPU, and faults of the engine to plant."""

from typing import Any

import numpy as np
from halfeven.models.engines import staging
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.staging import CudaStreams, Staged, Staging
from halfeven.serve.selftest.nets import answers_in_flight
from torch import Tensor, nn

from tests.simulated_gpu import SimulatedGpu

WIDTH = 24
PACES = (0.0, 0.3, 0.8)
Parts = list[list[np.ndarray]]


class Net(nn.Module):
    """A net that writes over its input; it gives floats, integers and a tensor that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2.0)
        y = self.second(self.first(x).relu())
        return y, y.argmax(dim=1), y.t()[:3].t()


def rows(*counts: int) -> Parts:
    draw = np.random.default_rng()
    return [[draw.standard_normal((n, WIDTH)).astype(np.float32) for n in counts]]


def differs(came: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return not all(
        a.shape == b.shape and np.allclose(a, b, atol=1e-4) for a, b in zip(came, expected, strict=True)
    )


def trial(gpu: SimulatedGpu, there: Engine, here: Engine, batches: list[Parts]) -> list[str]:
    """The errors while the batches pass, two in flight; answers are looked at when all have come."""
    waits = len(gpu.operations.waits)
    taken = answers_in_flight(there, batches)
    wrong = [
        f"batch {n} is wrong"
        for n, (came, parts) in enumerate(zip(taken, batches, strict=True))
        if differs(came, here.run(parts))
    ]
    return wrong + [f"the host waited in {name}" for name in gpu.operations.waits[waits:]]


SEEDS = range(9)
MUTANTS: dict[str, tuple[Any, str, str]] = {  # as `plant` takes them
    "streams do not wait for each other": (CudaStreams.enqueue, "stream.wait_event(after)", "pass"),
    "computing does not wait for the copy in": (
        Staging.launch, "self._run(slot, devices), copied)", "self._run(slot, devices))"
    ),
    "the copy out does not wait for computing": (Staging.launch, "self._take(slot), computed)", "self._take(slot))"),
    "nobody waits for the copy out": (Staged.synchronize, "self.arrived.synchronize()", "pass"),
    "an event is recorded before its work": (
        CudaStreams.enqueue, "work()",
        "reached = torch.cuda.Event(blocking=True); reached.record(stream); work(); return reached",
    ),
    "an event is recorded in the current stream": (CudaStreams.enqueue, "reached.record(stream)", "reached.record()"),
    "an event is never recorded": (CudaStreams.enqueue, "reached.record(stream)", "pass"),
    "work is put into the default stream": (CudaStreams.enqueue, "with torch.cuda.stream(stream)", "if True"),
    "two batches have one slot": (
        Staging.__init__, "deque(_Slot(number) for number in range(slots))", "deque([_Slot(0)] * slots)"
    ),
    "slots share memory on the host": (
        Staging._gathered, "self._streams.on_host((nbytes,), torch.uint8)",
        "self.__dict__.setdefault(index, self._streams.on_host((1 << 16,), torch.uint8))",
    ),
    "slots share memory on the device": (
        Staging._gathered, "self._streams.on_device(nbytes)",
        "self.__dict__.setdefault(('device', index), self._streams.on_device(1 << 16))",
    ),
    "answers are let go before they are copied": (
        Staging._take, "slot.taken.append(host.copy_(answer, non_blocking=True))",
        "slot.taken.append(host.copy_(answer, non_blocking=True)); slot.answers = ()",
    ),
    "answers come into the memory of the batch before": (
        Staging._take, "host = self._streams.on_host(answer.shape, answer.dtype)",
        "host = self.__dict__.setdefault((answer.shape, answer.dtype), "
        "self._streams.on_host(answer.shape, answer.dtype))",
    ),
    "memory is allocated on another stream than writes it first": (
        CudaStreams.on_device, 'with torch.cuda.stream(self._streams["in"])', "if True"
    ),
    "memory on the host is pageable": (CudaStreams.on_host, "pin_memory=True", "pin_memory=False"),
    "the copy in blocks": (staging._copy, "device.copy_(host, non_blocking=True)", "device.copy_(host)"),
    "the copy out blocks": (Staging._take, "host.copy_(answer, non_blocking=True)", "host.copy_(answer)"),
}  # fmt: skip
