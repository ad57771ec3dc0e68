"""The bytes that the casts of a half move, and whether half saves more bytes than that.

Bytes are those read from and written to memory at one run of the example's batch (at another batch they grow
together). Where memory limits a device, they are proportional to its time; they are counted, not measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .actions import Kept

LEAST_SAVED = 0.01  # of the bytes of constants
SMALL = 1 << 16  # bytes of constants: below them no half is dropped for what it does not save


@dataclass(frozen=True, slots=True)
class Cast:
    """One tensor cast at every run: qualified names of its source and readers, bytes read and written."""

    source: str
    from_dtype: str
    to_dtype: str
    bytes: int
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per run of the example's batch. ``bytes_before``: cast before casts were placed; ``saved``: by half."""

    casts: Sequence[Cast]
    bytes_before: int
    saved: int

    @property
    def cast(self) -> int:
        return sum(one.bytes for one in self.casts)


@dataclass(frozen=True, slots=True)
class Worth:
    """Bytes that half saves and that its casts cost, per run; ``pays`` where it saves more."""

    saved: int
    cast: int
    pays: bool
    reason: str


def worth(saved: int, cast: int) -> Worth:
    """Compare the bytes that half tensors save per run (``saved``) with the bytes that casts move per run (``cast``).

    Where the casts move as many or more, half is unlikely to be faster on a device that memory limits, and the original
    should be served as it is. Smaller weights in the store may still be a reason for half.
    """
    if saved == 0:
        return Worth(0, cast, False, "no tensor is half at a run: half saves nothing here")
    share = f"its casts move {_readable(cast)} and its half tensors save {_readable(saved)} per batch"
    if cast >= saved:
        return Worth(saved, cast, False, f"half buys nothing: {share}; serve the FP32 form")
    return Worth(saved, cast, True, f"half saves more than it costs: {share}")


@dataclass(frozen=True, slots=True)
class Half:
    """A half graph as it is written. ``nodes``: the original's that give floating results (casts do not count),
    ``half_nodes``: those of them that compute in half, ``fp32_by_policy``: those in FP32 that are not among the
    ``kept`` ones; ``casts``: between floating types; ``bytes``: of its constants, ``bytes_fp32``: of the original's."""

    nodes: int
    half_nodes: int
    fp32_by_policy: int
    kept: Sequence[Kept]
    casts: int
    bytes: int
    bytes_fp32: int

    def facts(self) -> dict[str, Any]:
        """The counts by name, as `proof.maker.Maker.facts` has them."""
        counts = {one.name: getattr(self, one.name) for one in fields(Half)}
        return counts | {"kept": [kept.to_json() for kept in self.kept]}


def why_not_half(half: Half, traffic: Callable[[], Traffic]) -> str:
    """The reason to serve the original instead of this half; empty where the half is worth making, or there is none.

    A half is not worth making where it saves less than `LEAST_SAVED` of the bytes of constants and its casts move more
    bytes per run than its half tensors save. Bytes moved stand for time: what is measured decides no plan. ``traffic``
    is asked for only where the constants do not decide.
    """
    saved = half.bytes_fp32 - half.bytes
    if not half.half_nodes or half.bytes_fp32 < SMALL or saved >= LEAST_SAVED * half.bytes_fp32:
        return ""
    moved = traffic()
    if worth(moved.saved, moved.cast).pays:
        return ""
    return (
        f"a half of {half.half_nodes} of its {half.nodes} nodes would save {saved} of {half.bytes_fp32} bytes, "
        "and its casts would move more than it saves"
    )


def _readable(count: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
