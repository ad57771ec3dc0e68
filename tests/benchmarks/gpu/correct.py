"""Wrong answers first: half against live autocast, recorded batches against computed ones, the gate on this device."""

from functools import partial

import numpy as np
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.inputs.samples import load_samples
from halfeven.exporters.on_device.reprove import reprove
from halfeven.exporters.torch.autocast.bit_equality import live_outputs, outputs_of, same_numbers
from halfeven.models.engines.load import load_half
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.models.program import on_device
from halfeven.models.store.store import Store
from halfeven.serve.selftest.nets import answers_in_flight
from torch import nn
from torch.export import ExportedProgram

from tests.benchmarks.gpu.nets import Net, Parts, nets
from tests.benchmarks.gpu.phase import Phase
from tests.benchmarks.workloads import write_folder
from tests.programs import original

DEPTHS = (3, 5, 2)  # layers: with odd ones a slot's answers may lie where the other slot computes


def measure(phase: Phase) -> None:
    use_true_fp32()
    for layers in DEPTHS:
        phase.part("recorded chain", partial(_chain, phase, layers), layers=layers)
    for net in nets(phase):
        phase.part("bit equality", partial(_bits, phase, net), net=net.name)
        phase.part("recorded net", partial(_recorded, phase, net), net=net.name)
    if not phase.simulated:  # its own tests hold that
        for name in ("tiny",) if phase.tiny else ("tiny", "image"):
            phase.part("stored", partial(_stored, phase, name), model=name)


def _bits(phase: Phase, net: Net) -> None:
    """The half by the lists alone gives live autocast's bits. On a CPU it has the lists of CUDA, as live has not."""

    def there(program: ExportedProgram) -> ExportedProgram:
        return on_device(program, phase.device) if phase.cuda else program

    inputs = [torch.from_numpy(net.draw(3)).to(phase.device)]
    half = outputs_of(there(net.half), inputs)
    if phase.simulated:
        phase.facts.add("half computed", net=net.name)
        return
    live = live_outputs(there(net.original.program), inputs)
    worst = max(float((a.float() - b.float()).abs().max()) for a, b in zip(live, half, strict=True))
    equal, name = all(map(same_numbers, live, half)), "bit equality with live autocast"
    phase.facts.claim(name, equal or not phase.cuda, net=net.name, equal=equal, worst=worst)


def _chain(phase: Phase, layers: int) -> None:
    width, rows = (16, 4) if phase.tiny else (2048, 512)
    torch.manual_seed(layers)
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    program = original(module, {"input": torch.randn(8, width)}, max_batch_size=rows)
    engine = TorchEngine(program.program, "fp32", phase.device, rows_apart=True, spec=program.spec)
    draw = np.random.default_rng()
    batches: list[Parts] = [[[draw.standard_normal((rows, width), dtype=np.float32)]] for _ in range(60)]
    _compare(phase, engine, batches, layers=layers)


def _recorded(phase: Phase, net: Net) -> None:
    engine = net.engine(phase.device)
    _compare(phase, engine, [[[net.draw(8)]] for _ in range(8 if phase.tiny else 24)], net=net.name)


def _compare(phase: Phase, engine: TorchEngine, batches: list[Parts], **of: object) -> None:
    """One batch after the other operation by operation, then the same with two in flight, then recorded: every bit."""
    engine.warm_up(batches[0])
    right = [engine.run(parts) for parts in batches]
    ways = {"computed": answers_in_flight(engine, batches)}
    if phase.cuda:
        waits = _waits_of_a_launch(engine, batches[0])
        phase.facts.claim("the host waits for nothing while it launches", not waits, said=waits, **of)
        engine.record(batches[0])
        ways["recorded"] = answers_in_flight(engine, batches)
    for way, came in ways.items():
        wrong = sum(not all(map(np.array_equal, one, other)) for one, other in zip(came, right, strict=True))
        phase.facts.claim("batches in flight", not wrong, way=way, wrong=wrong, batches=len(batches), **of)
    engine.close()


def _waits_of_a_launch(engine: TorchEngine, parts: Parts) -> str:
    """The error of torch for a call that waits for the device; empty where no call waits."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = engine.launch(parts)
    except RuntimeError as error:
        return str(error)[:300]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    launched.wait()
    return ""


def _stored(phase: Phase, name: str) -> None:
    """A model converted on the CPU, and proven again here."""
    folder = write_folder(phase.scratch / "folders", name, "torch", "O1")
    version = convert(folder, Store(phase.scratch / "store"), Options(forms=("torch",))).version
    samples = load_samples(version.file("samples.safetensors"), version.spec())
    half = load_half(version, "torch", phase.device)
    report = reprove(version, half, phase.device, samples)
    half.close()
    phase.facts.claim("gate of a stored model", report.passed, model=name, report=report.summary())
