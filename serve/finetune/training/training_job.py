"""A job in the trainer's process, from its request to its last line: the steps, the evaluations and the checkpoints.

Lines that it reports, by ``type``: started, chosen (what was left to measurement), then step and evaluation (the log,
which a checkpoint keeps), checkpoint, note (with a ``code``), and as the last one done, paused or cancelled. A job that
goes on from a checkpoint reports ``resumed`` and the lines of the log until there again, each with ``replayed``.
"""

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ....models.files.durable import fsync
from ....models.files.json_fields import as_json, finite
from ....models.files.tensor_file import save_tensors
from ....models.machine import processor
from ....models.store.manifest import sha256_of
from . import checkpoints as on_disk
from .checkpoints import Checkpoints, Identity
from .chosen import AUTO, RATES, judged_rows, settings_of, short_steps
from .evaluation import BestStep, held_out_loss, seconds_of_a_row
from .first_steps import first_steps, idle_sentence, slow_precision, without_gradient
from .loop.amp import Loop
from .loop.loop_state import copied, numbers_of, put_back, tensors_of
from .loop.ranks import ranks_of
from .loop.seeding import seed_everything
from .loop.setting_names import NO_GRADIENT, NONE, STATE_FILE
from .loop.training_terms import DATA_FAULTS, NO_ROWS, StepRecord, Stopped, audit, finite_names
from .nets import loop_of
from .peak_memory import CHECKPOINT, CHOOSING, EVALUATION, LOADING, PUBLISHING, STEPS, PeakMemory
from .task import Task
from .trainee import Trainee, trainee_of
from .warm_state import state_for_the_next, take_up

Request = Mapping[str, Any]
Line = dict[str, Any]
Report = Callable[[Line], None]
NO_BEST_STEP, STATE = "NO_BEST_STEP", "state:"
WITHOUT_BEST_STEP = (
    "the loss on the held-out rows was never finite, so no step is the best: the weights are those of the last one. "
    "Look for extreme values in the held-out rows, or train in bf16 or fp32"
)
UNSTABLE_LEVEL = (
    "opt_level O3 computes everything in half, norms too, as Apex's O3 does to show how fast a model could be: it "
    "often learns worse or not at all. Train with O1, or O2, unless speed is all that is asked for"
)
# Keys of a request that say where its files lie and how its process behaves; neither changes what is learnt.
_NOT_LEARNT = frozenset(
    {"file", "source", "program", "weights", "data", "held_out", "out", "rows", "job", "device", "threads"}
    | {"warm", "left_out", "priority", "memory_limit_bytes", "checkpoint_every", "checkpoint_bytes"}
)


class Orders:
    """The orders that the server has given since the training began: "cancel", "pause"."""

    def __init__(self) -> None:
        self.cancelled = self.paused = False

    def take(self, word: str) -> None:
        self.cancelled = self.cancelled or word == "cancel"
        self.paused = self.paused or word == "pause"


def run(request: Request, report: Report, orders: Orders, rank: int = 0) -> Line:
    """Run the job and give its last line, ``done``, ``paused`` or ``cancelled``; with ``trial_steps`` in the request
    run only the first steps, and give ``tried``. A process of another ``rank`` (`loop/ranks.py`) only takes its steps,
    and gives ``followed``. Raises Stopped, RankLost."""
    started, parent = time.monotonic(), load_file(request["weights"])
    seed_everything(request["seed"])
    memory = PeakMemory(request["device"])
    trainee = trainee_of(request, parent)
    job = TrainingJob(request, report, trainee, parent, memory, rank)
    if request.get("trial_steps"):
        memory.enter(STEPS)
        tried = first_steps(job.loop, trainee, request["trial_steps"]) | memory.facts()
        return {**tried, **job.costs_beside_the_steps()}
    slow = {"slow_precision": None if rank else job.slow_precision()}
    report({"type": "started", "total_steps": job.loop.steps, **slow, **trainee.facts()})
    if job.loop.settings.opt_level == "O3":
        report({"type": "note", "code": "UNSTABLE_LEVEL", "message": UNSTABLE_LEVEL})
    if job.chosen:
        report({"type": "chosen", **job.chosen})
    job.resume()
    if rank:
        job.follow()
        return {"type": "followed"}
    if not job.ends and (stopped := job.train(orders)) is not None:
        return stopped
    memory.enter(PUBLISHING)
    weights = job.publish()
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    facts = {**asdict(job.summary), "seconds": round(time.monotonic() - started, 3), **memory.facts()}
    used = trained_with(request["device"], job.loop.ranks.count)
    return {"type": "done", "weights": str(weights), "digest": digest, "summary": facts, "trained_with": used}


class TrainingJob:
    """``checkpoint_every`` of the request: steps between two evaluations, each with a checkpoint; 0: none of both."""

    def __init__(
        self, request: Request, report: Report, trainee: Trainee, parent: Mapping[str, Tensor],
        memory: PeakMemory, rank: int = 0,
    ) -> None:  # fmt: skip
        self._memory = memory
        self._request, self._report, self._trainee, self._parent = request, report, trainee, parent
        self._training = task = Task(request, trainee.forward)
        if trainee.half is not None:
            trainee.half.look(*task.first_inputs())
        memory.enter(CHOOSING)
        settings, self.chosen = settings_of(request, task, trainee, report)
        memory.enter(LOADING)
        held_out = request.get("held_out")
        self._held_out = Task(request, trainee.forward, task.losses, held_out=True) if held_out else None
        for name, largest in self._held_out.largest.items() if self._held_out else ():
            task.largest[name] = max(largest, task.largest.get(name, -1))
        self.loop = loop_of(request, trainee, task, settings, ranks_of(request, rank))
        warm = request.get("warm")
        take_up(self.loop, Path(warm) if warm else None, request.get("warm_start", NONE))
        used = self.loop.settings
        self.summary = Summary(used.precision, used.learning_rate)
        self._best = BestStep(request.get("patience", 0))
        self._every = request.get("checkpoint_every", 0)
        self._evaluated = self._saved = 0  # the steps of the last evaluation and of the last checkpoint
        folder, most = (
            Path(request["out"]) / "checkpoints",
            request.get("checkpoint_bytes", on_disk.MOST_BYTES),
        )
        self._checkpoints = (
            Checkpoints(folder, identity_of({**request, **self.chosen}), most) if self._every else None
        )

    def slow_precision(self) -> str | None:
        """A sentence where the job asks for a precision in which this processor is much slower than in FP32."""
        asked = self._request["precision"]
        return slow_precision(asked, self._trainee.module) if self.loop.kind == "cpu" else None

    def costs_beside_the_steps(self) -> Line:
        """The facts of a trial: what was chosen, ``slow_precision``, the number of steps of the range test, and
        ``seconds_beside_steps``: the seconds of the full training that are not its steps, by what takes them."""
        return {
            "precision": self.loop.settings.precision,
            "chosen": self.chosen or None,
            "slow_precision": self.slow_precision(),
            "range_test_steps": len(RATES) * short_steps(self.loop.steps) if self._tests_rates else 0,
            "seconds_beside_steps": self._seconds_beside_steps(),
        }

    @property
    def _tests_rates(self) -> bool:
        return self._request["hyperparameters"].get("learning_rate") == AUTO

    def _seconds_beside_steps(self) -> dict[str, float]:
        seconds = {"choosing the precision": self.chosen.get("took_seconds", 0.0)}
        rows, held_out = len(self._training.rows), self._held_out
        if held_out is not None and self._every:
            times = -(-self.loop.steps // self._every)
            row_s = seconds_of_a_row(self.loop, self._trainee, held_out)
            seconds["evaluations"] = times * len(held_out.rows) * row_s
        if self._tests_rates:
            row_s = seconds_of_a_row(self.loop, self._trainee, self._training)
            seconds["evaluations of the range test"] = (len(RATES) + 1) * judged_rows(rows) * row_s
        return seconds

    @property
    def ends(self) -> bool:
        """True if the training ends early, since too many evaluations brought no smaller loss."""
        return self._best.ends

    def resume(self) -> None:
        """Go on from the last good checkpoint, if there is one. Raises Stopped where it was made from other rows or was
        changed after it was written."""
        if self._checkpoints is None:
            return
        try:
            found, refused = self._checkpoints.last_good()
        except on_disk.OtherData as error:
            raise Stopped("OTHER_DATA", str(error)) from error
        for one in refused:
            self._note(one.code, str(one))
        if found is not None:
            self._put_back(found)
        if self.loop.ranks.rank:
            return
        if found is None:
            self._checkpoints.log.cut(0)
            return
        self._report({"type": "resumed", "step": self.loop.done})
        for line in self._checkpoints.log.cut(found.numbers["log_bytes"]):
            self.summary.add(line)
            self._report({**line, "replayed": True})

    def _put_back(self, found: on_disk.Checkpoint) -> None:
        try:
            put_back(self.loop, found.tensors, found.numbers)
            self._best.put_back(found.numbers["best"], found.best)
            self._evaluated, self._saved = found.numbers["evaluated"], self.loop.done
        except Exception as error:  # torch and numpy raise many kinds; a part may be put back already
            raise Stopped(
                on_disk.CORRUPT,
                "the last checkpoint has the digests of its manifest, and is not one that this training wrote "
                f"({type(error).__name__}: {str(error)[:200]}). Nothing is learnt from it: create the job again",
            ) from error

    def train(self, orders: Orders) -> Line | None:
        """The steps that are left; a last line where the server ended them."""
        self._memory.enter(STEPS)
        if isinstance(self.loop, Loop) and self.loop.scaler.is_enabled():
            half = self._trainee.half
            self.loop.record_overflows(copy.deepcopy if half is None else half.copied)
        for record in self.loop.run():
            self._log(self._line(record))
            if self.loop.done == 1 and record.cause not in (*DATA_FAULTS, NO_ROWS):
                self._note(NO_GRADIENT, idle_sentence(without_gradient(self._trainee.module)))
            due = self.loop.done == self.loop.steps or (self._every and self.loop.done % self._every == 0)
            if due:
                self._memory.enter(EVALUATION)
                self._evaluate()
            if orders.cancelled:
                return {"type": "cancelled"}
            if due or orders.paused:
                self._memory.enter(CHECKPOINT)
                self._save()
                self._memory.enter(STEPS)
            if orders.paused:
                return {"type": "paused", "step": self._saved}
            if self.ends:
                break
        return None

    def follow(self) -> None:
        """Take the steps that are left, beside rank 0: it evaluates, writes and ends the training."""
        for _ in self.loop.run():
            pass

    def publish(self) -> Path:
        """Write the weights of the best step; of the last one where no step was evaluated. Raises Stopped."""
        self.loop.finish()
        if self._evaluated and not self._best.weights:
            self._note(NO_BEST_STEP, WITHOUT_BEST_STEP)
        with self.loop.published():
            tensors = self._best.weights or self._learnt()
        state = {name[len(STATE) :]: one for name, one in tensors.items() if name.startswith(STATE)}
        weights = {name: tensors[name] for name in self._parent}
        audit(weights, finite_names(self._parent))
        self.summary.ended_early = self.ends and self.loop.done < self.loop.steps
        folder = Path(self._request["out"])
        if state:
            written(folder / STATE_FILE, state)
        return written(folder / "weights.safetensors", weights)

    def _learnt(self) -> dict[str, Tensor]:
        """The weights as they would be published now, and what is kept for the next training, by `STATE` and name."""
        state = state_for_the_next(self.loop, self._request.get("keep_state", NONE))
        kept = {STATE + name: one for name, one in state.items()}
        return in_parents_form(self._trainee.state(), self._parent) | kept

    def _line(self, record: StepRecord) -> Line:
        line = as_json(asdict(record))
        if found := line.pop("overflow"):
            line["overflow"] = {"words": found[0], "rows": self._training.rows[list(found[1])].tolist()}
        if not line["losses"]:
            del line["losses"]
        line["quarantined"] = self._training.rows[list(record.quarantined)].tolist()
        return {"type": "step", **line}

    def _evaluate(self) -> None:
        if self._held_out is None or self._checkpoints is None:
            return
        step = self._evaluated = self.loop.done
        with self.loop.published():
            loss = held_out_loss(self.loop, self._trainee, self._held_out)
            if best := self._best.is_best(loss):
                self._best.take(step, loss, self._learnt())
        trained = self.summary.last_loss
        self._log(
            {"type": "evaluation", "step": step, "held_out_loss": finite(loss), "loss": trained, "best": best}
        )

    def _note(self, code: str, message: str | None) -> None:
        if message:
            self._report({"type": "note", "code": code, "message": message})

    def _log(self, line: Line) -> None:
        if self._checkpoints is not None:
            self._checkpoints.log.append(line)
        self.summary.add(line)
        self._report(line)

    def _save(self) -> None:
        if self._checkpoints is None or self._saved == self.loop.done:
            return
        numbers = numbers_of(self.loop) | {"best": self._best.numbers(), "evaluated": self._evaluated}
        step, tensors = self.loop.done, tensors_of(self.loop)
        if why := self._checkpoints.write(step, tensors, numbers, self._best.weights):
            self._note(on_disk.NO_ROOM, f"step {step}: {why}")
            return
        self._saved = step
        self._report({"type": "checkpoint", "step": step})


def identity_of(request: Request) -> Identity:
    """The identity of the checkpoints from which the request may go on: same job, rows, settings and parent."""
    settings = {name: value for name, value in request.items() if name not in _NOT_LEARNT}
    rows = {name: sha256_of(Path(request[name])) for name in ("data", "held_out") if request.get(name)}
    parent = [sha256_of(Path(request[name])) for name in ("weights", "warm") if request.get(name)]
    return Identity(
        str(request.get("job", "")), _digest([settings, parent]), _digest([rows, list(request["rows"])])
    )


def trained_with(device: str, processes: int) -> dict[str, Any]:
    """Library, device, instructions, threads and processes, of which the last bits depend."""
    instructions = processor.this_processor().instructions
    return {
        "torch": str(torch.__version__),
        "device": device,
        "instructions": instructions,
        "threads": torch.get_num_threads(),
        "processes": processes,
    }


@dataclass
class Summary:
    """Figures over the lines of a job; losses are the finite ones, scales those that steps used."""

    precision: str = "fp16"
    learning_rate: float = 0.0  # the largest of the schedule
    steps: int = 0
    skipped: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    scale_min: float = math.inf
    scale_max: float = 0.0
    scale_last: float = 1.0
    quarantined: list[int] = field(default_factory=list)  # rows of the data file
    best_step: int | None = None  # by the held-out loss; its weights are the job's
    held_out_loss: float | None = None  # of the best step
    ended_early: bool = False

    def add(self, line: Line) -> None:
        if line["type"] == "evaluation":
            if line["best"]:
                self.best_step, self.held_out_loss = line["step"], line["held_out_loss"]
            return
        self.quarantined += line["quarantined"]
        self.steps += 1
        self.skipped += line["skipped"]
        if line["loss"] is not None:
            self.first_loss = line["loss"] if self.first_loss is None else self.first_loss
            self.last_loss = line["loss"]
        scale = line["scale"]
        self.scale_min, self.scale_max = min(self.scale_min, scale), max(self.scale_max, scale)
        self.scale_last = scale


def in_parents_form(state: Mapping[str, Tensor], parent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies under the parent's names, in the parent's dtypes."""
    return {name: copied(state[name].to(old.dtype)) for name, old in parent.items()}


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    """The file appears whole or not at all."""
    temporary = path.with_suffix(".tmp")
    save_tensors(temporary, tensors, private=True)
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)
    return path


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
