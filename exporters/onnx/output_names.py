"""The names of a model's outputs inside the ONNX files that halfeven writes.

In an ONNX graph each name belongs to one value. A module may give an output the name of an input (``sample`` of a
denoiser): that output gets another name in the file, which callers of the server do not see.
"""

import numpy as np

from ...models.spec.spec import ModelSpec
from ..question import Answers, Arrays


def output_names(spec: ModelSpec) -> dict[str, str]:
    """Each output's name in the spec → its name in the file: the same name, or ``NAME_output`` where an input of the
    model is called NAME."""
    inputs, outputs = ({tensor.name for tensor in tensors} for tensors in (spec.inputs, spec.outputs))
    names: dict[str, str] = {}
    for tensor in spec.outputs:
        name = tensor.name
        while name in inputs or (name in outputs and name != tensor.name):
            name += "_output"
        names[tensor.name] = name
    return names


def as_in_spec(spec: ModelSpec, answers: Answers) -> Answers:
    """A function like ``answers``, which runs an ONNX file, whose outputs have the names of the spec. Outputs that the
    spec does not list keep their names."""
    ours = {in_file: name for name, in_file in output_names(spec).items()}

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        return {ours.get(name, name): array for name, array in answers(arrays).items()}

    return answer
