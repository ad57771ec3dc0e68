"""Original programs for tests, captured as the child captures them, but here: no process, no folder."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from halfeven.models.capture import child as capture_child
from halfeven.models.capture.autocast import original_in_fp32, see_transformers
from halfeven.models.capture.capture import normalise
from halfeven.models.program import runnable
from halfeven.models.spec.datatypes import DATATYPES
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from torch import Tensor, nn
from torch.export import ExportedProgram

_NAMES = {datatype.torch: name for name, datatype in DATATYPES.items()}


@dataclass(frozen=True)
class Original:
    """A captured FP32 program with its spec, and ``example``: one batch of samples, an input each."""

    program: ExportedProgram
    spec: ModelSpec
    example: list[Tensor]

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            return tuple(runnable(self.program)(*tensors))


def original(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    free: Mapping[int, Dim] | None = None,
    max_batch_size: int = 64,
) -> Original:
    """Capture ``module`` on ``inputs`` (samples first) with a free batch; ``free``: further free axes of all."""
    return described(exported(module, inputs, free, max_batch_size), inputs, free, max_batch_size)


def exported_as_it_is(module: nn.Module, inputs: Mapping[str, Tensor], max_batch_size: int = 64) -> Original:
    """A program that an operator exported without us: one that writes over its inputs does so still."""
    batch = {0: torch.export.Dim("batch", max=max_batch_size)}
    shapes, module = [batch for _ in inputs], module.eval().requires_grad_(False)
    program = torch.export.export(module, tuple(inputs.values()), dynamic_shapes=shapes)
    program.example_inputs = None  # the simulated device takes no copy of them
    return described(program, inputs, None, max_batch_size)


def exported(
    module: nn.Module, inputs: Mapping[str, Tensor], free: Mapping[int, Dim] | None, max_batch_size: int
) -> ExportedProgram:
    """The program as the child exports it."""
    torch.backends.mha.set_fastpath_enabled(False)  # as the child does
    module = module.eval().requires_grad_(False)
    with torch.no_grad(), warnings.catch_warnings(), original_in_fp32(), see_transformers():
        warnings.simplefilter("ignore")  # torch warns of the weights of recurrent nets
        answer = module(**inputs)
        request = _request(inputs, free, max_batch_size, len(answer) if isinstance(answer, tuple) else 1)
        return capture_child.export(
            torch, capture_child.Flat(module, request), list(inputs.values()), request
        )


def described(
    program: ExportedProgram,
    inputs: Mapping[str, Tensor],
    free: Mapping[int, Dim] | None,
    max_batch_size: int,
) -> Original:
    """The program as the parent takes it from the child, with its spec."""
    nodes = {node.name: node for node in program.graph.nodes}
    values = [nodes[str(name)].meta["val"] for name in program.graph_signature.user_outputs]
    request = _request(inputs, free, max_batch_size, len(values))
    specs = tuple(_spec(name, tensor, free or {}) for name, tensor in inputs.items())
    outputs = [
        TensorSpec(name, _NAMES[v.dtype], tuple(Dim(s, s) if isinstance(s, int) else Dim() for s in v.shape))
        for name, v in zip(request["outputs"], values, strict=True)
    ]
    example = capture_child.rows_of(list(inputs.values()), min(3, max_batch_size), request)
    spec = ModelSpec("net", specs, tuple(outputs), max_batch_size=max_batch_size)
    return Original(normalise(program), spec, example)


def _request(
    inputs: Mapping[str, Tensor], free: Mapping[int, Dim] | None, max_batch_size: int, outputs: int
) -> dict[str, Any]:
    specs = [_spec(name, tensor, free or {}) for name, tensor in inputs.items()]
    return {
        "inputs": [{"name": t.name, "dims": [[d.minimum, d.maximum] for d in t.shape]} for t in specs],
        "outputs": [f"y{i}" for i in range(outputs)],
        "max_batch_size": max_batch_size,
        "folder": str(Path(__file__).parent),  # whose lines are told
        "path": [],
    }


def _spec(name: str, tensor: Tensor, free: Mapping[int, Dim]) -> TensorSpec:
    sizes = tuple(free.get(axis, Dim(size, size)) for axis, size in enumerate(tensor.shape))
    return TensorSpec(name, _NAMES[tensor.dtype], (Dim(), *sizes[1:]))
