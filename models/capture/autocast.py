"""Replaces ``autocast`` in the child during the capture: regions that ask for half do nothing, FP32 regions are kept.

The captured program is the FP32 original, so a region that asks for half must leave no cast in it (on a CPU a CUDA
region would leave none anyhow, a CPU region BF16 ones). A custom function with ``custom_fwd(cast_inputs=float32)``
leaves no trace outside of live autocast: here it runs in a disabled region, as it would inside of live autocast, and
that region is in the program.

Runs in the child.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

CUSTOM_FWD = torch.float64  # as `regions.py` has it
_PLACES = (torch.amp, torch.amp.autocast_mode, torch.cuda.amp, torch.cuda.amp.autocast_mode)


@contextlib.contextmanager
def original_in_fp32() -> Iterator[set[str]]:
    """A block from the import of the user's code to the end of the capture; gives the notes for the user, as a set."""
    notes = set()
    names = ("__init__", "__enter__", "__exit__")
    old = {name: getattr(torch.autocast, name) for name in names}
    old_forwards = [place.custom_fwd for place in _PLACES]
    for name, method in _quiet(old, notes).items():
        setattr(torch.autocast, name, method)
    for place in _PLACES:
        device = {"device_type": "cuda"} if "cuda" in place.__name__ else {}
        vars(place)["custom_fwd"] = functools.partial(custom_fwd, notes, old_forwards[0], **device)
    try:
        yield notes
    finally:
        for name in names:
            setattr(torch.autocast, name, old[name])
        for place, forward in zip(_PLACES, old_forwards, strict=True):
            vars(place)["custom_fwd"] = forward


def _quiet(old: dict[str, Any], notes: set[str]) -> dict[str, Callable[..., Any]]:
    """``autocast`` whose enabled regions do nothing. (Without a GPU torch itself turns a CUDA region off.)"""

    @functools.wraps(old["__init__"])
    def init(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that CUDA is not available
            old["__init__"](self, device_type, dtype, enabled, cache_enabled)
        self._asks_for_half = bool(enabled)

    @functools.wraps(old["__enter__"])
    def enter(self) -> Any:
        if not getattr(self, "_asks_for_half", self._enabled):
            return old["__enter__"](self)
        notes.add(
            f"forward asks for half itself (torch.autocast on {self.device}): the original is that model in FP32, "
            "which nodes are half is decided by the plan"
        )
        return self

    @functools.wraps(old["__exit__"])
    def leave(self, *error: object) -> Any:
        return False if getattr(self, "_asks_for_half", self._enabled) else old["__exit__"](self, *error)

    return {"__init__": init, "__enter__": enter, "__exit__": leave}


def custom_fwd(
    notes: set[str],
    original: Callable[..., Any],
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str,
    cast_inputs: torch.dtype | None = None,
) -> Any:
    """``torch.amp.custom_fwd`` as it acts inside live autocast; `original_in_fp32` puts it in torch's place."""
    if fwd is None:
        return functools.partial(
            custom_fwd, notes, original, device_type=device_type, cast_inputs=cast_inputs
        )
    if cast_inputs is None:
        return original(fwd, device_type=device_type)

    @functools.wraps(fwd)
    def in_fp32(context: Any, *args: Any, **kwargs: Any) -> Any:
        context._dtype, context._fwd_used_autocast = torch.get_autocast_dtype(device_type), False
        if cast_inputs in (torch.float16, torch.bfloat16):
            notes.add(
                f"{fwd.__qualname__} has custom_fwd(cast_inputs={cast_inputs}): its ops are planned one by one"
            )
            return fwd(context, *args, **kwargs)
        with torch.autocast(device_type, dtype=CUSTOM_FWD, enabled=False):
            wide, named = (torch.amp.autocast_mode._cast(part, "cpu", cast_inputs) for part in (args, kwargs))
            return fwd(context, *wide, **named)

    return in_fp32


@contextlib.contextmanager
def see_transformers() -> Iterator[None]:
    """Let transformers keep its FP32 islands (rotary angles) in the program: it leaves them out where autocast is off.

    Enter it after its modules were imported with the model. The replacement does the same under live autocast.
    """
    theirs = getattr(sys.modules.get("transformers.utils.generic"), "maybe_autocast", _region)
    _replace_in_modules(theirs, _region)
    try:
        yield
    finally:
        _replace_in_modules(_region, theirs)


def _replace_in_modules(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    for module in list(sys.modules.values()):
        # Python blocks an import by None in a module's place.
        names = getattr(module, "__dict__", {})
        if names.get("maybe_autocast") is old:
            names["maybe_autocast"] = new


def _region(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> contextlib.AbstractContextManager[Any]:
    if device_type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
