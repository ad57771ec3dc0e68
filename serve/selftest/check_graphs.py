"""Recorded batches (CUDA graphs) give the bits of the program that runs operation by operation.

Where the program itself gives other bits in each run, they agree within the gate.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...models.engines.cuda_graphs import agreement_of, agrees
from ...models.engines.switched_off import CUDA_GRAPHS
from ...models.spec.buckets import buckets_of
from .comparing import answers_in_flight
from .nets import Net
from .outcome import FAILED, PASSED, Outcome, not_applicable, on_cuda_alone
from .plain_way import found

ROUNDS = 3


def check(device: torch.device, nets: Sequence[Net]) -> Outcome:
    if device.type != "cuda":
        return on_cuda_alone("graphs")
    recorded: list[str] = []
    left_out: list[str] = []

    def faults() -> list[str]:
        return [fault for net in nets for fault in _faults(net, device, recorded, left_out)]

    wrong = found(faults, device)
    figures = {"recorded": recorded, "needs the host": left_out}
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), (CUDA_GRAPHS,), figures)
    if not recorded:
        return not_applicable("no net can be recorded: each needs the host in the middle")
    return Outcome(PASSED, f"{', '.join(recorded)}: replays equal the program", figures=figures)


def _faults(net: Net, device: torch.device, recorded: list[str], left_out: list[str]) -> list[str]:
    engine = net.engine(net.half(device), device)
    try:
        if engine.host_reads:
            left_out.append(net.name)
            return []
        sizes = buckets_of(net.spec, engine.device)
        batches = [net.batch(rows, seed=seed) for seed in range(ROUNDS) for rows in sizes]
        engine.warm_up(net.batch(sizes[-1]))
        eager = answers_in_flight(engine, batches)
        for rows in sizes:
            engine.record(net.batch(rows))
        replayed = answers_in_flight(engine, batches)
    finally:
        engine.close()
    how = f"within the gate: {', '.join(engine.in_any_order)}" if engine.in_any_order else "bit for bit"
    recorded.append(f"{net.name} ({how})")
    allowed = agreement_of(engine.precision, engine.in_any_order)
    differing = {
        len(parts[0][0])
        for parts, one, other in zip(batches, replayed, eager, strict=True)
        if not _all_agree(one, other, allowed)
    }
    return [f"{net.name}: replays at {sorted(differing)} rows differ from the program"] if differing else []


def _all_agree(one: Sequence[np.ndarray], other: Sequence[np.ndarray], allowed: float) -> bool:
    pairs = zip(one, other, strict=True)
    return all(agrees(torch.from_numpy(a), torch.from_numpy(b), allowed) for a, b in pairs)
