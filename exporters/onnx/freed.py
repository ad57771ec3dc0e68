"""A file that was exported for one row: its batch is made free where its answers then are those to one row at a time.

The answers are compared on the samples in FP32, at several sizes of batch. Where they differ the batch stays 1.
"""

from pathlib import Path

from ...models.errors import BadFolder, CannotConvert
from ...models.package import ModelFolder
from ...models.spec import ModelSpec
from ..inputs.samples import Samples
from .conversion import read_foreign
from .reading.graph import ForeignProgram, assembled
from .runtime import answers_alone_differ, finished, runtime_answers

SIZES = (2, 3, 16)  # rows of the batches that are compared, as far as max_batch_size admits them

Read = tuple[ForeignProgram, ModelSpec, list[str]]


def read_freed(path: Path, folder: ModelFolder, samples: Samples) -> Read:
    """As `read_foreign`; a batch of 1 is made free, and the notes say so, or why not.

    Raises BadFolder and TooLarge as `read_foreign` does.
    """
    fixed = read_foreign(path, folder)
    if fixed[1].max_batch_size == folder.spec.max_batch_size:
        return fixed
    try:
        free = read_foreign(path, folder, free_batch=True)
        if (reason := _difference(fixed[0], *free[:2], samples)) is None:
            return free
    except (BadFolder, CannotConvert) as error:
        reason = str(error)
    program, spec, notes = fixed
    return program, spec, [*notes, f"its batch was not made free: {reason}"]


def _difference(fixed: ForeignProgram, free: ForeignProgram, spec: ModelSpec, samples: Samples) -> str | None:
    if samples.count < 2:
        return "one sample does not show whether rows are answered apart; give two or more"
    original = assembled(free.model, free.weights)
    finished(original, "the graph with a free batch")
    alone = runtime_answers(assembled(fixed.model, fixed.weights))
    return answers_alone_differ(spec, samples, runtime_answers(original), SIZES, alone)
