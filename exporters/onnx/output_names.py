"""What the outputs are called in an ONNX file that is written here.

A name stands for one value in ONNX. A module may give its output the name of an input (``sample`` of a denoiser): that
output has another name in the file, which callers do not see.
"""

import numpy as np

from ...models.spec import ModelSpec
from ..question import Answers, Arrays


def output_names(spec: ModelSpec) -> dict[str, str]:
    """Each output's name in the spec → its name in the file: the same, or ``NAME_output`` where an input has it."""
    inputs, outputs = ({tensor.name for tensor in tensors} for tensors in (spec.inputs, spec.outputs))
    names: dict[str, str] = {}
    for tensor in spec.outputs:
        name = tensor.name
        while name in inputs or (name in outputs and name != tensor.name):
            name += "_output"
        names[tensor.name] = name
    return names


def as_in_spec(spec: ModelSpec, answers: Answers) -> Answers:
    """The answers of a file, under the spec's names. Outputs that are not the spec's keep theirs."""
    ours = {in_file: name for name, in_file in output_names(spec).items()}

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        return {ours.get(name, name): array for name, array in answers(arrays).items()}

    return answer
