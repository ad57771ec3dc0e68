"""A batch that finds no memory is refused or made smaller, and the batches beside and after it are answered."""

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..batching.ceiling import Ceiling
from ..batching.condition import Probe
from ..batching.engine_runner import EngineRunner, Fault, Run
from .nets import FP32_GAP, Net, gap
from .plain_way import DeviceLost, Outcome, judged

NO_DEVICE_HAS = 1 << 50  # bytes


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
        asked = [Probe([part[0] for part in net.batch(most, seed=seed)], most) for seed in range(3)]
        right = net.expected([[[array] for array in request.arrays] for request in asked])
        return [
            f"{net.name}, {what}: {fault}"
            for what, rows in (("no memory at all", 0), ("memory for half of the rows", most // 2))
            for fault in _trial(
                EngineRunner(net.spec, engine, time.monotonic_ns, Ceiling()), asked, right, limit, rows
            )
        ]
    finally:
        engine.close()


def _trial(
    runner: EngineRunner,
    asked: Sequence[Probe],
    right: Sequence[list[np.ndarray]],
    limit: list[int],
    rows: int,
) -> list[str]:
    """The first batch has memory, the second for so many ``rows`` at a time, the third has again."""
    most = limit[0]
    first = runner.begin([asked[0]])
    limit[0] = rows
    second = runner.begin([asked[1]])
    faults = _differs("the batch before", runner.finish(first), right[0])
    runner.finish(second)
    if rows:
        faults += _differs("the batch without memory", second, right[1])
    elif not isinstance(result := _result(second), Fault):
        faults.append("the batch without memory was answered")
    elif not result.memory:
        faults.append(f"the batch without memory was not refused for that: {result.text}")
    limit[0] = most
    return faults + _differs("the batch after", runner.finish(runner.begin([asked[2]])), right[2])


def _differs(name: str, run: Run[Probe], right: list[np.ndarray]) -> list[str]:
    result = _result(run)
    if isinstance(result, Fault):
        return [f"{name} failed: {result.text}"]
    found = gap(result, right)
    return [] if found <= FP32_GAP else [f"{name} is wrong by {found:.3g} of its largest number"]


def _result(run: Run[Probe]) -> list[np.ndarray] | Fault:
    """The run's result. Raises DeviceLost."""
    if isinstance(run.result, Fault) and run.result.lost:
        raise DeviceLost(run.result.text)
    return run.result
