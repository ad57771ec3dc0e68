"""The bytes that the casts of a half move, and whether half saves more bytes than that.

Bytes are those read from and written to memory at one run of the example's batch (at another batch they grow
together). Where memory limits a device, they are proportional to its time; they are counted, not measured.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cast:
    """One tensor cast at every run: qualified names of its source and readers, bytes read and written."""

    source: str
    from_dtype: torch.dtype
    to_dtype: torch.dtype
    bytes: int
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Worth:
    """Bytes that half saves and that its casts cost, per run; ``pays`` where it saves more."""

    saved: int
    cast: int
    pays: bool
    reason: str


def worth(saved: int, cast: int) -> Worth:
    """Compare the bytes that half tensors save per run (``saved``) with the bytes that casts move per run (``cast``).

    Where the casts move as many or more, half is unlikely to be faster on a device that memory limits, and the whole
    should be served as it is. Smaller weights in the store may still be a reason for half.
    """
    if saved == 0:
        return Worth(0, cast, False, "no tensor is half at a run: half saves nothing here")
    share = f"its casts move {_readable(cast)} and its half tensors save {_readable(saved)} per batch"
    if cast >= saved:
        return Worth(saved, cast, False, f"half buys nothing: {share}; serve the FP32 form")
    return Worth(saved, cast, True, f"half saves more than it costs: {share}")


def _readable(count: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
