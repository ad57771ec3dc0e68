"""Runs `child.py` and `describing.py` in this process, for a module that is alive here: it is the caller's own.

The module itself is left as it is: what is traced is a copy with the same weights, not copied where they lie on the
CPU. Settings of torch that the scripts change are put back.
"""

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CaptureFailed
from .failures import sibling


def result_here(script: str, request: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """The result of ``child`` or ``describing`` for ``module``. Raises CaptureFailed where it cannot be captured."""
    describing = sibling("describing")
    child = describing.child
    asked = {**request, "path": [os.getcwd()]}
    try:
        with _settings_kept():
            asked["module"] = _copied(module)
            if script == "describing":
                return describing.looked_at(torch, asked)
            return child.captured(torch, asked, Path(request["out"]))
    except Exception as error:
        found = child.failures.described(error, asked)
        trace = f"\n{found['traceback'].rstrip()}" if found["traceback"] else ""
        raise CaptureFailed(
            f"the module {type(module).__name__} cannot be captured: {found['error']}{trace}"
        ) from error


def _copied(module: nn.Module) -> nn.Module:
    """A copy on the CPU whose parameters share the memory of the module's. Buffers are copied: a forward may write
    into them."""
    with torch.no_grad():
        known: dict[int, Any] = {
            id(one): nn.Parameter(one.detach().cpu(), requires_grad=one.requires_grad)
            for one in module.parameters()
            if not isinstance(one, nn.UninitializedParameter)
        }
        known |= {id(one): one.detach().clone().cpu() for one in module.buffers()}
        return copy.deepcopy(module, known)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Torch's settings that `child.prepare` changes, and its random numbers, are after the block as before it."""
    transformer = sys.modules["torch.nn.modules.transformer"]
    causal, fast = vars(transformer)["_detect_is_causal_mask"], torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        vars(transformer)["_detect_is_causal_mask"] = causal
        torch.backends.mha.set_fastpath_enabled(fast)
