"""The time of one large batch of the half by kernel, beside the fewest bytes and operations of the net."""

from functools import partial

import torch
from halfeven.models.engines.true_fp32 import use_true_fp32
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.gpu.nets import Net, batches, nets
from tests.benchmarks.gpu.phase import Phase
from tests.benchmarks.gpu.speed import floor_of, half_of

MOST = 25  # kernels in the fact


def measure(phase: Phase) -> None:
    use_true_fp32()
    for net in nets(phase):
        phase.part("kernels", partial(_one, phase, net), net=net.name)


def _one(phase: Phase, net: Net) -> None:
    rows = max(batches(phase))
    half = half_of(phase, net)
    given = torch.from_numpy(net.draw(rows)).to(phase.device)
    activity = ProfilerActivity.CUDA if phase.cuda else ProfilerActivity.CPU
    with torch.inference_mode():
        half(given)
        phase.synchronize()
        with profile(activities=[activity]) as profiled:
            half(given)
            phase.synchronize()
    spent = "self_device_time_total" if phase.cuda else "self_cpu_time_total"
    found = sorted(profiled.key_averages(), key=lambda one: getattr(one, spent), reverse=True)
    operations, moved = floor_of(net, rows)
    phase.facts.add(
        "kernels",
        net=net.name,
        rows=rows,
        total_us=float(sum(getattr(one, spent) for one in found)),
        operations=operations,
        fewest_bytes=moved,
        kernels=[[round(getattr(one, spent)), one.count, one.key[:100]] for one in found[:MOST]],
    )
