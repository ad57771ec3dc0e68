"""Runs an ONNX file in a process of its own: with a size that does not fit, some graphs end the process they run in."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from onnx import ModelProto

from ...models.errors import BadFolder, EngineFailed
from ...models.usable_cores import usable_cores
from ..onnx.reading.bounded_file import external_files
from .run_child import read_message, write_message

_CHILD = Path(__file__).with_name("run_child.py")
RUN_SECONDS = 600.0  # for a run that never ends, as `Limits` of the capture


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
    or the process ended.
    """

    def __init__(self, path: Path, model: ModelProto, outputs: Sequence[str]) -> None:
        self._path, self._outputs, self.failure = path, list(outputs), ""
        beside = external_files(path, model)
        self._source = str(path) if beside else None
        self._model = {} if beside else {"model": np.frombuffer(model.SerializeToString(), np.uint8)}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-P", str(_CHILD)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        try:
            head = {"path": self._source, "outputs": self._outputs, "threads": usable_cores()}
            self._asked(head, self._model)
        except EngineFailed as error:
            raise BadFolder(f"{self._path}: ONNX Runtime cannot load it: {str(error)[:500]}") from error

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        if self._process is None:  # the last run ended it
            self.start()
        try:
            given = self._asked({}, arrays)
        except EngineFailed as error:
            self.failure = str(error)
            raise
        return [given[name] for name in self._outputs]

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()

    def _asked(self, head: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(RUN_SECONDS, process.kill)
        timer.start()
        try:
            write_message(process.stdin, head, arrays)
            said, given = read_message(process.stdout)
        except (OSError, EOFError) as error:
            self.close()
            raise EngineFailed(
                f"the process ended with status {process.returncode}: the graph does not run with these inputs"
            ) from error
        finally:
            timer.cancel()
        if "error" in said:
            raise EngineFailed(said["error"])
        return given
