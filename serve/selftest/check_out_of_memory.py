"""A batch that finds no memory is refused or made smaller, and the batches beside and after it are answered."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...models.spec.spec import ModelSpec
from ..batching.ceiling import Ceiling
from ..batching.engine_runner import EngineRunner, Fault, Run
from .nets import FP32_GAP, Net, gap
from .plain_way import DeviceLost, Outcome, judged

NO_DEVICE_HAS = 1 << 50  # bytes


@dataclass(frozen=True, slots=True)
class _Request:
    arrays: Sequence[np.ndarray]
    rows: int
    alone: bool = False


def out_of_memory(device: torch.device, nets: Sequence[Net]) -> Outcome:

    def faults() -> list[str]:
        log = logging.getLogger("halfeven.batcher")
        silent, log.disabled = log.disabled, True  # it would warn of what is done here on purpose
        try:
            return [fault for net in nets for fault in _faults(net, device)]
        finally:
            log.disabled = silent

    return judged(device, faults, "a batch without memory is refused alone, or made smaller and answered")


def _faults(net: Net, device: torch.device) -> list[str]:
    """Two batches are under way when memory runs out for the second: always, then for more than half of its rows."""
    engine = net.engine(net.original, device)
    most = net.spec.max_batch_size
    limit = [most]

    def short_of_memory(*inputs: Tensor) -> Sequence[Tensor]:
        if len(inputs[0]) > limit[0]:
            torch.empty(NO_DEVICE_HAS, dtype=torch.uint8, device=device)
        return inputs

    engine.change_inputs(short_of_memory)
    try:
        asked = [_request(net.spec, net.batch(most, seed=seed)) for seed in range(3)]
        right = net.expected([[[array] for array in request.arrays] for request in asked])
        return [
            f"{net.name}, {what}: {fault}"
            for what, rows, answered in (
                ("no memory at all", 0, False),
                ("memory for half of the rows", most // 2, True),
            )
            for fault in _trial(
                _runner(net.spec, engine), asked, right, _setting(limit, rows, most), answered
            )
        ]
    finally:
        engine.close()


def _trial(
    runner: EngineRunner,
    asked: Sequence[_Request],
    right: Sequence[list[np.ndarray]],
    set_memory: Callable[[bool], None],
    answered: bool,
) -> list[str]:
    """The first batch has memory, the second has not, the third has again."""
    set_memory(True)
    first = runner.begin([asked[0]])
    set_memory(False)
    second = runner.begin([asked[1]])
    faults = _wrong("the batch before", first, runner, right[0])
    runner.finish(second)
    if answered:
        faults += _differs("the batch without memory", second, right[1])
    elif not isinstance(result := _result(second), Fault):
        faults.append("the batch without memory was answered")
    elif not result.memory:
        faults.append(f"the batch without memory was not refused for that: {result.text}")
    set_memory(True)
    return faults + _wrong("the batch after", runner.begin([asked[2]]), runner, right[2])


def _wrong(name: str, run: Run[_Request], runner: EngineRunner, right: list[np.ndarray]) -> list[str]:
    return _differs(name, runner.finish(run), right)


def _differs(name: str, run: Run[_Request], right: list[np.ndarray]) -> list[str]:
    result = _result(run)
    if isinstance(result, Fault):
        return [f"{name} failed: {result.text}"]
    found = gap(result, right)
    return [] if found <= FP32_GAP else [f"{name} is wrong by {found:.3g} of its largest number"]


def _result(run: Run[_Request]) -> list[np.ndarray] | Fault:
    """The run's result. Raises DeviceLost."""
    if isinstance(run.result, Fault) and run.result.lost:
        raise DeviceLost(run.result.text)
    return run.result


def _setting(limit: list[int], rows: int, most: int) -> Callable[[bool], None]:
    def set_memory(enough: bool) -> None:
        limit[0] = most if enough else rows

    return set_memory


def _request(spec: ModelSpec, parts: Sequence[Sequence[np.ndarray]]) -> _Request:
    return _Request([part[0] for part in parts], spec.max_batch_size)


def _runner(spec: ModelSpec, engine: object) -> EngineRunner:
    return EngineRunner(spec, engine, time.monotonic_ns, Ceiling())  # type: ignore[arg-type]
