"""Runs an ONNX file in a process of its own: with a size that does not fit, some graphs end the process they run in."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from onnx import ModelProto

from ...models.errors import BadFolder, EngineFailed, TooLarge
from ...models.machine.usable_cores import usable_cores
from ...models.order.lacking_memory import mentions_lacking_memory
from ...models.order.one_order import MEMORY_SETTING, RUNS_SETTING, Order, one_order
from ..onnx.reading.bounded_file import external_files
from .run_child import read_message, write_message

_CHILD = "halfeven.exporters.guessing.run_child"
MOST_WITHOUT_MEMORY = 8  # runs
# Bytes that the process may have beside `TIMES_ITS_FILE`, where the order's memory was not set: a graph may make
# anything as large as it likes.
RUN_BYTES = 4 * 2**30
TIMES_ITS_FILE = 12  # of a file of trees ONNX Runtime takes eight times the size, and it is sent to the child
_INSTEAD = "give inputs with which it runs (halfeven init FILE --samples INPUTS), or write a model.toml"


@contextmanager
def file_runs(path: Path, model: ModelProto, outputs: Sequence[str]) -> Iterator["FileRuns"]:
    """``model`` was read from ``path``. Raises BadFolder where ONNX Runtime cannot load it."""
    with one_order() as order:
        runs = FileRuns(path, model, outputs, order)
        try:
            runs.start()
            yield runs
        finally:
            runs.close()


class FileRuns:
    """Called with inputs by name, it gives the outputs asked for, in their order.

    ``failure``: what the last run that failed said. Raises EngineFailed where the file does not run with these inputs,
    or the process ended; OrderEnded and TooLarge where the order's bounds are reached.
    """

    def __init__(self, path: Path, model: ModelProto, outputs: Sequence[str], order: Order) -> None:
        self._path, self._outputs, self._order, self.failure = path, list(outputs), order, ""
        beside = external_files(path, model)
        self._source = str(path) if beside else None
        self._model = {} if beside else {"model": np.frombuffer(model.SerializeToString(), np.uint8)}
        self._process: subprocess.Popen[bytes] | None = None
        size = sum(file.stat().st_size for file in (path, *beside.values()))
        self._most_bytes = order.bounds.memory_bytes or min(
            RUN_BYTES + TIMES_ITS_FILE * size, order.memory_bytes
        )
        self._runs = self._without_memory = 0

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", _CHILD, str(os.getpid())]
        pipe = subprocess.PIPE
        self._process = self._order.start(
            command, self._most_bytes, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
        try:
            head = {"path": self._source, "outputs": self._outputs, "threads": usable_cores()}
            self._asked(head, self._model)
        except EngineFailed as error:
            if mentions_lacking_memory(str(error)):
                raise self._order.out_of_memory(f"{self._path}: its load by ONNX Runtime") from error
            raise BadFolder(
                f"{self._path}: ONNX Runtime cannot load it: {str(error)[:500]}; expected a file that it runs on a "
                "CPU: cut operations that it does not have off it (onnx.utils.extract_model), or export it again"
            ) from error

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        self._runs += 1
        if self._runs > (most := self._order.bounds.runs):
            raise TooLarge(
                f"{self._path}: {most} trial runs did not settle its sizes, the most of one file: {_INSTEAD}, or raise "
                f"{RUNS_SETTING}"
            )
        if self._process is None:  # the last run ended it
            self.start()
        try:
            given = self._asked({}, arrays)
        except EngineFailed as error:
            self.failure = str(error)
            if mentions_lacking_memory(str(error)) or self._order.was_killed_for_memory():
                self._count_memory()
            raise
        return [given[name] for name in self._outputs]

    def _count_memory(self) -> None:
        self._without_memory += 1
        bound = f"more than {self._most_bytes / 2**20:,.0f} MiB of memory, the most that such a run has"
        self.failure = f"it needs {bound} ({MEMORY_SETTING} raises it): {self.failure}"
        if self._without_memory >= MOST_WITHOUT_MEMORY:
            raise TooLarge(
                f"{self._path}: {self._without_memory} trial runs needed {bound}: {_INSTEAD}, or raise {MEMORY_SETTING}"
            )

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()

    def _asked(self, head: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(self._order.left_s, process.kill)
        timer.start()
        try:
            write_message(process.stdin, head, arrays)
            said, given = read_message(process.stdout)
        except (OSError, EOFError) as error:
            self.close()
            if not self._order.left_s:
                raise self._order.out_of_time(f"{self._path}: a trial run") from error
            raise EngineFailed(
                f"the process ended with status {process.returncode}: the graph does not run with these inputs"
            ) from error
        finally:
            timer.cancel()
        if "error" in said:
            raise EngineFailed(said["error"])
        return given
