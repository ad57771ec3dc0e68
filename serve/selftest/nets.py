"""The nets of the selftest: models of the zoo, captured on the spot, with batches of generated inputs. Answers of a
device are compared with those of the FP32 program on a CPU.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from ...exporters.inputs.synthetic import generate
from ...exporters.torch.autocast.bit_equality import half_by_rules
from ...models.capture.capture import capture
from ...models.engines.arrays import to_torch
from ...models.engines.engine import Engine, Launched
from ...models.engines.torch_engine import TorchEngine
from ...models.folder.package import read_folder
from ...models.spec.spec import ModelSpec
from ...models.zoo import zoo_folder

NAMES = ("mlp", "resnet", "bert", "lstm")
CPU = torch.device("cpu")
Parts = list[list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class Net:
    """A captured FP32 program. ``loops``: it has a recurrent layer, which is half on CUDA alone."""

    name: str
    spec: ModelSpec
    original: ExportedProgram
    loops: bool = False

    def half(self, device: torch.device) -> ExportedProgram:
        """The half by autocast's lists of the device, on a CPU; loops are half as on CUDA."""
        example = [to_torch(part[0]) for part in self.batch(min(3, self.spec.max_batch_size))]
        return half_by_rules(
            self.original, self.spec, example, device.type, half_loops=device.type == "cuda"
        ).program

    def batch(self, *rows: int, seed: int = 0) -> Parts:
        """One batch of requests with so many rows, the same for the same seed."""
        samples = generate(self.spec, sum(rows), seed).arrays
        ends = np.cumsum(rows)[:-1]
        return [np.split(samples[tensor.name], ends) for tensor in self.spec.inputs]

    def tensors(self, rows: int, device: torch.device, seed: int = 0) -> list[Tensor]:
        return [to_torch(part[0]).to(device) for part in self.batch(rows, seed=seed)]

    def engine(self, program: ExportedProgram, device: torch.device) -> TorchEngine:
        return TorchEngine(
            program, "fp32" if program is self.original else "fp16", device, rows_apart=True, spec=self.spec
        )

    def expected(self, batches: Sequence[Parts]) -> list[list[np.ndarray]]:
        """The answers of the FP32 original on a CPU."""
        engine: Engine = self.engine(self.original, CPU)
        try:
            return [engine.run(parts) for parts in batches]
        finally:
            engine.close()


def captured_net(name: str) -> Net:
    """The zoo's model of that name, captured in a child process. Raises CaptureFailed."""
    folder = read_folder(zoo_folder(name))
    found = capture(folder, generate(folder.spec).arrays)
    loops = any("lstm" in str(node.target) for node in found.program.graph.nodes)
    return Net(name, found.spec, found.program, loops)


FP32_GAP = 1e-3  # of the largest magnitude: sums in another order are far below, rubbish is far above
HALF_GAP = 2**-7  # 16 times half's unit roundoff


def answers_in_flight(engine: Engine, batches: Sequence[Parts]) -> list[list[np.ndarray]]:
    """The outputs of each batch, as many under way as the engine takes ahead. All are taken before one is looked at."""
    flying: deque[Launched] = deque()
    taken: list[list[np.ndarray]] = []
    try:
        for parts in batches:
            flying.append(engine.launch(parts))
            if len(flying) == engine.in_flight:
                taken.append(flying.popleft().wait())
        while flying:
            taken.append(flying.popleft().wait())
    finally:
        for launched in flying:
            launched.wait()
    return taken


def gap(came: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference as a part of that output's largest magnitude; infinity where it is none."""
    if len(came) != len(expected):
        return float("inf")
    worst = 0.0
    for one, other in zip(came, expected, strict=True):
        if one.shape != other.shape or not np.isfinite(one).all():
            return float("inf")
        largest = float(np.abs(other).max(initial=0.0)) or 1.0
        worst = max(worst, float(np.abs(one.astype(np.float64) - other).max(initial=0.0)) / largest)
    return worst


def wrong_batches(
    net: str, came: Sequence[Sequence[np.ndarray]], expected: Sequence[Sequence[np.ndarray]], most: float
) -> list[str]:
    """A sentence about the batches whose answers differ by more than ``most``; none where all are right."""
    gaps = [gap(one, other) for one, other in zip(came, expected, strict=True)]
    wrong = [number for number, found in enumerate(gaps) if not found <= most]
    if not wrong:
        return []
    return [
        f"{net}: {len(wrong)} of {len(gaps)} batches differ from the FP32 program by more than {most:.3g} of the "
        f"largest number; batch {wrong[0]} by {gaps[wrong[0]]:.3g}"
    ]
