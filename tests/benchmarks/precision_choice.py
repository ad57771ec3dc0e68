"""The processor time of choosing a job's precision, in steps of the best precision, for several nets.

    [SLOW_HALF=100 PYTHONPATH=tests/benchmarks/slow_half] python -m tests.benchmarks.precision_choice

With ``SLOW_HALF`` FP16 convolutions take so many times as long. The bound is three tenths of the job's steps, plus ten.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.batch_loop import BatchLoop, total_steps
from halfeven.serve.finetune.training.loop.setting_names import chosen_precision
from halfeven.serve.finetune.training.loop.training_terms import Settings, StepRecord
from halfeven.serve.finetune.training.precision_test import PrecisionTest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

ROWS, CLASSES = 960, 5
NETS: dict[str, Callable[[], nn.Module]] = {
    "small convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 256, CLASSES)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, CLASSES),
    ),
    "linear layers": lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 512), nn.GELU(), nn.Linear(512, CLASSES)),
}  # fmt: skip


def step_seconds(steps: Iterator[StepRecord]) -> float:
    """Processor time of a step, of the shortest of ten."""
    found: list[float] = []
    for _ in range(10):
        began = time.process_time()
        next(steps)
        found.append(time.process_time() - began)
    return min(found)


def main() -> None:
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        for name, make in NETS.items():
            for epochs in (1, 10):
                measure(f"{name}, threads {threads}", make(), Settings(n_epochs=epochs, batch_size=32))


def measure(name: str, net: nn.Module, settings: Settings) -> None:
    x, y = torch.randn(ROWS, 3, 16, 16), torch.randint(0, CLASSES, (ROWS,))

    def loss(rows: Tensor) -> Tensor:
        return cross_entropy(net(x[rows]).float(), y[rows])

    def loop(asked: Settings, rows: int) -> BatchLoop:
        return Loop(net, loss, rows, asked)

    steps = total_steps(ROWS, settings)
    next(loop(settings, ROWS).run())  # imports what torch imports late
    began = time.process_time()
    timed = PrecisionTest(net, loop, settings, steps, "cpu").timed()
    took_s, best = time.process_time() - began, chosen_precision(timed.seconds)
    steps_s = step_seconds(loop(replace(settings, precision=best), ROWS).run())
    cost, most = took_s / steps_s, 0.3 * steps + 10
    out = ", ".join(str(one) for one in timed.left_out) or "nothing"
    print(f"{name}: {best}; {steps} steps, the choice cost {cost:.1f} of at most {most:.0f}; left out: {out}")


if __name__ == "__main__":
    main()
