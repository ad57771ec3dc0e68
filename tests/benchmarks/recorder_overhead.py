"""The cost of ScalerRecorder where nothing overflows: processor time of a step with it and without, in turns.

    python -m tests.benchmarks.recorder_overhead

prints for each net the two times of a step and their ratio: medians over pairs of steps that follow each other, so that
what else the machine does meets both.
"""

import statistics
import time

import torch
from halfeven.training import ScalerRecorder
from torch import nn

WIDTHS, PAIRS, FIRST, ROWS = (128, 512), 600, 20, 64


class Training:
    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.x, self.y = torch.randn(ROWS, 64), torch.randint(0, 10, (ROWS,))

    def seconds_of_a_step(self) -> float:
        begun = time.process_time()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.net(self.x), self.y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return time.process_time() - begun


def main() -> None:
    torch.set_num_threads(1)
    for width in WIDTHS:
        plain, watched = Training(width), Training(width)
        ScalerRecorder(watched.net, watched.scaler)
        pairs: list[tuple[float, float]] = []
        for turn in range(PAIRS):
            if turn % 2:
                pairs.append((plain.seconds_of_a_step(), watched.seconds_of_a_step()))
            else:
                after, before = watched.seconds_of_a_step(), plain.seconds_of_a_step()
                pairs.append((before, after))
        del pairs[:FIRST]  # they are slower
        one, other = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(after / before for before, after in pairs)
        print(
            f"width {width}: {one * 1e3:.3f} ms without, {other * 1e3:.3f} ms with the recorder, ratio {ratio:.4f}"
        )


if __name__ == "__main__":
    main()
