"""Runs `child.py` and `describing.py` in this process, for a module that is alive here: it is the caller's own.

The module itself is left as it is: what is traced is a copy with the same weights, not copied where they lie on the
CPU. Settings of torch that the scripts change are put back.
"""

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CaptureFailed
from . import child, describing, failures
from .sources import without_compiler


def result_here(is_captured: bool, request: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """The result of ``child`` for ``module``, or that of ``describing``. Raises CaptureFailed."""
    asked = {**request, "path": sorted(_folders(module))}
    try:
        with _settings_kept():
            asked["module"] = _copied(module)
            if is_captured:
                return child.captured(torch, asked, Path(request["out"]))
            return describing.looked_at(torch, asked)
    except Exception as error:
        found = failures.described(error, asked)
        trace = f"\n{found['traceback'].rstrip()}" if found["traceback"] else ""
        raise CaptureFailed(
            f"the module {type(module).__name__} cannot be captured: {found['error']}{trace}"
        ) from error


def _folders(module: nn.Module) -> set[str]:
    """The folders of the code of the module and of its parts that are not torch's: their lines are shown."""
    own = {type(part).forward for part in module.modules() if not type(part).__module__.startswith("torch.")}
    codes = (getattr(forward, "__code__", None) for forward in own)
    return {str(Path(code.co_filename).parent) for code in codes if code is not None}


def _copied(module: nn.Module) -> nn.Module:
    """A copy on the CPU whose parameters share the memory of the module's. Buffers are copied, because a forward may
    write into them, and so are tensors that are plain attributes: `copy.deepcopy` refuses those with a history."""
    module = without_compiler(module)
    plain = [one for part in module.modules() for one in vars(part).values() if isinstance(one, torch.Tensor)]
    with torch.no_grad():
        known: dict[int, Any] = {
            id(one): nn.Parameter(one.detach().cpu(), requires_grad=one.requires_grad)
            for one in module.parameters()
            if not isinstance(one, nn.UninitializedParameter)
        }
        known |= {id(one): one.detach().clone().cpu() for one in (*plain, *module.buffers())}
        return copy.deepcopy(module, known)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Torch's settings that `child.prepare` changes, and its random numbers, are after the block as before it. Warnings
    of torch about its own tracing are not shown, as those of a child are not."""
    transformer = sys.modules["torch.nn.modules.transformer"]
    causal, fast = vars(transformer)["_detect_is_causal_mask"], torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        vars(transformer)["_detect_is_causal_mask"] = causal
        torch.backends.mha.set_fastpath_enabled(fast)
