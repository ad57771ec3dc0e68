"""A program, run as a graph, as a function of named arrays; and which of its integers may differ because scores tie."""

from collections.abc import Mapping

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from ...models.engines.arrays import to_numpy, to_torch
from ...models.spec.spec import ModelSpec
from ..gate.choosers import choices, find_tied
from ..gate.steppers import find_stepped, run_with_steps
from ..gate.steps import See, near_ties
from ..gate.ties import Choice
from ..inputs.samples import Samples
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
    tied = find_tied(module, outputs)
    names = [one.output for one in tied]
    stepped = find_stepped(module, outputs, set(names))

    def chosen(given: Arrays) -> Mapping[str, Choice]:
        return choices(module, tied, [given[name] for name in inputs])

    def with_steps(given: Arrays, see: See[Node]) -> None:
        run_with_steps(module, (inputs, outputs), stepped, given, see)

    return near_ties(names, chosen, stepped, with_steps, spec, dtype, judging)
