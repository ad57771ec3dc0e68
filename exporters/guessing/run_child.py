"""Runs an ONNX file for the process that started this one. ONNX Runtime can end a process (a division by zero, a bad
address) where a size does not fit the graph, and then ends this one.

    python -P -m halfeven.exporters.guessing.run_child PARENT

It needs numpy and onnxruntime alone. Its memory is limited from outside (`models/order/one_order.py`); it ends with the
process of the number ``PARENT``, in the middle of a run too.

It reads messages from standard input and answers each on standard output, until the input ends. A message is the
length of its head (8 bytes, little endian), the head as JSON, and the bytes of its arrays. The first one has the file
(``path``, or one array ``model``) and the names of its ``outputs``.
"""

import json
import os
import resource
import struct
import sys
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from ...models.order.ends_with_parent import die_with

_LENGTH = struct.Struct("<Q")
Arrays = Mapping[str, np.ndarray]


def write_message(stream: IO[bytes], head: Mapping[str, Any], arrays: Arrays) -> None:
    """Raises OSError where the other process has gone."""
    described = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    text = json.dumps({**head, "arrays": described}).encode()
    stream.write(_LENGTH.pack(len(text)) + text)
    for array in arrays.values():
        stream.write(np.ascontiguousarray(array).tobytes())
    stream.flush()


def read_message(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Raises EOFError where the other process has gone."""
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    head = json.loads(_exactly(stream, length))
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape in head["arrays"]:
        kind = np.dtype(dtype)
        size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(_exactly(stream, size), kind).reshape(shape)
    return head, arrays


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main(parent: int) -> None:
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its end is expected
    # ONNX Runtime prints to standard output too; its lines go to standard error, so that the pipe has messages alone.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = sys.stdin.buffer
    run: Any = None
    while True:
        try:
            head, arrays = read_message(questions)
        except EOFError:
            return
        try:
            if run is None:
                run = _session(head, arrays)
                said, given = {}, {}
            else:
                said, given = {}, run(arrays)
        except Exception as error:  # ONNX Runtime has no narrower one
            said, given = {"error": str(error)[:2000] or type(error).__name__}, {}
        write_message(answers, said, given)


def _session(head: Mapping[str, Any], arrays: Arrays) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = head["threads"]
    source = head["path"] or arrays["model"].tobytes()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = head["outputs"]

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        return dict(zip(names, map(np.asarray, session.run(names, dict(inputs))), strict=True))

    return run


if __name__ == "__main__":
    main(int(sys.argv[1]))
