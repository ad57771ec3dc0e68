"""The nets of the selftest: models of the zoo, captured on the spot, with batches of generated inputs."""

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
from ...models.engines.engine import Engine
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
