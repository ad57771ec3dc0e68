"""The half program is, bit for bit, what live autocast computes on the device."""

from collections.abc import Sequence

import torch

from ...exporters.torch.autocast.bit_equality import (
    agreement_on,
    live_outputs,
    outputs_of,
    same_numbers,
)
from ...models.engines.switched_off import TORCH_HALF
from ...models.program import on_device
from .nets import Net
from .outcome import FAILED, PASSED, Outcome, not_applicable
from .plain_way import found

ROWS = 3


def check(device: torch.device, nets: Sequence[Net]) -> Outcome:
    """Over all nets but those whose plan keeps recurrent layers in FP32 on this device."""
    judged = [net for net in nets if device.type == "cuda" or not net.loops]
    acted: list[str] = []

    def faults() -> list[str]:
        return [fault for net in judged for fault in _faults(net, device, acted)]

    wrong = found(faults, device)
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), (TORCH_HALF,))
    if not acted:
        return not_applicable(f"torch.autocast changes nothing on {device}: there is nothing to compare with")
    return Outcome(PASSED, f"{', '.join(acted)}: every output is equal bit for bit", figures={"nets": acted})


def _faults(net: Net, device: torch.device, acted: list[str]) -> list[str]:
    """``acted`` gets the net's name where autocast changes its outputs: only then the comparison says anything."""
    inputs = net.tensors(ROWS, device)
    original, half = (
        program if device.type == "cpu" else on_device(program, device)
        for program in (net.original, net.half(device))
    )
    live, came, fp32 = live_outputs(original, inputs), outputs_of(half, inputs), outputs_of(original, inputs)
    if all(map(same_numbers, live, fp32)):
        return []
    acted.append(net.name)
    names = [output.name for output in net.spec.outputs]
    allowed = agreement_on(device, half)
    pairs = zip(names, live, came, strict=True)
    wrong = [name for name, one, other in pairs if not same_numbers(one, other, allowed)]
    return [f"{net.name}: output {', '.join(wrong)} differs from live autocast's"] if wrong else []
