"""Batches of a net on the simulated GPU, held against the CPU, and faults of the engine to plant."""

import inspect
import sys
from types import ModuleType

import numpy as np
import pytest
from halfeven.models.engines import staging, torch_engine
from halfeven.models.engines.engine import Engine
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
MUTANTS = {
    "streams do not wait for each other": ("stream.wait_event(after)", "pass"),
    "computing does not wait for the copy in": ("self._run(slot, devices), copied)", "self._run(slot, devices))"),
    "the copy out does not wait for computing": ("self._take(slot), computed)", "self._take(slot))"),
    "nobody waits for the copy out": ("self.arrived.synchronize()", "pass"),
    "an event is recorded before its work": (
        "            work()\n        reached = torch.cuda.Event(blocking=True)",
        "            reached = torch.cuda.Event(blocking=True); reached.record(stream); work(); return reached\n"
        "        reached = torch.cuda.Event(blocking=True)",
    ),
    "an event is recorded in the current stream": ("reached.record(stream)", "reached.record()"),
    "an event is never recorded": ("reached.record(stream)", "pass"),
    "work is put into the default stream": ("with torch.cuda.stream(stream):\n            work()", "work()"),
    "two batches have one slot": ("deque(_Slot(number) for number in range(slots))", "deque([_Slot(0)] * slots)"),
    "slots share memory on the host": (
        "self._streams.on_host((nbytes,), torch.uint8)",
        "self.__dict__.setdefault(index, self._streams.on_host((1 << 16,), torch.uint8))",
    ),
    "slots share memory on the device": (
        "self._streams.on_device(nbytes)",
        "self.__dict__.setdefault(('device', index), self._streams.on_device(1 << 16))",
    ),
    "answers are let go before they are copied": (
        "slot.taken.append(host.copy_(answer, non_blocking=True))",
        "slot.taken.append(host.copy_(answer, non_blocking=True)); slot.answers = ()",
    ),
    "answers come into the memory of the batch before": (
        "host = self._streams.on_host(answer.shape, answer.dtype)",
        "host = self.__dict__.setdefault((answer.shape, answer.dtype), "
        "self._streams.on_host(answer.shape, answer.dtype))",
    ),
    "memory is allocated on another stream than writes it first": (
        'with torch.cuda.stream(self._streams["in"]):\n            return', "return"
    ),
    "memory on the host is pageable": ("pin_memory=True", "pin_memory=False"),
    "the copy in blocks": ("device.copy_(host, non_blocking=True)", "device.copy_(host)"),
    "the copy out blocks": ("host.copy_(answer, non_blocking=True)", "host.copy_(answer)"),
}  # fmt: skip


def mutant(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Let engines use the staging with one place of its source changed."""
    source = inspect.getsource(staging)
    assert source.count(old) == 1, f"the mutant no longer fits the source: {old}"
    changed = ModuleType(staging.__name__ + "_mutant")
    changed.__package__ = staging.__package__
    monkeypatch.setitem(sys.modules, changed.__name__, changed)
    exec(compile(source.replace(old, new), staging.__file__, "exec"), changed.__dict__)
    for name in ("Staging", "cuda_streams"):
        monkeypatch.setattr(torch_engine, name, changed.__dict__[name])
