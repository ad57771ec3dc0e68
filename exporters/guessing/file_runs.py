"""Runs an ONNX file in a process of its own: with a size that does not fit, some graphs end the process they run in."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from onnx import ModelProto

from ...models.errors import BadFolder, EngineFailed, OutOfTime, TooLarge
from ...models.usable_cores import usable_cores
from ...models.usable_memory import usable_memory
from ..onnx.reading.bounded_file import external_files
from .run_child import read_message, write_message

_CHILD = "halfeven.exporters.guessing.run_child"
# The budget of one order, of all trial runs of a file together. It ends them with a sentence, never with a guess.
ORDER_SECONDS, MOST_RUNS, MOST_WITHOUT_MEMORY = 600.0, 2000, 8
# Bytes that the process may have beside four times the file: a graph may make anything as large as it likes.
RUN_BYTES = 4 * 2**30
_OUT_OF_MEMORY = ("bad_alloc", "Failed to allocate", "std::bad_array_new_length", "Unable to allocate")
_INSTEAD = "give inputs with which it runs (halfeven init FILE --samples INPUTS), or write a model.toml"


@contextmanager
def file_runs(path: Path, model: ModelProto, outputs: Sequence[str]) -> Iterator["FileRuns"]:
    """``model`` was read from ``path``. Raises BadFolder where ONNX Runtime cannot load it."""
    runs = FileRuns(path, model, outputs)
    try:
        runs.start()
        yield runs
    finally:
        runs.close()


class FileRuns:
    """Called with inputs by name, it gives the outputs asked for, in their order.

    ``failure``: what the last run that failed said. Raises EngineFailed where the file does not run with these inputs,
    or the process ended; OutOfTime and TooLarge where the budget of all runs of the file is spent.
    """

    def __init__(self, path: Path, model: ModelProto, outputs: Sequence[str]) -> None:
        self._path, self._outputs, self.failure = path, list(outputs), ""
        beside = external_files(path, model)
        self._source = str(path) if beside else None
        self._model = {} if beside else {"model": np.frombuffer(model.SerializeToString(), np.uint8)}
        self._process: subprocess.Popen[bytes] | None = None
        size = sum(file.stat().st_size for file in (path, *beside.values()))
        self._most_bytes = min(RUN_BYTES + 4 * size, int(usable_memory() * 0.8))
        self._runs, self._without_memory, self._left_s = 0, 0, ORDER_SECONDS

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", _CHILD]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        try:
            head = {"path": self._source, "outputs": self._outputs, "threads": usable_cores()}
            head["most_bytes"] = self._most_bytes
            self._asked(head, self._model)
        except EngineFailed as error:
            raise BadFolder(f"{self._path}: ONNX Runtime cannot load it: {str(error)[:500]}") from error

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        self._runs += 1
        if self._runs > MOST_RUNS:
            raise TooLarge(
                f"{self._path}: {MOST_RUNS} trial runs did not settle its sizes, the most of one order: {_INSTEAD}"
            )
        if self._process is None:  # the last run ended it
            self.start()
        try:
            given = self._asked({}, arrays)
        except EngineFailed as error:
            self.failure = str(error)
            self._count_memory()
            raise
        return [given[name] for name in self._outputs]

    def _count_memory(self) -> None:
        self._without_memory += any(words in self.failure for words in _OUT_OF_MEMORY)
        if self._without_memory >= MOST_WITHOUT_MEMORY:
            raise TooLarge(
                f"{self._path}: {self._without_memory} trial runs needed more than {self._most_bytes} bytes of memory, "
                f"the most that such a run has: {_INSTEAD}"
            )

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()

    def _asked(self, head: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        began_s = time.monotonic()
        timer = threading.Timer(max(self._left_s, 0.0), process.kill)
        timer.start()
        try:
            write_message(process.stdin, head, arrays)
            said, given = read_message(process.stdout)
        except (OSError, EOFError) as error:
            self.close()
            if time.monotonic() - began_s >= self._left_s:
                raise OutOfTime(
                    f"{self._path}: its trial runs took {ORDER_SECONDS:g} s together, the most of one order: {_INSTEAD}"
                ) from error
            raise EngineFailed(
                f"the process ended with status {process.returncode}: the graph does not run with these inputs"
            ) from error
        finally:
            timer.cancel()
            self._left_s -= time.monotonic() - began_s
        if "error" in said:
            raise EngineFailed(said["error"])
        return given
