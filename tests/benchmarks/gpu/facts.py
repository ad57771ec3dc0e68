"""The facts of a run: a line of JSON each, appended to a file and printed at the moment that it is known.

Needs nothing but Python: the runner has no torch.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "facts.jsonl"
HELD = "HALFEVEN_GPU_HELD"  # "phase:count": the phase waits after so many facts, so that a rehearsal can interrupt it


@dataclass(frozen=True, slots=True)
class Facts:
    """``began``: of the whole run, on the clock of `time.time`, which all its processes share."""

    out: Path
    phase: str
    began: float

    def add(self, what: str, **values: Any) -> None:
        """A kill after this loses nothing of it: the line is written at once, by one call."""
        at = {"seconds": round(time.time() - self.began, 1), "phase": self.phase, "what": what}
        line = json.dumps(at | {name: _short(value) for name, value in values.items()}, default=str)
        with (self.out / NAME).open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())
        print(line, flush=True)
        phase, _, count = os.environ.get(HELD, "").partition(":")
        if (
            phase
            and phase == self.phase
            and sum(fact["phase"] == phase for fact in read(self.out)) == int(count)
        ):
            signal.pause()

    def claim(self, what: str, holds: bool, **values: Any) -> None:
        """A fact that is right or wrong: one that is wrong makes the run end with 1."""
        self.add(what, holds=holds, **values)


def read(out: Path) -> Iterator[dict[str, Any]]:
    """The facts so far. The end of a line that is being written is left out."""
    file = out / NAME
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
