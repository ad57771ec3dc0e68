"""The files of a job, read by a process of its own (`row_reader.py`): its request, and its answers understood.

Of a training file the server's process itself reads nothing but the held-out rows, which the active version answers:
they are mapped from the file that the reader has written.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....exporters.inputs.samples import MAX_BYTES, Samples, mapped_samples
from ....models.errors import BadSamples, DiskFull, HalfevenError, NotReady
from ....models.order.lacking_memory import exit_words
from ....models.store.store import Version
from ..data.files import Files
from .records.job_store import JobStore
from .records.job_types import JobTerms
from .records.row_files import HELD_OUT, TRAINING, VALIDATION, BadTrainingFile
from .worker_process import Child, Priority

READER = "halfeven.serve.finetune.jobs.row_reader"
Line = Mapping[str, Any]


class ReaderLost(BadSamples):
    """The process that read a file ended without an answer. ``param`` says which of the job's files; give fewer rows,
    or a file without damage."""

    code = "reader_lost"


@dataclass(frozen=True, slots=True)
class Asked:
    """A job's files, and what the reader needs to check and divide their rows: the parent version, the hyperparameters
    and the seed. ``files``: paths by ``training_file`` and ``validation_file``."""

    parent: Version
    files: Mapping[str, Path]
    hyperparameters: Mapping[str, Any]
    seed: int
    priority: Priority = "low"  # not idle: the caller who creates the job waits for the checks
    max_bytes: int = MAX_BYTES  # of a file, and of what a packed one unpacks to

    def request(self, task: str) -> dict[str, Any]:
        return {
            "task": task,
            "store": str(self.parent.folder.parents[2]),
            "model": self.parent.name,
            "version": self.parent.number,
            "files": {param: str(path) for param, path in self.files.items()},
            "hyperparameters": dict(self.hyperparameters),
            "seed": self.seed,
            "priority": self.priority,
            "max_bytes": self.max_bytes,
        }


def asked_of(job: JobTerms, parent: Version, job_store: JobStore, files: Files, priority: Priority) -> Asked:
    """The request for the rows of an admitted job, to be trained from ``parent``."""
    given = {TRAINING: job.training_file, VALIDATION: job.validation_file}
    paths = {param: files.path(job_store.file(id).sha256) for param, id in given.items() if id}
    return Asked(parent, paths, job.hyperparameters, job.seed, priority, files.max_bytes)


@dataclass(frozen=True, slots=True)
class JobRows:
    """The rows of a job as the reader has divided them, into files of ``folder``.

    ``rows``: of the training file, but for those that are ``left_out``; ``train`` of them are learnt from. ``losses``:
    the default loss of each output that is learnt. ``twin_count``: of held-out rows whose inputs are trained on too, of
    which ``twins`` are the first.
    """

    folder: Path
    rows: int
    train: int
    losses: Mapping[str, str]
    left_out: list[int]
    twins: list[int]
    twin_count: int

    @property
    def held_out(self) -> Samples:
        return mapped_samples(self.folder / HELD_OUT)

    def numbers(self, rows: Iterable[int]) -> list[int]:
        """The numbers in the caller's file of rows by their place among those that are not left out."""
        places = np.array(list(rows), np.int64)
        kept_before = np.sort(np.array(self.left_out, np.int64)) - np.arange(len(self.left_out))
        return (places + np.searchsorted(kept_before, places, side="right")).tolist()


def check(asked: Asked, names: Mapping[str, str], place: Path, leaving: Callable[[], bool]) -> Line:
    """Check the files of a job that is asked for: ``train``, the number of rows to learn from, ``validation_split``
    as a number, and ``findings``. ``names``: the files in messages. ``place``: a folder for the process's own files.

    Raises BadTrainingFile, BadHyperparameter; NotReady where the server leaves.
    """
    with tempfile.TemporaryDirectory(prefix=".upload-", dir=place) as folder:  # deleted at the next start too
        request = {**asked.request("check"), "names": dict(names), "folder": folder}
        child = Child.of_module(READER, request, Path(folder) / "read")
        try:
            return _answer(child, lines_until(child, leaving))
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or str(place)) from error
        except ReaderLost as error:
            param = error.param or TRAINING
            raise BadTrainingFile(f"{param} {names[param]}: {error}", param) from error


def divide(asked: Asked, folder: Path, lines: Callable[[Child], Iterable[Line]]) -> JobRows:
    """Divide the rows of an admitted job, into files of ``folder``. ``lines`` follows the process.

    Raises BadSamples, ReaderLost, and OSError where the disk is full.
    """
    child = Child.of_module(READER, {**asked.request("divide"), "folder": str(folder)}, folder / "read")
    last = _answer(child, lines(child))
    names = ("rows", "train", "losses", "left_out", "twins", "twin_count")
    return JobRows(folder, *(last[name] for name in names))


def lines_until(child: Child, leaving: Callable[[], bool]) -> Iterator[Line]:
    """The lines of a reader whose caller waits. Raises NotReady where the server leaves."""
    with child:
        for line in child.lines(every_s=0.1):
            if leaving():
                raise NotReady("the server is shutting down; ask the next one")
            if line is not None:
                yield line


def _answer(child: Child, lines: Iterable[Line]) -> Line:
    """The last line of a reader. Raises what it refused, and ReaderLost."""
    last: Line = {}
    param = TRAINING
    for line in lines:
        if line["type"] == "reading":
            param = line["param"]
        else:
            last = line
    if not last:
        raise ReaderLost(
            f"it cannot be read: the process that read it ended without an answer ({exit_words(child.exit_status)}); "
            f"give fewer rows, or another format. Its last output: {child.last_output()}",
            param,
        )
    if last["type"] == "refused":
        raise _error_of(last)
    return last


def _error_of(line: Line) -> Exception:
    """The error that the reader met, as an error of this process."""
    if line["code"] == DiskFull.code:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    kind = next(one for one in _kinds(HalfevenError) if one.code == line["code"])
    return kind(line["message"]) if line["param"] is None else kind(line["message"], line["param"])


def _kinds(kind: type[HalfevenError]) -> Iterator[type[HalfevenError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)
