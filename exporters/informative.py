"""Whether the judged samples can prove a half at all: not where the FP32 model answers nothing but zeros to them."""

import numpy as np

from .prove import ReferenceRun


def why_nothing_is_proven(run: ReferenceRun) -> str:
    """A reason where every answer in floating point is 0 or not finite; empty otherwise, or without such an output.

    Any half that also answers 0 would pass: a mask that generated lengths leave empty, a score below its threshold.
    """
    names = [tensor.name for tensor in run.spec.outputs if tensor.type.is_float]
    asked = [*run.small, *run.bulk, *run.perturbed]
    informative = any(
        (np.isfinite(question.reference[name]) & (question.reference[name] != 0)).any()
        for question in asked
        for name in names
    )
    if informative or not names or not asked:
        return ""
    which = f"output{'s' * (len(names) > 1)} " + ", ".join(f"'{name}'" for name in names)
    return (
        f"to every judged sample the FP32 model answers 0 or a number that is not finite ({which}), which proves "
        "nothing of a half; give samples that it has answers to (samples.safetensors in the model's folder, or "
        "--samples FILE)"
    )
