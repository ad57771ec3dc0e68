"""Trains one job in a process of its own: started by file path, it imports torch and the operator's own code.

    python -P trainer.py REQUEST.json

Standard output is one JSON object per line (started, step…, then done, failed or cancelled). At the end of standard
input the server is gone, and this process ends; a line "cancel" in it ends the job after the current step.
Of this package it loads, by path, only amp.py, trainee.py and task.py of this folder with the files that they import,
and models/capture/child.py, which knows how a model folder is built.
"""

import ctypes
import hashlib
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).resolve().parent
Request = Mapping[str, Any]
Line = dict[str, Any]


def beside(name: str) -> Any:
    """The file of this folder by that name, as part of a package that is only this folder.

    So the files may import each other, and neither our real package nor the operator's modules come in.
    """
    package = "_halfeven_finetune"
    if package not in sys.modules:
        sys.modules[package] = folder = types.ModuleType(package)
        folder.__path__ = [str(HERE)]
    return importlib.import_module(f"{package}.{name}")


amp, trainee, task = beside("amp"), beside("trainee"), beside("task")
child = trainee.child


def main(request_file: str) -> NoReturn:
    report, control = private_pipes()
    cancelled = threading.Event()
    threading.Thread(target=watch, args=(control, cancelled), daemon=True).start()
    request = json.loads(Path(request_file).read_text())
    try:
        yield_to_serving(request)
        last = run(request, report, cancelled)
    except BaseException as error:  # SystemExit of the operator's code too
        last = failure(error, request)
    report(last)
    os._exit(0 if last["type"] != "failed" else 1)  # user threads and atexit hooks may not hold us back


def private_pipes() -> tuple[Callable[[Line], None], int]:
    """Take the report pipe and the control pipe away from the operator's code: its prints go to stderr, and its
    ``input()`` finds nothing."""
    reports, control = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def report(line: Line) -> None:
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            while data:
                data = data[os.write(reports, data) :]
        except OSError:
            leave()  # the server has closed the pipe

    return report, control


def watch(control: int, cancelled: threading.Event) -> None:
    with os.fdopen(control, "rb") as lines:
        for line in lines:
            if line.strip() == b"cancel":
                cancelled.set()
    leave()


def leave() -> NoReturn:
    """At once, with everything the operator's code started, if the process group is ours."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def yield_to_serving(request: Request) -> None:
    """Yield to serving, die with the server, be the first to go when memory runs out; compute repeatably."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the thread that started us ends
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    os.nice(request["nice"])
    child.limit_memory(request["memory_limit_bytes"])
    torch.set_num_threads(request["threads"])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def run(request: Request, report: Callable[[Line], None], cancelled: threading.Event) -> Line:
    """The whole job: its last line, ``done`` or ``cancelled``."""
    started, parent = time.monotonic(), load_file(request["weights"])
    torch.manual_seed(request["seed"])
    settings = amp.Settings(
        **{name: value for name, value in request["hyperparameters"].items() if value is not None},
        precision=request["precision"],
        seed=request["seed"],
    )
    pupil = trainee.trainee_of(request, parent)
    training = task.Task(request, pupil.forward)
    steps = amp.total_steps(len(training.rows), settings)
    report({"type": "started", "total_steps": steps, **pupil.facts()})
    summary = Summary()
    count, device = len(training.rows), request["device"]
    for record in amp.train(pupil.module, training.loss, count, settings, device, training.parts):
        line = {key: number(value) for key, value in asdict(record).items()}
        line["quarantined"] = training.rows[list(record.quarantined)].tolist()
        summary.add(record, line["quarantined"])
        report({"type": "step", **line})
        if cancelled.is_set():
            return {"type": "cancelled"}
    path = write_weights(Path(request["out"]), pupil.state(), parent)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    seconds = round(time.monotonic() - started, 3)
    facts = {**asdict(summary), "seconds": seconds}
    return {"type": "done", "weights": str(path), "digest": digest, "summary": facts}


def number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Summary:
    """Figures of the loss scaler over the job; losses are the finite ones, scales those that steps used."""

    steps: int = 0
    skipped: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    scale_min: float = math.inf
    scale_max: float = 0.0
    scale_last: float = 1.0
    quarantined: list[int] = field(default_factory=list)  # rows of the data file

    def add(self, record: Any, quarantined: list[int]) -> None:
        self.quarantined += quarantined
        self.steps += 1
        self.skipped += record.skipped
        if math.isfinite(record.loss):
            self.first_loss = record.loss if self.first_loss is None else self.first_loss
            self.last_loss = record.loss
        self.scale_min, self.scale_max = min(self.scale_min, record.scale), max(self.scale_max, record.scale)
        self.scale_last = record.scale


def write_weights(folder: Path, state: Mapping[str, Tensor], parent: Mapping[str, Tensor]) -> Path:
    """The parent's names in the parent's dtypes; the file appears whole or not at all."""
    tensors = {
        name: state[name].detach().to("cpu", old.dtype).contiguous().clone() for name, old in parent.items()
    }
    path, temporary = folder / "weights.safetensors", folder / "weights.safetensors.tmp"
    save_file(tensors, temporary)
    sync(temporary)
    temporary.replace(path)
    sync(folder)
    return path


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def failure(error: Any, request: Request) -> Line:
    """The one line of a job that failed: code, sentence, and for the operator's code the traceback's tail."""
    traceback = ""
    if isinstance(error, amp.Stopped):
        code, message = error.code, error.message
    elif trainee.out_of_memory(error):
        limit = request["memory_limit_bytes"] / 2**30
        code = "OUT_OF_MEMORY"
        message = "ran out of memory" + (f": the limit is {limit:.1f} GiB" if limit else "")
        message += ". Lower batch_size, or give the trainer more memory."
    else:
        code, message = "USER_CODE", trainee.one_line(error)
        if not isinstance(error, child.Refused):
            traceback = child.tail(error, request["source"] or {"folder": os.devnull, "path": []})
    return {"type": "failed", "code": code, "message": message, "traceback": traceback}


if __name__ == "__main__":
    main(sys.argv[1])
