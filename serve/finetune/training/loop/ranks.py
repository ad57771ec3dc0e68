"""Several processes that train one model together: each passes its share of every batch, and all take the same step.

The first one (rank 0) starts the others, reports, evaluates and writes checkpoints. Gradients are added up over the
processes where the optimizer would take them: before they are unscaled, so that an overflow in one process is one in
all, and every process skips the same steps. A loss is weighted by the rows of the whole batch, so the sum is the
gradient of the whole batch, however its parts are dealt out. Needs torch alone.

torch's DistributedDataParallel adds up inside ``backward``, once for every pass: a batch in parts, of which each
process has another number, and a loss that calls a module twice, need its exceptions. Here it is one sum for a step.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .seeding import seed_everything

LONGEST = timedelta(days=7)  # that a process waits for another one, which may be evaluating
TRAINER = "halfeven.serve.finetune.training.trainer"
_LOOK_EVERY_S = 0.1  # whether another process has ended before all have met


class RankLost(Exception):
    """Another process of the training has ended."""


class Ranks:
    """This process among ``count``; of one alone every method does nothing. ``others``: those that it has started, with
    the pipes whose end is theirs too (`trainer.watch`)."""

    def __init__(self, rank: int = 0, count: int = 1, others: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.rank, self.count, self.others = rank, count, others

    def share(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parts of a batch that this process passes."""
        return parts[self.rank :: self.count]

    def agree(self, loss: Tensor, sound: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of the whole batch, not finite where it is not finite in one process; and whether all are sound."""
        if self.count == 1:
            return loss, sound
        both = torch.stack([loss.double(), 1.0 - sound.double()])
        self._sum(both)
        return both[0].to(loss.dtype), both[1] == 0

    def add_up(self, weights: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all processes. A parameter that has none in any keeps none."""
        if self.count == 1:
            return
        there = [weight.grad is not None for weight in weights]
        marks = torch.tensor(there, dtype=torch.float32, device=weights[0].device)
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        flat = torch.cat([marks, *(one.flatten().float() for one in gradients)])
        self._sum(flat)
        found = flat[len(marks) :].split([one.numel() for one in gradients])
        for weight, one, has in zip(weights, found, flat[: len(marks)].tolist(), strict=True):
            weight.grad = one.view_as(weight).to(weight.dtype) if has else None

    def send_buffers(self, module: nn.Module) -> None:
        """Give the buffers of rank 0 to all, as DistributedDataParallel does: BatchNorm's running statistics are those
        of the rows that rank 0 has passed. A forward may have put another tensor there, as large as its part."""
        places = [(owner, name) for owner in module.modules() for name in owner._buffers]
        if self.count == 1 or not places:
            return
        device = next(module.parameters()).device
        facts: list[Any] = [[_facts(owner._buffers[name]) for owner, name in places]]
        with _lost(), torch.no_grad():
            dist.broadcast_object_list(facts, 0, device=device)
            for (owner, name), wanted in zip(places, facts[0], strict=True):
                if wanted != _facts(owner._buffers[name]):
                    owner._buffers[name] = wanted and torch.empty(wanted[0], dtype=wanted[1], device=device)
                if (buffer := owner._buffers[name]) is not None:
                    dist.broadcast(buffer, 0)

    def seed(self, seed: int, step: int) -> None:
        """Seed the generators of this process before a step: a checkpoint holds those of rank 0 alone, which go on."""
        if self.rank:
            seed_everything((seed + (step * self.count + self.rank) * 1_000_003) % 2**63)

    def _sum(self, tensor: Tensor) -> None:
        with _lost():
            dist.all_reduce(tensor)


ALONE = Ranks()


def _facts(buffer: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if buffer is None else (buffer.shape, buffer.dtype)


@contextmanager
def _lost() -> Iterator[None]:
    """An error of a collective is another process's end."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another process of this training has ended: {str(error)[:300]}") from error


def ranks_of(request: Mapping[str, Any], rank: int) -> Ranks:
    """This process among those that the request asks for. Rank 0 starts the others, which end with it."""
    count = request.get("processes", 1)
    if count == 1 or request.get("trial_steps"):
        return ALONE
    return joined(request, rank) if rank else _first_of(request, count)


def _first_of(request: Mapping[str, Any], count: int) -> Ranks:
    meeting = Path(request["out"]) / "meeting"
    for left in (meeting, _failure_file(request)):  # of processes that have ended
        left.unlink(missing_ok=True)
    command = [sys.executable, "-PB", "-m", TRAINER, request["file"]]
    others = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for rank in range(1, count)
    ]
    return _met(request, others)


def _met(request: Mapping[str, Any], others: Sequence[subprocess.Popen[bytes]]) -> Ranks:
    """The first process, once the others are there. Raises RankLost where one of them ends before: torch waits for it
    all the same, so that it does so in a thread of its own."""
    found: Future[Ranks] = Future()

    def meet() -> None:
        try:
            found.set_result(joined(request, 0, others))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=meet, daemon=True).start()
    while True:
        try:
            return found.result(_LOOK_EVERY_S)
        except TimeoutError:
            if any(other.poll() for other in others):
                raise RankLost("another process of this training has ended before all were there") from None


def write_failure(request: Mapping[str, Any], last: Mapping[str, Any]) -> None:
    """Write down the last line of a process of another rank that failed: nobody reads its lines, so that the first
    process reports it."""
    _failure_file(request).write_text(json.dumps(last))


def failure_of_another(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last line of another process that failed; None where none wrote one down, because it was killed."""
    try:
        found: dict[str, Any] = json.loads(_failure_file(request).read_bytes())
    except (OSError, ValueError):
        return None
    return found


def _failure_file(request: Mapping[str, Any]) -> Path:
    return Path(request["out"]) / "failed.json"


def joined(request: Mapping[str, Any], rank: int, others: Sequence[subprocess.Popen[bytes]] = ()) -> Ranks:
    """This process among the others, once all of them are there."""
    cuda, count = request["device"].startswith("cuda"), request["processes"]
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # nothing listens beyond this machine
    meeting = f"file://{Path(request['out']).resolve() / 'meeting'}"
    with _lost():
        dist.init_process_group(
            "nccl" if cuda else "gloo", init_method=meeting, rank=rank, world_size=count, timeout=LONGEST
        )
    return Ranks(rank, count, others)
