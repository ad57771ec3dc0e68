"""Trains one job, with the operator's own code, in a process of its own.

    python -P -m halfeven.serve.finetune.training.trainer REQUEST.json [RANK]

Standard output is one JSON object per line (`training_job.py`). At the end of standard input the server is gone, and
this process ends; a line "cancel" in it ends the job after the current step, and "pause" writes a checkpoint there
and ends the process.
"""

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

gc.disable()  # nothing of what is imported is garbage: to go through it again and again takes a quarter of the time
import torch  # noqa: E402

from ....models.capture import failures  # noqa: E402
from ....models.engines.true_fp32 import use_true_fp32  # noqa: E402
from ....models.files.durable import no_space_left  # noqa: E402
from ....models.order import ends_with_parent  # noqa: E402
from . import trainee, training_job  # noqa: E402
from .loop import ranks  # noqa: E402
from .loop import training_terms as terms  # noqa: E402

gc.freeze()
gc.enable()
Request = Mapping[str, Any]
Line = dict[str, Any]


# Advice for errors in which torch does not name the mistake of the model's code.
REMEDIES = {
    "Inference tensors cannot be saved": "Forward computes a part in torch.inference_mode: take that out, or use "
    "torch.no_grad for what is not to learn",
    "backward through the graph a second time": "The module keeps a tensor of the pass before (a state, a cache): "
    "detach it before the next pass, or begin each pass without it",
    "Can't call numpy() on Tensor that requires grad": "Nothing learns through numpy: write this part with torch",
    "modified by an inplace operation": "Forward writes into a tensor that the backward pass needs (x.mul_(…), x += …, "
    "x[…] = …): compute a new one there",
    "Expected more than 1 value per channel": "BatchNorm cannot learn from a single value: take a batch_size of 2 or "
    "more, or another norm",
}


def main(request_file: str, rank: int = 0) -> NoReturn:
    report, control = private_pipes()
    ends_with_parent.die_with_the_parent(control)
    orders = training_job.Orders()
    threading.Thread(target=watch, args=(control, orders), daemon=True).start()
    request = read_request(Path(request_file), rank)
    try:
        set_up_process(request)
        last = training_job.run(request, report, orders, rank)
    except ranks.RankLost as error:
        print(error, file=sys.stderr, flush=True)
        last = None if rank else ranks.failure_of_another(request)
        if last is None:  # it was killed: the server starts the training again, from its checkpoint
            leave()
    except BaseException as error:  # SystemExit of the operator's code too
        last = failure(error, request)
        if rank:  # whose lines are read by nobody
            print(f"process {rank}: {last['code']}: {last['message']}", file=sys.stderr, flush=True)
            ranks.write_failure(request, last)
    report(last)
    os._exit(0 if last["type"] != "failed" else 1)  # user threads and atexit hooks may not hold us back


def read_request(path: Path, rank: int) -> Request:
    """``rows_file`` holds the numbers of the rows, where they are many. On CUDA the processes have the GPUs from the
    server's own on."""
    request = json.loads(path.read_text()) | {"file": str(path.resolve())}
    if rank and request["device"].startswith("cuda"):
        request["device"] = f"cuda:{int(request['device'].partition(':')[2] or 0) + rank}"
    if file := request.pop("rows_file", None):
        request["rows"] = json.loads(Path(file).read_text())
    return request


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


def watch(control: int, orders: Any) -> None:
    with os.fdopen(control, "rb") as lines:
        for line in lines:
            orders.take(line.strip().decode(errors="replace"))
    leave()


def leave() -> NoReturn:
    """End at once, with everything the operator's code started, if the process group is ours."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def set_up_process(request: Request) -> None:
    """Compute repeatably, and FP32 in FP32: torch's convolutions on CUDA would take TF32."""
    torch.set_num_threads(request["threads"])
    use_true_fp32()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic  # its setting is no attribute of the module's own type
    deterministic.fill_uninitialized_memory = False  # every new tensor would be filled, and then written
    # In evaluation the fast path reads the weights of layers, not their adapters.
    torch.backends.mha.set_fastpath_enabled(False)
    take_device(request["device"])


def take_device(device: str) -> None:
    """Make the GPU of this process the one that "cuda" means, for the loop and for the operator's code."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)


def failure(error: Any, request: Request) -> Line:
    """The one line of a job that failed: code, sentence, and for the operator's code the traceback's tail."""
    traceback = ""
    if isinstance(error, terms.Stopped):
        code, message = error.code, error.message
    elif trainee.out_of_memory(error):
        limit = request["memory_limit_bytes"] / 2**30
        code = "OUT_OF_MEMORY"
        message = "ran out of memory" + (f": the limit is {limit:.1f} GiB" if limit else "")
        message += ". Lower batch_size, or give the trainer more memory (HALFEVEN_TRAINER_MEMORY_MIB)."
    elif no_space_left(error):
        code = "DISK_FULL"
        message = "the disk of the store is full. Delete versions or files there, then create the job again."
    else:
        code, message = "USER_CODE", trainee.one_line(error)
        remedy = next((remedy for words, remedy in REMEDIES.items() if words in message), "")
        message += f". {remedy}" if remedy else ""
        if not isinstance(error, failures.Refused):
            traceback = failures.tail(error, request["source"] or {"folder": os.devnull, "path": []})
    return {"type": "failed", "code": code, "message": message, "traceback": traceback}


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
