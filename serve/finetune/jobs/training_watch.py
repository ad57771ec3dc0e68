"""Follows the lines of a job's trainer and writes them into the job store: steps, evaluations, events and progress."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from .records.job_store import KEPT_OF_A_JOB, JobStore
from .worker_process import Child

REPORT_EVERY_S = 0.25
METRICS_EVENTS = 20  # per job: a metrics event for every twentieth of its steps
MOST_SKIP_EVENTS = 200  # each is a transaction, and a job may skip every second of a million steps
FURTHER_SKIPS = "the further ones are in the job's metrics, without an event each"
MOST_NAMED = 20  # modules in a sentence
SLOW_PRECISION, NORMALISES_IN_HALF = "SLOW_PRECISION", "NORMALISES_IN_HALF"
Line = Mapping[str, Any]


class TrainingWatch:
    """``rows_named``: the numbers in the caller's file of rows that the trainer numbers."""

    def __init__(self, job_store: JobStore, id: str, rows_named: Callable[[list[int]], list[int]]) -> None:
        self._job_store, self._id, self._rows_named = job_store, id, rows_named
        self._steps: list[Line] = []
        self._total, self._skipped, self._first, self._reported = 1, 0, 0, time.monotonic()

    def follow(self, child: Child, lines: Iterable[Line]) -> Line:
        """The trainer's last line; empty where it ended without one."""
        last: Line = {}
        for line in lines:
            if line["type"] == "step":
                self._take(line)
                if time.monotonic() - self._reported >= REPORT_EVERY_S:
                    self._note(child.seconds)
            elif line["type"] == "trying":
                found = {"rates_tried": line["tried"], "rates": line["rates"]}
                self._job_store.note(self._id, progress=found)
            elif line["type"] in ("started", "chosen", "resumed", "evaluation", "checkpoint", "note"):
                self._record(line)
            else:
                last = line
        self._note(child.seconds)
        return last

    def _record(self, line: Line) -> None:
        store, id = self._job_store, self._id
        if line["type"] == "started":
            self._total = max(1, line["total_steps"])
            store.record(
                id, "info", f"training the {line.get('trained', 'module')}: {self._total} steps", line
            )
            if why := line.get("slow_precision"):
                store.record(id, "warn", why, {"code": SLOW_PRECISION})
            if kept := line.get("in_fp32"):
                store.record(id, "info", _in_fp32(kept), {"in_fp32": kept})
            if mixed := line.get("mixed"):
                store.record(id, "warn", _mixed(mixed), {"code": NORMALISES_IN_HALF, "modules": mixed})
        elif line["type"] == "chosen":
            store.record(id, "info", _choice(line), line)
        elif line["type"] == "resumed":
            self._first = line["step"]
            store.record(id, "info", f"the training goes on behind its step {line['step']}", line)
        elif line["type"] == "note":
            store.record(id, "warn", line["message"], {"code": line["code"]})
        elif line["type"] == "evaluation":
            store.record_evaluation(id, _without(line, "replayed"))
            if not line.get("replayed"):
                loss = "not finite" if line["held_out_loss"] is None else f"{line['held_out_loss']:.4g}"
                what = f"step {line['step']} of {self._total}: held-out loss {loss}"
                store.record(
                    id, "info", what + (", the best so far" if line["best"] else ""), line, kind="metrics"
                )

    def _take(self, line: Line) -> None:
        self._steps.append(_without(line, "replayed"))
        self._skipped += line["skipped"]
        if not line.get("replayed"):
            self._step_events(line)

    def _step_events(self, line: Line) -> None:
        """The events of one step."""
        store, id = self._job_store, self._id
        if rows := self._rows_named(line["quarantined"]):
            what = f"step {line['step']}: the loss or a buffer is not finite because of the rows {rows}"
            store.record(id, "warn", f"{what}; they are left out", {"rows": rows})
        if line["skipped"] and self._skipped > MOST_SKIP_EVENTS:
            if self._skipped == MOST_SKIP_EVENTS + 1:
                store.record(id, "warn", f"more than {MOST_SKIP_EVENTS} steps were skipped; {FURTHER_SKIPS}")
        elif line["skipped"]:
            sentence = f"step {line['step']} was skipped: {line['cause']} (loss scale {line['scale']:g})"
            if found := line.get("overflow"):
                rows = self._rows_named(found["rows"])
                sentence += f"; {found['words']}" + (f", in the rows {rows}" if rows else "")
            store.record(id, "warn", sentence, line, kind="metrics")
        elif line["step"] * METRICS_EVENTS % self._total < METRICS_EVENTS:
            sentence = f"step {line['step']} of {self._total}: loss {line['loss']:.4g}"
            store.record(id, "info", sentence, line, kind="metrics")

    def _note(self, seconds: float) -> None:
        if not self._steps:
            return
        self._reported = time.monotonic()
        every = -(-self._total // KEPT_OF_A_JOB)
        ends = (1, self._total)
        kept = [line for line in self._steps if line["step"] % every == 0 or line["step"] in ends]
        self._job_store.record_steps(self._id, kept)
        last, self._steps = self._steps[-1], []
        eta = seconds / max(1, last["step"] - self._first) * (self._total - last["step"])
        progress = {
            "step": last["step"],
            "total_steps": self._total,
            "loss": last["loss"],
            "scale": last["scale"],
            "skipped": self._skipped,
            "eta_seconds": round(eta, 1),
        }
        self._job_store.note(self._id, progress=progress, estimated_finish=int(time.time() + eta))


def _choice(line: Line) -> str:
    """The event's sentence about the settings "auto": what the trainer measured, and the values that it chose."""
    words = []
    if "precision" in line:
        times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in line["seconds"].items())
        words.append(
            f"precision {line['precision']} (a step: {times}; found in {line.get('took_seconds', 0):.2g} s)"
        )
        words += [f"{one['precision']} is left out: {one['sentence']}" for one in line.get("left_out", ())]
    if "learning_rate" in line:
        found = (
            (rate, "not finite" if loss is None else f"{loss:.3g}") for rate, loss in line["losses"].items()
        )
        losses = ", ".join(f"{rate}: {loss}" for rate, loss in found)
        words.append(f"learning rate {line['learning_rate']:g} (loss after {line['steps']} steps: {losses})")
    return "chosen by measurement: " + "; ".join(words)


def _in_fp32(kept: Mapping[str, str]) -> str:
    named = ", ".join(f"'{name}' ({why})" for name, why in islice(kept.items(), MOST_NAMED))
    more = f", … ({len(kept)} modules)" if len(kept) > MOST_NAMED else ""
    return f"these modules compute in FP32: {named}{more}"


def _mixed(names: Sequence[str]) -> str:
    named = ", ".join(f"'{name}'" if name else "the model itself" for name in names[:MOST_NAMED])
    return (
        f"these modules normalise by code of their own beside products, and compute in half: {named}. Write the norm "
        "as a module of its own, or name the module in [training] fp32_modules"
    )


def _without(line: Line, key: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != key}
