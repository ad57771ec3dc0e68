"""``precision = "auto"``: the time of a few steps in each precision on this device. Needs torch alone."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from .loop.amp import Loop
from .loop.loop_state import copied, generators_untouched, put_into
from .loop.passes import LossOf, PartsOf
from .loop.patience import named_tensors
from .loop.training_terms import Settings, Stopped

EXACT_FIRST = ("fp32", "fp16", "bf16")
ROUNDS = 5  # after one that warms up; of each precision the shortest step counts
NEARLY = 1.03  # of the shortest time: what is hardly slower and more exact is taken
CALM_SCALE = 256.0  # a step that overflowed would be a shorter one


def timed_steps(
    module: nn.Module, loss_of: LossOf, parts_of: PartsOf, rows: int, settings: Settings, device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:  # fmt: skip
    """Seconds of a step by precision; those that the device does not have are left out. Weights, buffers and
    generators are as before afterwards. The precisions take turns, so that a disturbance meets all of them."""
    start = {name: copied(tensor) for name, tensor in named_tensors(module).items()}
    found: dict[str, float] = {}
    with generators_untouched():
        runs = {}
        for precision in EXACT_FIRST:
            asked = replace(
                settings, precision=precision, n_epochs=ROUNDS + 1, learning_rate=1e-10, init_scale=CALM_SCALE,
                scale_floor=1.0,
            )  # fmt: skip
            runs[precision] = Loop(module, loss_of, rows, asked, device, parts_of).run()
        for turn in range(ROUNDS + 1):
            for precision, steps in runs.items():
                begun = clock()
                try:
                    next(steps)
                except (Stopped, RuntimeError, StopIteration):
                    continue
                if turn:
                    found[precision] = min(found.get(precision, float("inf")), clock() - begun)
    put_into(module, start)
    return found


def chosen_precision(seconds: Mapping[str, float]) -> str:
    """The most exact one that is nearly as fast as the fastest; fp32 where nothing could be timed."""
    fastest = min(seconds.values(), default=0.0)
    return next((one for one in EXACT_FIRST if one in seconds and seconds[one] <= NEARLY * fastest), "fp32")
