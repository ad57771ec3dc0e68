"""Time and memory of O0, O1 and O2: our loop beside the loop that people write by hand with torch.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.training_levels [--dtype bf16|fp16] [--nets mlp,cnn,transformer]

Each loop has a process of its own; the two of a pair take turns on one core, step by step, in one pass. The processor
time of a step is ours over by hand, in a pair the median of the ratios of neighbouring steps: what else runs meets
both. What the allocator gives back to the system costs a process up to half of its steps' time, by chance and for its
whole life: the pairs of this figure keep what they free, and their middle one counts. The most memory (VmHWM), of the
whole process and of what the training adds to it, is that of a last pair that gives back what it frees: else the peak
depends on which gaps the allocator finds. Both loops clip, have AdamW with decay for matrices and kernels alone and a
cosine schedule, and read the loss of each step.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.batch_loop import batches, total_steps
from halfeven.serve.finetune.training.loop.half_model import HalfModel
from halfeven.serve.finetune.training.loop.scaler_recorder import ScalerRecorder
from halfeven.serve.finetune.training.loop.training_terms import DTYPES, Settings
from halfeven.serve.finetune.training.peak_memory import resident_peak
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LEVELS, NETS = ("O0", "O1", "O2"), ("mlp", "cnn", "transformer")
ROWS, BATCH, CLASSES = 512, 64, 10
PAIRS, TURNS, FIRST = 5, 24, 4
LARGE = {"mlp": (2048,), "cnn": (3, 32, 32), "transformer": (64, 128)}


def net_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, CLASSES)
        )
    if name == "cnn":
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(block, 2, enable_nested_tensor=False), Pooled(), nn.Linear(128, CLASSES)
    )


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def ours(net: nn.Module, x: Tensor, y: Tensor, level: str, settings: Settings) -> Iterator[None]:
    forward: Callable[[Tensor], Any] = net
    if level == "O2":
        half = HalfModel(net, DTYPES[settings.precision])
        half.look(x[:2])
        forward = half
    loop = Loop(net, lambda rows: cross_entropy(_one(forward(x[rows])).float(), y[rows]), ROWS, settings)
    if loop.scaler.is_enabled():
        loop.recorder = ScalerRecorder(net)
    for _ in loop.run():
        yield


def _one(answer: Any) -> Tensor:
    return answer[0] if isinstance(answer, tuple) else answer


def by_hand(net: nn.Module, x: Tensor, y: Tensor, level: str, settings: Settings) -> Iterator[None]:
    """O2 as Apex has it: a half model with norms in FP32, and FP32 master weights that the optimizer has."""
    dtype, half = DTYPES.get(settings.precision, torch.float32), net
    masters = list(net.parameters())
    if level == "O2":
        half = copy.deepcopy(net).to(dtype)
        for one in half.modules():
            if isinstance(one, nn.LayerNorm | nn.BatchNorm2d):
                one.float()
        x = x.to(dtype)
    weights, losses = list(half.parameters()), list[float]()
    decayed = [one for one in masters if one.ndim > 1]
    spared = {"params": [one for one in masters if one.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": decayed}, spared], lr=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps(ROWS, settings))
    scaler = torch.amp.GradScaler("cpu", init_scale=settings.init_scale, enabled=settings.precision == "fp16")
    for _, rows in batches(ROWS, settings):
        for one in (*masters, *weights):
            one.grad = None
        with torch.autocast("cpu", dtype=dtype, enabled=level == "O1"):
            answer = half(x[rows])
        loss = cross_entropy(answer.float(), y[rows])
        scaler.scale(loss).backward()
        if half is not net:
            for one, other in zip(masters, weights, strict=True):
                one.grad, other.grad = None if other.grad is None else other.grad.float(), None
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(masters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if half is not net:
            with torch.no_grad():
                for one, other in zip(masters, weights, strict=True):
                    other.copy_(one)
        losses.append(loss.item())
        yield


def child(way: str, name: str, level: str, dtype: str) -> None:
    """A line on stdin is an order to take a step; the answer is its processor time. At the end: memory."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    before = resident_peak()
    x, y = torch.rand(ROWS, *LARGE[name]), torch.randint(0, CLASSES, (ROWS,))
    settings = Settings(
        n_epochs=1000,
        batch_size=BATCH,
        precision="fp32" if level == "O0" else dtype,
        seed=1,
        init_scale=256.0,
    )
    steps = (ours if way == "ours" else by_hand)(net_of(name), x, y, level, settings)
    for _ in sys.stdin:
        began = time.process_time()
        next(steps)
        print(time.process_time() - began, flush=True)
    print(json.dumps([resident_peak(), resident_peak() - before]), flush=True)


def seconds_by_turn(pair: Sequence[subprocess.Popen[str]], count: int) -> list[list[float]]:
    """Seconds of the step of each turn, ours and by hand; they change who is first."""
    found: list[list[float]] = []
    for turn in range(count):
        seconds = [0.0, 0.0]
        for place in (0, 1) if turn % 2 else (1, 0):
            one = pair[place]
            assert one.stdin and one.stdout
            one.stdin.write("go\n")
            one.stdin.flush()
            seconds[place] = float(one.stdout.readline())
        found.append(seconds)
    return found


def pair_of(*asked: str, **environment: str) -> list[subprocess.Popen[str]]:
    command, pipe = [sys.executable, "-m", "tests.benchmarks.training_levels", "--child"], subprocess.PIPE
    return [
        subprocess.Popen(
            [*command, way, *asked], stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environment}
        )
        for way in ("ours", "by hand")
    ]


def allocator(limit: int) -> dict[str, str]:
    """The environment in which glibc gives freed blocks of more bytes than ``limit`` back to the system."""
    return {"MALLOC_MMAP_THRESHOLD_": str(limit), "MALLOC_TRIM_THRESHOLD_": str(limit)}


def measured(name: str, level: str, dtype: str) -> dict[str, Any]:
    pairs: list[tuple[float, list[float]]] = []
    for _ in range(PAIRS):
        pair = pair_of(name, level, dtype, **allocator(1 << 30))
        times = seconds_by_turn(pair, TURNS)[FIRST:]  # the first steps allocate
        ratio = statistics.median(ours / by_hand for ours, by_hand in times)
        pairs.append((ratio, [statistics.median(column) for column in zip(*times, strict=True)]))
        for one in pair:
            one.communicate()
    pair = pair_of(name, level, dtype, **allocator(1 << 16))
    seconds_by_turn(pair, FIRST)
    memory = [json.loads(one.communicate()[0]) for one in pair]
    ratios = sorted(ratio for ratio, _ in pairs)
    return {
        "net": name, "level": level, "dtype": "fp32" if level == "O0" else dtype,
        "ms": [round(1e3 * one, 2) for one in sorted(pairs)[PAIRS // 2][1]],
        "time": round(statistics.median(ratios), 3), "of": [round(one, 3) for one in ratios],
        "memory": round(memory[0][0] / memory[1][0], 3),
        "added_mib": [round(one[1] / 2**20) for one in memory],
        "added": round(memory[0][1] / memory[1][1], 3),
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--nets", default=",".join(NETS))
    given = parser.parse_args()
    for name in given.nets.split(","):
        for level in LEVELS:
            print(json.dumps(measured(name, level, given.dtype)), flush=True)


if __name__ == "__main__":
    main()
