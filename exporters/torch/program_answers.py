"""A program, run as a graph, as a function of named arrays; and which of its integers may differ because scores tie."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from ...models.engines.arrays import to_numpy, to_torch
from ...models.spec.spec import UNIT_ROUNDOFF, ModelSpec
from ..gate.choosers import choices, find_tied
from ..gate.steppers import find_stepped, run_with_steps
from ..gate.steps import See, Steps, near_ties
from ..gate.ties import Ties
from ..inputs.samples import Samples
from ..proof.prove import SEEN_AT_ONCE
from ..question import Answers, Arrays, TieTolerance


def emulated(spec: ModelSpec, emulation: Interpreter) -> Answers:
    """A half program on a CPU without half kernels."""

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            outputs = emulation.run(*[to_torch(arrays[tensor.name].copy()) for tensor in spec.inputs])
        answers = zip(spec.outputs, outputs, strict=True)
        return {tensor.name: to_numpy(answer.to(tensor.type.torch)) for tensor, answer in answers}

    return answer


def ties_of(module: GraphModule, spec: ModelSpec, dtype: str, judging: Samples) -> TieTolerance | None:
    """The tie tolerance of an original program (`models.program.runnable`); None where no scores can tie."""
    inputs, outputs = ([tensor.name for tensor in side] for side in (spec.inputs, spec.outputs))
    rows = min(spec.max_batch_size, SEEN_AT_ONCE) if spec.batched else 0

    def asked() -> Iterator[Arrays]:
        return (arrays for _, arrays in judging.batches(rows))

    def of(arrays: Arrays) -> list[np.ndarray]:
        return [arrays[name] for name in inputs]

    tied, u = find_tied(module, outputs), UNIT_ROUNDOFF[dtype]
    stepped = find_stepped(module, outputs, {one.output for one in tied})

    def with_steps(given: Arrays, see: See[Node]) -> None:
        run_with_steps(module, (inputs, outputs), stepped, given, see)

    return near_ties(
        Ties([one.output for one in tied], lambda given: choices(module, tied, of(given)), u, asked)
        if tied
        else None,
        Steps(stepped, with_steps, u, asked) if stepped else None,
    )
