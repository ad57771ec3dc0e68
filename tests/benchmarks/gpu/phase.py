"""The process of one phase: what its measurements stand on, and what is noted when one of them fails.

python3 -m tests.benchmarks.gpu.phase NAME --out OUT … is what the run starts (`__main__.py`).
"""

import argparse
import gc
import importlib
import random
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode

from tests.benchmarks.gpu.facts import Facts, read


@dataclass(frozen=True, slots=True)
class Phase:
    """``tiny``: sizes for a CPU. ``simulated``: cuda:0 is a simulated device, whose events have no times.

    ``scratch`` is a folder that the phases of one run share and that does not come back.
    """

    facts: Facts
    device: torch.device
    tiny: bool
    simulated: bool
    scratch: Path
    ends: float  # on the monotonic clock

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        return self.ends - time.monotonic()

    def part(self, what: str, work: Callable[[], object], needs_s: float = 1.0, **of: object) -> None:
        """Work whose failure is noted and does not end the phase. It is not begun with less than ``needs_s`` left."""
        if self.left() < needs_s:
            self.facts.add("no time left", part=what, **of)
            return
        try:
            work()
        except Exception as error:
            self.facts.add("failed", part=what, **of, **error_fields(error))

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def device_ms(self, run: Callable[[], object], budget_s: float = 0.5, most: int = 50) -> float:
        """The median of several runs, by the device's events; on a CPU by the host's clock."""
        for _ in range(2):
            run()
        self.synchronize()
        times: list[float] = []
        began = time.monotonic()
        while len(times) < 3 or (len(times) < most and time.monotonic() - began < budget_s and not self.tiny):
            times.append(self._once(run) if self.cuda and not self.simulated else _host_ms(run))
        return statistics.median(times)

    def host_ms(self, run: Callable[[], object], budget_s: float = 0.5) -> float:
        """The median of several runs that end when their answers are on the host."""
        run()
        times: list[float] = []
        while len(times) < 3 or (sum(times) < budget_s * 1e3 and not self.tiny):
            times.append(_host_ms(run))
        return statistics.median(times)

    @staticmethod
    def _once(run: Callable[[], object]) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after)

    @contextmanager
    def peak_mib(self) -> Iterator[Callable[[], float]]:
        """A function that gives torch's peak of allocated memory since the block was entered; 0 on a CPU."""
        gc.collect()  # programs have cycles
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() / 2**20 if self.cuda else 0.0

    def ceiling(self) -> float | None:
        """TFLOP/s of the FP16 matrix product that the phase ``machine`` measured in this run."""
        found = [
            fact for fact in read(self.facts.out) if fact["what"] == "product" and fact["type"] == "fp16"
        ]
        return found[-1]["tflops"] if found else None


def error_fields(error: BaseException) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"[:500], "at": traceback.format_exc()[-900:]}


def _host_ms(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


@contextmanager
def _simulated() -> Iterator[None]:
    """The project's simulated device, and what a torch with CUDA asks of a driver beyond it. Torch's own alarm at a
    wait is not there."""
    from tests.simulated_gpu import SimulatedGpu
    from tests.simulated_gpu.operations import DeviceTensor

    with FakeTensorMode():  # at its first tensor torch asks for a context on a device that seems to be there
        torch.empty(1, device="cuda:0")
    with SimulatedGpu(random.Random(0)) as gpu, ExitStack() as stack:
        for name, replacement in {
            "set_sync_debug_mode": lambda mode: None,
            "is_current_stream_capturing": lambda: gpu.current().number in gpu.queues.captured,
            "is_bf16_supported": lambda *_: True,
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, replacement))
        # Torch refuses it to every kind of tensor that is not its own.
        stack.enter_context(patch.object(DeviceTensor, "tolist", lambda self: self.cpu().tolist()))
        yield


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the process that started this one
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    for option, kind in (
        ("out", Path),
        ("scratch", Path),
        ("device", str),
        ("seconds", float),
        ("began", float),
    ):
        parser.add_argument(f"--{option}", type=kind, required=True)
    for option in ("tiny", "simulated"):
        parser.add_argument(f"--{option}", action="store_true")
    asked = parser.parse_args()
    facts = Facts(asked.out, asked.name, asked.began)
    ends = time.monotonic() + asked.seconds
    facts.add("begin", imported=round(time.time() - asked.began, 1))
    try:
        measure = importlib.import_module(f"tests.benchmarks.gpu.{asked.name}").measure
        with ExitStack() as stack:
            if asked.simulated:
                stack.enter_context(_simulated())
            device = torch.device(asked.device)
            if device.type == "cuda" and not torch.cuda.is_available():
                seen = f"torch {torch.__version__} of {sys.executable} sees no CUDA device"
                raise RuntimeError(f"{seen}: run it with a Python whose torch does (make gpu PYTHON=…)")
            measure(Phase(facts, device, asked.tiny, asked.simulated, asked.scratch, ends))
    except KeyboardInterrupt:
        facts.add("interrupted")
        return 130
    except BaseException as error:
        facts.add("failed", **error_fields(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
