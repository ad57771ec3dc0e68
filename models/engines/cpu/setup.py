"""The setup in which an engine uses the processor: its threads, and the optional passes over its program.

Two setups of one program differ in speed and in the order of sums, never in what is computed. No pass is faster on
every processor: packed convolutions take half the time of plain ones with AVX-512, and eight times as long with AVX2
(an image net at batch 1). So each pass is a candidate beside the plain program, and the server measures which to take.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from ...machine.usable_cores import usable_cores as usable_cores

PACKED_CONVOLUTIONS = "packed convolutions"
PACKED_PRODUCTS = "packed products"
WITHOUT_LOCK = "without Python's lock"
SHARED_ROWS = "shared rows"
BRIEF_SPINNING = "brief spinning"
NO_SPINNING = "no spinning"
PACKED = frozenset((PACKED_CONVOLUTIONS, PACKED_PRODUCTS))


@dataclass(frozen=True, slots=True)
class CpuSetup:
    """``threads`` within an operation (0: as the library has it), and the names of the passes that are taken."""

    threads: int = 0
    passes: frozenset[str] = frozenset()

    def having(self, *passes: str) -> "CpuSetup":
        return replace(self, passes=self.passes | {*passes})

    def without(self, name: str) -> "CpuSetup":
        return replace(self, passes=self.passes - {name})

    def only(self, possible: Collection[str]) -> "CpuSetup":
        """This setup without the passes that are not ``possible``."""
        return replace(self, passes=self.passes & {*possible})

    def to_json(self) -> dict[str, Any]:
        return {"threads": self.threads, "passes": sorted(self.passes)}

    def __str__(self) -> str:
        threads = [f"{self.threads} thread{'s' if self.threads > 1 else ''}"] if self.threads else []
        return ", ".join([*threads, *sorted(self.passes)]) or "plain"


PLAIN = CpuSetup()
