"""``halfeven diff A B``: both run side by side, and the first tensor that differs, with its node as a reproduction."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...models.errors import BadInput, BadSamples
from ...models.new_folder import new_folder
from ..inputs.samples import TARGET, read_tensors
from ..question import Answers
from .first_difference import FP32, compared, moved
from .onnx_side import OnnxSide

ROWS = 4  # of the samples that both are asked
DTYPES = {"fp32": FP32, "fp16": 2.0**-11, "bf16": 2.0**-8}


def differences(
    ours: Path, theirs: Path | Answers, samples: Path, dtype: str = "fp32", out: Path | None = None
) -> dict[str, Any]:
    """The facts: how many tensors both have, how many of them differ, and the first whose inputs do not.

    ``ours``: the ONNX file that is right. ``theirs``: another ONNX file, of which the values with the same names are
    compared, or an engine, whose outputs are. ``dtype``: the least type in which an engine computes. ``out``: a new
    folder for the reproduction. Raises BadSamples, BadInput where both have no tensor in common, NotRun.
    """
    a = OnnxSide(ours)
    arrays = {name: array for name, array in read_tensors(samples).items() if not name.startswith(TARGET)}
    if alone := [name for name, array in arrays.items() if array.ndim == 0 or not len(array)]:
        raise BadSamples(f"{samples.name}: '{alone[0]}' has no samples: expected them along axis 0")
    inputs = a.rows(arrays, ROWS)
    if not inputs:
        raise BadSamples(
            f"{samples.name}: expected the inputs {[value.name for value in a.model.graph.input]} of {ours}, got "
            f"{sorted(arrays)}"
        )
    mine, mine_moved = a.tensors(inputs), a.tensors(moved(inputs))
    if callable(theirs):
        answers = {name: np.asarray(array) for name, array in theirs(inputs).items()}
        roundoff: Mapping[str, float] = dict.fromkeys(answers, DTYPES[dtype])
    else:
        b = OnnxSide(theirs)
        answers = b.tensors(inputs)
        roundoff = {name: max(unit, DTYPES[dtype]) for name, unit in b.roundoff().items()}
    given = inputs.keys()
    found = compared(
        a.nodes, mine, mine_moved, {k: v for k, v in answers.items() if k not in given}, roundoff
    )
    if not found.tensors:
        raise BadInput(
            f"A and B have no tensor with the same name: {ours} makes {[node.name for node in a.nodes][-3:]}, …"
        )
    facts = {"equal": found.first is None, "tensors": found.tensors, "astray": found.astray}
    facts |= {"first": found.first and found.first.to_json(), "reproduction": None}
    if found.first is not None and out is not None:
        with new_folder(out) as folder:
            a.reproduction(found.first.tensor, mine, folder)
            np.savez(folder / "found.npz", a=mine[found.first.tensor], b=answers[found.first.tensor])
        facts["reproduction"] = str(out)
    return facts
