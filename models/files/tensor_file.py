"""Files of tensors, as the safetensors library writes them, with the errors and the modes of any other file."""

import errno
import os
import re
import stat
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from .durable import PRIVATE

_NUMBER = re.compile(r"\(os error (\d+)\)")


def save_tensors(path: Path, tensors: Mapping[str, Any], private: bool = False) -> None:
    """Write NumPy arrays or torch's tensors into a file, which takes the place of one that is there. ``private``: only
    its owner may read it; else it has the mode that any new file has, or that of the file before. Raises OSError, which
    names the file.

    The library makes its file for the owner alone, and has an error of its own for what the system refuses.
    """
    is_new = not path.exists()
    if is_new:
        path.touch()
    mode = PRIVATE if private else stat.S_IMODE(path.stat().st_mode)
    kind = "numpy" if all(isinstance(one, np.ndarray) for one in tensors.values()) else "torch"
    try:
        import_module(f"safetensors.{kind}").save_file(dict(tensors), path)
    except Exception as error:
        if is_new:
            path.unlink(missing_ok=True)
        if isinstance(error, SafetensorError) and "I/O error" in str(error):
            found = _NUMBER.search(str(error))
            number = int(found[1]) if found else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    path.chmod(mode)
