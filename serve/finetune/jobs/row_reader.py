"""Reads the files of a job, checks them against the model and divides their rows, in a process of its own.

    python -m halfeven.serve.finetune.jobs.row_reader REQUEST.json

Standard output is one JSON object per line: ``reading`` before each file, and as the last one ``checked``, ``divided``
or ``refused``. The process has a bound on its memory, stands behind serving, and ends with the server. It needs no
torch, but for ``trainable = "head"``.
"""

import json
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....models.errors import BadSamples, DiskFull, HalfevenError
from ....models.files.durable import no_space_left
from ....models.folder.loss_and_optimizer_names import IGNORED
from ....models.order.ends_with_parent import reporting
from ....models.store.store import Store, Version
from ..data.data_findings import findings_of
from ..data.datasets import (
    TrainingData,
    check_no_overlap,
    read_training,
    seen_in_training,
    split,
    with_classes,
)
from ..data.tables import IN_WORK
from ..judging.judging_sets import MOST_JOINED, evenly
from ..training.loop.setting_names import MASK
from .choices.hyperparameter_table import QUARANTINE
from .choices.hyperparameters import held_out_share
from .choices.loss_choice import check_targets, losses_by_output
from .choices.trainable import trainable_of
from .records.row_files import HELD_OUT, ROWS, SEEN, TRAINING, VALIDATION, BadTrainingFile

Line = dict[str, Any]
Request = Mapping[str, Any]
Report = Callable[[Line], None]
SECONDS = 600  # of processor time
_MOST_NAMED = 10  # rows in an event
_MOST_WORDS = 2000  # characters of a message, which may have names of the caller's file in it
_OWN_BYTES = 2 << 30  # of the process itself; its libraries map much that they do not use


def main() -> None:
    request, report = reporting(sys.argv[1])
    stand_back(request)
    work = {"check": checked, "divide": divided}[request["task"]]
    try:
        report(work(request, report))
    except Exception as error:
        report(refusal(error, request))


def stand_back(request: Request) -> None:
    """Bounded in memory and processor time."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes(request), most_bytes(request)))
    except (OSError, ValueError):  # macOS refuses it
        if sys.platform == "linux":
            raise


def most_bytes(request: Request) -> int:
    return 4 * request["max_bytes"] + _OWN_BYTES


def checked(request: Request, report: Report) -> Line:
    """The checks of a job that is asked for. Raises BadTrainingFile, BadHyperparameter."""
    parent, values = _parent(request), request["hyperparameters"]
    training = _read_for_admission(request, TRAINING, parent, report)
    trainable_of(parent, values, training.losses)
    share = held_out_share(values["validation_split"], training.rows)
    train = np.arange(training.rows)
    if VALIDATION not in request["files"]:
        train, _ = split(training.rows, share, request["seed"])
    else:
        validation = _read_for_admission(request, VALIDATION, parent, report)
        try:
            check_no_overlap(training, validation)
            _check_same_targets(training, validation)
        except BadSamples as error:
            raise BadTrainingFile(str(error), VALIDATION) from error
    found = findings_of(parent, training, train)
    return {"type": "checked", "train": len(train), "validation_split": share, "findings": found}


def divided(request: Request, report: Report) -> Line:
    """Divide the rows of an admitted job and write them into its folder, the same for the same files, hyperparameters
    and seed. Raises BadSamples."""
    parent, values, folder = _parent(request), request["hyperparameters"], Path(request["folder"])
    for left in folder.glob(f"{IN_WORK}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    data = _read(request, TRAINING, parent, report)
    held = np.array([], np.int64)
    if VALIDATION in request["files"]:
        train, held_out = np.arange(data.rows), _read(request, VALIDATION, parent, report).samples
    else:
        train, held = split(data.rows, values["validation_split"], request["seed"])
        held_out = data.samples.take(held)
    twins = seen_in_training(data, train, held)
    data.samples.save(folder / "data.safetensors")
    spec = parent.spec()
    with_classes(spec, held_out).save(folder / HELD_OUT)
    with_classes(spec, evenly(data.samples.take(train), MOST_JOINED)).save(folder / SEEN)
    (folder / ROWS).write_text(json.dumps(train.tolist()))
    return {
        "type": "divided",
        "rows": data.rows,
        "train": len(train),
        "losses": data.losses,
        "left_out": list(data.quarantined),
        "twins": twins[:_MOST_NAMED],
        "twin_count": len(twins),
    }


def refusal(error: Exception, request: Request) -> Line:
    """The last line of a process whose work ended with ``error``. Raises it again where it is a mistake of ours."""
    if isinstance(error, MemoryError):
        gib = most_bytes(request) / 2**30
        error = BadSamples(f"to read it needs more than {gib:.1f} GiB of memory; give fewer rows")
    elif no_space_left(error):
        error = DiskFull("the rows could not be written")
    elif not isinstance(error, HalfevenError):
        raise error
    words = str(error)
    return {
        "type": "refused",
        "code": error.code,
        "param": getattr(error, "param", None),
        "message": words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}…",
    }


def _parent(request: Request) -> Version:
    return Store(Path(request["store"])).version(request["model"], request["version"])


def _read_for_admission(request: Request, param: str, parent: Version, report: Report) -> TrainingData:
    """Raises BadTrainingFile, which names the file as its caller does."""
    values = request["hyperparameters"]
    try:
        found = _read(request, param, parent, report)
        declared = parent.manifest.get("training", {}).get("loss")
        check_targets(losses_by_output(parent.spec(), found.losses, declared, values), found)
        return found
    except (BadSamples, MemoryError) as error:
        sentence = refusal(error, request)["message"].removeprefix(f"{Path(request['files'][param]).name}: ")
        raise BadTrainingFile(f"{param} {request['names'][param]}: {sentence}", param) from error


def _read(request: Request, param: str, parent: Version, report: Report) -> TrainingData:
    report({"type": "reading", "param": param})
    values, work = request["hyperparameters"], Path(request["folder"])
    quarantine, ignored = values.get("bad_rows") == QUARANTINE, values.get("ignore_index", IGNORED)
    file = Path(request["files"][param])
    masked = values.get("missing_targets") == MASK
    return read_training(file, parent.spec(), request["max_bytes"], quarantine, work, ignored, masked)


def _check_same_targets(training: TrainingData, validation: TrainingData) -> None:
    if training.losses.keys() != validation.losses.keys():
        raise BadSamples(
            f"validation_file: expected targets for {sorted(training.losses)} as in the training file, got "
            f"{sorted(validation.losses)}"
        )


if __name__ == "__main__":
    main()
