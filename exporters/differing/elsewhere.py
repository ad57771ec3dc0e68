"""Run a model under the libraries of another Python, which needs numpy and ONNX Runtime, or torch, and no halfeven.

This file is that Python's script: python elsewhere.py MODEL INPUTS.npz FOUND.npz
That Python may be older than halfeven's: nothing here needs more than Python 3.8.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

BF16 = "bf16:"  # before the name of a tensor that npz has as INT16
# Types that ONNX Runtime gives for a sequence, a map, and an optional that is absent.
NO_TENSOR = (list, dict, type(None))


def started_as(python: str) -> Path:
    """The path of a Python from the word that names it on a command line: a word without a folder is looked up in PATH,
    as a shell does. A link is not followed, for a virtual environment's Python is one."""
    return Path(python).absolute() if os.sep in python else Path(python)


def tensors_elsewhere(python: Path, model: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output of an ONNX file, or every tensor of an exported program, by name. Raises BadSetting where ``python``
    is none or lacks a library, RuntimeError with the last words of the other Python."""
    from ...models.errors import BadSetting  # not at the top: the other Python has no halfeven

    given, found = model.with_name("given.npz"), model.with_name("found.npz")
    _write(given, inputs)
    needed = ("numpy", "torch" if model.suffix == ".pt2" else "onnxruntime")
    command = [str(python), "-I", __file__, str(model), str(given), str(found)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BadSetting(
            f"--python {python} cannot be started ({error.strerror}): expected the python of an environment with "
            f"{' and '.join(needed)}, as venv/bin/python"
        ) from error
    for name in needed if done.returncode else ():
        if f"No module named '{name}'" in done.stderr:
            raise BadSetting(
                f"--python {python} has no {name}: expected an environment with {' and '.join(needed)}; install them "
                f"there ({python} -m pip install {' '.join(needed)}), or give another --python"
            )
    if done.returncode:
        raise RuntimeError(f"{python}: {done.stderr.strip()[-400:]}")
    return {
        name.removeprefix(BF16): array.view("bfloat16") if name.startswith(BF16) else array
        for name, array in _read(found).items()
    }


def _write(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """numpy.savez refuses some names of tensors, so they are an array too."""
    np.savez(path, np.array(list(arrays)), *arrays.values(), allow_pickle=False)


def _read(path: str | Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as found:
        names, *arrays = found.values()
    return dict(zip(names.tolist(), arrays))  # noqa: B905 - Python 3.9 has no strict


def _of_file(path: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # a sum is added up in the same order on every machine
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    came = zip(names, session.run(names, inputs))  # noqa: B905
    return {name: np.asarray(value) for name, value in came if not isinstance(value, NO_TENSOR)}


def _of_program(path: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch
    from torch.fx import Interpreter, Node

    found: dict[str, np.ndarray] = {}

    class Seen(Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if n.op == "call_function" and isinstance(result, torch.Tensor):
                is_bf16 = result.dtype == torch.bfloat16
                kept = result.contiguous().view(torch.int16) if is_bf16 else result
                found[BF16 * is_bf16 + n.name] = kept.clone().numpy()
            return result

    module = torch.export.load(path).module()
    with torch.inference_mode():
        Seen(module).run(*map(torch.from_numpy, inputs.values()))
    return found


if __name__ == "__main__":
    run = _of_program if sys.argv[1].endswith(".pt2") else _of_file
    _write(sys.argv[3], run(sys.argv[1], _read(sys.argv[2])))
