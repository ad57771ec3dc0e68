"""The folder of a job, `<store>/jobs/<id>`, which is deleted when the job has ended.

It says how far the job is, so that the job can go on from there after any of its processes was killed.

    state.json      the pass, the version it starts from, and the result of the training once there is one
    pass-1/         the files of the first pass: request, rows, checkpoints, weights

A job needs a second pass where another version became active meanwhile (`stale_parent`).
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ....models.files.durable import fsync, replace_text
from ....models.files.stored_json import stored_json
from ..training.loop.setting_names import STATE_FILE

MOST_STARTS = 3  # of one process without progress between them


class StateUnread(Exception):
    """The state of a job is there and cannot be read: the disk fails, or no file can be opened. What the job has done
    must not be lost for that."""


@dataclass(frozen=True, slots=True)
class JobState:
    """``trained``: the trainer's last line. ``starts``: of a process since ``progress`` changed."""

    number: int
    parent: int
    trained: Mapping[str, Any] | None = None
    starts: int = 0
    progress: str = ""


_WRITTEN_ANEW = (
    "data.safetensors", "held_out.safetensors", "seen.safetensors", "active.safetensors", "parent.safetensors",
    "original.pt2",
)  # fmt: skip


class JobFolder:
    """Every change is on the disk when its method returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def of_pass(self) -> Path:
        """The folder of the pass that the state names."""
        state = self.state()
        return self.path / f"pass-{state.number if state else 1}"

    def state(self) -> JobState | None:
        """None before the first pass, and where the file is damaged: the job begins anew. Raises StateUnread."""
        try:
            state = JobState(**stored_json(self.path / "state.json"))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        except OSError as error:
            raise StateUnread(f"how far the job is cannot be read ({error.strerror})") from error
        counts = all(type(count) is int for count in (state.number, state.parent, state.starts))
        return state if counts and isinstance(state.trained, dict | None) else None

    def begin(self, state: JobState) -> None:
        """A new pass; what the passes before left is deleted, but for the weights that this one goes on with."""
        kept = state.trained is not None and self.of_pass
        self.path.mkdir(parents=True, exist_ok=True)
        place = self.path / f"pass-{state.number}"
        place.mkdir(exist_ok=True)
        if kept:
            weights = "weights.safetensors"
            copied = [place / name for name in (weights, STATE_FILE) if (kept / name).exists()]
            for file in copied:
                shutil.copy(kept / file.name, file)
            for written in (*copied, place, self.path):
                fsync(written)
            state = JobState(
                state.number, state.parent, {**(state.trained or {}), "weights": str(place / weights)}
            )
        self._write(state)
        for old in self.path.glob("pass-*"):
            if old != place:
                shutil.rmtree(old, ignore_errors=True)

    def keep_trained(self, trained: Mapping[str, Any]) -> None:
        """The training is done; its checkpoints are not needed any more."""
        self._change(trained=dict(trained))
        shutil.rmtree(self.of_pass / "checkpoints", ignore_errors=True)

    def starts_again(self) -> bool:
        """Count the start of a process; whether it may: False after ``MOST_STARTS`` without progress."""
        state = self._known()
        progress = self._progress(state)
        starts = state.starts + 1 if progress == state.progress else 1
        self._change(starts=starts, progress=progress)
        return starts <= MOST_STARTS

    def was_interrupted(self) -> None:
        """The process was ended on purpose: its start does not count."""
        if self.state() is not None:
            self._change(starts=0)

    def shrink(self) -> None:
        """Delete what every start of a pass writes anew: a paused job may stay for long, and the rows of a small packed
        upload are many bytes."""
        for name in _WRITTEN_ANEW:
            (self.of_pass / name).unlink(missing_ok=True)

    def last_step(self) -> int:
        """The step of the newest checkpoint; 0 where there is none."""
        steps = [place.name.removeprefix("step-") for place in self.of_pass.glob("checkpoints/step-*")]
        return max((int(step) for step in steps if step.isdecimal()), default=0)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _progress(self, state: JobState) -> str:
        done = "trained" if state.trained is not None else f"step {self.last_step()}"
        return f"pass {state.number}, {done}"

    def _known(self) -> JobState:
        state = self.state()
        assert state is not None, "a pass was begun"
        return state

    def _change(self, **values: Any) -> None:
        self._write(JobState(**{**asdict(self._known()), **values}))

    def _write(self, state: JobState) -> None:
        replace_text(self.path / "state.json", json.dumps(asdict(state)))
