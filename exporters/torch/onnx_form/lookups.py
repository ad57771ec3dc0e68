"""Looks up once what torch.onnx looks up anew for every file, although nothing changes it within a process.

These are its translations of ATen ops with their signatures (0.5 s of each small file), and the list of all composite
ops, which it takes once for each of the 27 namespaces of ops (0.2 s). A conversion writes two files and more.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch._export import utils as ops_of_torch
from torch.onnx._internal.exporter import _registration

_ONE_FILE_AT_A_TIME = threading.Lock()  # what is replaced in torch is replaced for every thread


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Inside the block, in which files are written and no op is registered, torch.onnx looks up both tables once.

    The translations stay known to the next block. They are those of torch alone: to translate an op otherwise, torch
    would change them for all later files. A torch that has no such function looks up as it does.
    """
    composite_ops = cache(getattr(ops_of_torch, "_materialize_cpp_cia_ops", lambda: None))
    with (
        _ONE_FILE_AT_A_TIME,
        replaced(_registration.ONNXRegistry, "from_torchlib", staticmethod(_translations)),
        replaced(ops_of_torch, "_materialize_cpp_cia_ops", composite_ops),
    ):
        yield


_look_up: Any = getattr(_registration.ONNXRegistry, "from_torchlib", None)


@cache
def _translations(*asked: Any, **named: Any) -> Any:
    return _look_up(*asked, **named)


@contextmanager
def replaced(owner: Any, name: str, function: object) -> Iterator[None]:
    """Inside the block the owner has this function under this name; none where it had none."""
    if name not in vars(owner):
        yield
        return
    original = vars(owner)[name]
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)
