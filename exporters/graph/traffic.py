"""The bytes that the casts of a half move, and whether half saves more bytes than that.

Bytes are those read from and written to memory at one run of the example's batch (at another batch they grow
together). Where memory limits a device, they are proportional to its time; they are counted, not measured.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

LEAST_SAVED = 0.01  # of the bytes of constants
SMALL = 1 << 16  # bytes of constants: below them no half is dropped for what it does not save


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


class Half(Protocol):
    """``bytes``: of the half's constants, ``bytes_fp32``: of the whole's."""

    @property
    def nodes(self) -> int: ...

    @property
    def half_nodes(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def bytes_fp32(self) -> int: ...


def looks_idle(half: Half) -> bool:
    """Whether there is a half that saves hardly any bytes of constants, so that its traffic has to justify it."""
    return bool(half.half_nodes) and half.bytes_fp32 >= SMALL and _saved(half) < LEAST_SAVED * half.bytes_fp32


def why_dropped(half: Half, saved: int, cast: int) -> str:
    """Why a half that looks idle is not made; empty where its traffic pays (`worth`).

    Bytes moved stand for time: what is measured decides no plan.
    """
    if worth(saved, cast).pays:
        return ""
    return (
        f"a half of {half.half_nodes} of its {half.nodes} nodes would save {_saved(half)} of {half.bytes_fp32} bytes, "
        "and its casts would move more than it saves"
    )


def _saved(half: Half) -> int:
    return half.bytes_fp32 - half.bytes


def _readable(count: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
