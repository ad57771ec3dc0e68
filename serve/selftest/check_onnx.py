"""ONNX halves compute on the device, no half tensor on the CPU, and answer as the FP32 program does."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnxruntime
import torch

from ...exporters.torch.onnx_form.export import write_onnx
from ...models.engines.switched_off import ONNX_HALF
from .comparing import HALF_GAP, answers_in_flight, wrong_batches
from .nets import Net
from .outcome import FAILED, PASSED, Outcome, not_applicable, on_cuda_alone
from .plain_way import found

_PROVIDER = "CUDAExecutionProvider"
ROWS = (1, 3, 2, 3)


def check(device: torch.device, nets: Sequence[Net]) -> Outcome:
    if device.type != "cuda":
        return on_cuda_alone("a choice between it and the CPU")
    if _PROVIDER not in onnxruntime.get_available_providers():
        return not_applicable(
            f"this ONNX Runtime ({onnxruntime.__version__}) has no {_PROVIDER}: no ONNX form runs on {device}"
        )
    nodes: dict[str, int] = {}

    def faults() -> list[str]:
        return [fault for net in nets if not net.loops for fault in _faults(net, device, nodes)]

    wrong = found(faults, device)
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), (ONNX_HALF,), {"nodes on the device": nodes})
    evidence = (
        f"{sum(nodes.values())} nodes of {len(nodes)} halves are on the device, none with a half on the CPU"
    )
    return Outcome(PASSED, evidence, figures={"nodes on the device": nodes})


def _faults(net: Net, device: torch.device, nodes: dict[str, int]) -> list[str]:
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
