"""The faster forms answer as the plain ones do, on the device:

- the half program gives, bit for bit, what live autocast computes;
- recorded batches (CUDA graphs) give the bits of the program that runs operation by operation, and agree within the
  gate where the program itself gives other bits in each run;
- ONNX halves have no half tensor on the CPU, and answer as the FP32 program does.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from ...exporters.torch.autocast.bit_equality import (
    agreement_on,
    live_outputs,
    outputs_of,
    same_numbers,
)
from ...exporters.torch.onnx_form.export import write_onnx
from ...models.engines.cuda_graphs import agreement_of, agrees
from ...models.engines.switched_off import CUDA_GRAPHS, ONNX_HALF, TORCH_HALF
from ...models.program import on_device
from ...models.spec.buckets import buckets_of
from .nets import HALF_GAP, Net, answers_in_flight, wrong_batches
from .plain_way import FAILED, PASSED, Outcome, found, not_applicable

BIT_ROWS = 3  # of the one batch that live autocast is compared on
ROUNDS = 3  # of recorded batches
ROWS = (1, 3, 2, 3)  # of the batches of an ONNX half
_PROVIDER = "CUDAExecutionProvider"


def bit_equality(device: torch.device, nets: Sequence[Net]) -> Outcome:
    """The comparison over all nets but those whose plan keeps recurrent layers in FP32 on this device."""
    judged = [net for net in nets if device.type == "cuda" or not net.loops]
    acted: list[str] = []

    def faults() -> list[str]:
        return [fault for net in judged for fault in _unlike_autocast(net, device, acted)]

    wrong = found(faults, device)
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), (TORCH_HALF,))
    if not acted:
        return not_applicable(f"torch.autocast changes nothing on {device}: there is nothing to compare with")
    return Outcome(PASSED, f"{', '.join(acted)}: every output is equal bit for bit", figures={"nets": acted})


def _unlike_autocast(net: Net, device: torch.device, acted: list[str]) -> list[str]:
    """``acted`` gets the net's name where autocast changes its outputs: only then the comparison says anything."""
    inputs = net.tensors(BIT_ROWS, device)
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


def graphs(device: torch.device, nets: Sequence[Net]) -> Outcome:
    recorded: list[str] = []
    left_out: list[str] = []

    def faults() -> list[str]:
        return [fault for net in nets for fault in _unlike_eager(net, device, recorded, left_out)]

    wrong = found(faults, device)
    figures = {"recorded": recorded, "needs the host": left_out}
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), (CUDA_GRAPHS,), figures)
    if not recorded:
        return not_applicable("no net can be recorded: each needs the host in the middle")
    return Outcome(PASSED, f"{', '.join(recorded)}: replays equal the program", figures=figures)


def _unlike_eager(net: Net, device: torch.device, recorded: list[str], left_out: list[str]) -> list[str]:
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


def onnx_placement(device: torch.device, nets: Sequence[Net]) -> Outcome:
    if _PROVIDER not in onnxruntime.get_available_providers():
        return not_applicable(
            f"this ONNX Runtime ({onnxruntime.__version__}) has no {_PROVIDER}: no ONNX form runs on {device}"
        )
    nodes: dict[str, int] = {}

    def faults() -> list[str]:
        return [fault for net in nets if not net.loops for fault in _badly_placed(net, device, nodes)]

    wrong = found(faults, device)
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), (ONNX_HALF,), {"nodes on the device": nodes})
    evidence = (
        f"{sum(nodes.values())} nodes of {len(nodes)} halves are on the device, none with a half on the CPU"
    )
    return Outcome(PASSED, evidence, figures={"nodes on the device": nodes})


def _badly_placed(net: Net, device: torch.device, nodes: dict[str, int]) -> list[str]:
    from ...models.engines.onnx_engine import OnnxEngine

    with tempfile.TemporaryDirectory(prefix="halfeven-selftest-") as folder:
        path = Path(folder) / "half.onnx"
        write_onnx(net.half(device), net.spec, path, {})
        engine = OnnxEngine(path, "fp16", device)
    try:
        assert engine.placement is not None, "an engine on CUDA has it"
        nodes[net.name] = engine.placement.nodes.get(_PROVIDER, 0)
        if engine.placement.half_on_cpu:
            return [f"{net.name}: {engine.placement.sentence()}"]
        batches = [net.batch(rows, seed=seed) for seed, rows in enumerate(ROWS)]
        return wrong_batches(
            f"{net.name} onnx", answers_in_flight(engine, batches), net.expected(batches), HALF_GAP
        )
    finally:
        engine.close()
