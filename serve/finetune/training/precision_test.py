"""``precision = "auto"``: what a step takes in each precision on this device. Needs torch alone.

On a processor a half kernel may be a reference implementation: measured on one with AVX512-FP16, a training step of a
convolution took 180 times as long in FP16 as in FP32. So on a processor the precisions are first tried with a few rows,
then with more, and one that takes more than `MOST_TIMES` the shortest time is left out in the middle of its step. So
the cost of the choice is bounded in steps of the best precision, however slow a kernel is.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ....models.machine import kernel_costs
from .loop.amp import Loop
from .loop.batch_loop import BatchLoop, total_steps
from .loop.loop_state import copied, put_into
from .loop.passes import LossOf, PartsOf
from .loop.seeding import generators_untouched
from .loop.setting_names import EXACT_FIRST
from .loop.training_terms import Settings, Stopped, named_tensors

Clock = Callable[[], float]
NAMED = 3  # operators of a slow precision
SHARE = 0.05  # of the step's time: an operator with less is not named


class TooSlow(Exception):
    """The step was ended because it had taken too long already."""


class StepWatch(TorchDispatchMode):
    """Inside, the seconds of each operator are added up, of forward, backward and optimizer alike. Behind the operator
    with which the step exceeds ``most`` seconds of processor time it raises TooSlow. ``took``: processor time from the
    beginning to the end.

    To ask for processor time takes longer than a small operator: it is asked only where ``most`` seconds went by.
    """

    def __init__(self, clock: Clock, work_clock: Clock, most: float = float("inf")) -> None:
        super().__init__()
        self._clock, self._work_clock, self._most = clock, work_clock, most
        self.seconds: dict[str, float] = {}
        self.took = 0.0

    def __enter__(self) -> "StepWatch":
        self._began, self._work_began = self._clock(), self._work_clock()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.took = self._work_clock() - self._work_began

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        began = self._clock()
        answer = func(*args, **(kwargs or {}))
        now = self._clock()
        name = func.overloadpacket.__name__
        self.seconds[name] = self.seconds.get(name, 0.0) + now - began
        if now - self._began > self._most and self._work_clock() - self._work_began > self._most:
            raise TooSlow
        return answer


@dataclass(frozen=True, slots=True)
class Slow:
    """A precision that is much slower than another one, ``than``: how many times as long a step took at least, and the
    operators that took most of it, each with its own times."""

    precision: str
    than: str
    times: float
    operators: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        named = ", ".join(f"{name} {times:.0f}" for name, times in self.operators)
        return (
            f"on this processor a step takes at least {self.times:.0f} times as long in {self.precision} as in "
            f"{self.than}" + (f" (operators, in times of {self.than}: {named})" if named else "")
        )


def slow(precision: str, watch: StepWatch, than: str, best: StepWatch) -> Slow:
    """The comparison of two watched steps of the same rows. The slow step may have been ended in its middle."""
    by_time = sorted(watch.seconds.items(), key=lambda one: -one[1])
    heavy = [(name, taken) for name, taken in by_time[:NAMED] if taken > SHARE * watch.took]
    return Slow(precision, than, watch.took / best.took, tuple(_times(heavy, best)))


def _times(heavy: Iterable[tuple[str, float]], best: StepWatch) -> Iterable[tuple[str, float]]:
    for name, taken in heavy:
        if (before := best.seconds.get(name, 0.0)) > 0 and taken > before:
            yield name, taken / before


SLOW_LAST = ("fp32", "bf16", "fp16")
ROUNDS = 5  # of full steps; of each precision the shortest counts. Before them is one that warms up
ROUNDS_SHARE = 0.02  # of the job's steps: a short job has fewer rounds
MOST_TIMES = 5.0
FEWEST_ROWS, GROWTH = 2, 4  # with four times the rows, a step takes about four times as long
MOST_STEPS = 32  # of one precision here: a schedule may not go beyond its end
CALM_SCALE = 256.0  # a step that overflowed would be a shorter one
LoopOf = Callable[[Settings, int], BatchLoop]


@dataclass(slots=True)
class Timed:
    """``seconds`` of a full step by precision; ``left_out``: those that are much slower; ``took_s``: seconds that it
    took to find this out."""

    seconds: dict[str, float] = field(default_factory=dict)
    left_out: list[Slow] = field(default_factory=list)
    took_s: float = 0.0

    def facts(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "left_out": [{**asdict(one), "sentence": str(one)} for one in self.left_out],
            "took_seconds": round(self.took_s, 3),
        }


class PrecisionTest:
    """Steps of a job in several precisions. Weights, buffers and generators are as before afterwards.

    ``loop_of`` makes the loop of the job with other settings, over so many rows; ``enter`` is called with the precision
    before each step. ``steps``: of the job.
    ``clock`` times full steps; ``work_clock`` gives processor time, with which slow precisions are found: another
    program cannot make one seem slow.
    """

    def __init__(
        self, module: nn.Module, loop_of: LoopOf, settings: Settings, steps: int, device: str,
        enter: Callable[[str], None] = lambda precision: None,
        clock: Clock = time.perf_counter, work_clock: Clock = time.process_time,
    ) -> None:  # fmt: skip
        self._module, self._loop_of, self._settings, self._enter = module, loop_of, settings, enter
        self._on_cpu = torch.device(device).type == "cpu"
        self._clock, self._work_clock = clock, work_clock
        self._loops: dict[str, BatchLoop] = {}
        self._rounds = min(ROUNDS, max(1, int(ROUNDS_SHARE * steps)))

    def timed(self, among: Sequence[str] = EXACT_FIRST) -> Timed:
        """The time of a full step in each of ``among``; a precision that the device does not have is left out, and on
        a processor one that is much slower."""
        found, began = Timed(), self._clock()
        with self._untouched():
            rivals = self._without_slow([one for one in SLOW_LAST if one in among], found)
            for turn in range(self._rounds + (not self._on_cpu)):
                for precision in rivals:
                    self._time(precision, found, counts=self._on_cpu or turn > 0)
        found.took_s = self._clock() - began
        return found

    def _without_slow(self, among: list[str], found: Timed) -> list[str]:
        """The precisions that are not much slower, at any number of rows; all are tried in turns, few rows first."""
        if not self._on_cpu or len(among) < 2:
            return among
        rivals = list(among)
        with kernel_costs.one_thread():  # of several, those that wait for each other take processor time too
            self._watched(among[0], FEWEST_ROWS)  # the first step of all makes what the others find
            for rows in self._row_counts():
                best_name, best = "", None
                for precision in list(rivals):
                    watch = self._watched(precision, rows, MOST_TIMES * best.took if best else float("inf"))
                    if watch is None:
                        rivals.remove(precision)
                    elif best is not None and watch.took > MOST_TIMES * best.took:
                        found.left_out.append(slow(precision, watch, best_name, best))
                        rivals.remove(precision)
                    elif best is None or watch.took < best.took:
                        best_name, best = precision, watch
        return rivals

    def _row_counts(self) -> Iterator[int]:
        rows = FEWEST_ROWS
        while rows < self._settings.batch_size:
            yield rows
            rows *= GROWTH
        yield self._settings.batch_size

    def _watched(self, precision: str, rows: int, most: float = float("inf")) -> StepWatch | None:
        """One step with so many rows, or its beginning; None where the device does not run it. A step that takes too
        long is tried once more: the first one of a kind may have had to make its kernels."""
        first = self._one_step(precision, rows, most)
        return first if first is None or first.took <= most else self._one_step(precision, rows, most)

    def _one_step(self, precision: str, rows: int, most: float) -> StepWatch | None:
        watch = StepWatch(self._clock, self._work_clock, most)
        try:
            self._step(precision, rows, watch)
        except TooSlow:
            del self._loops[precision]  # its scaler may be in the middle of a step
        except (Stopped, RuntimeError):
            return None
        return watch

    def _time(self, precision: str, found: Timed, counts: bool) -> None:
        began = self._clock()
        try:
            self._step(precision, self._settings.batch_size)
        except (Stopped, RuntimeError):
            return
        if counts:
            seconds = self._clock() - began
            found.seconds[precision] = min(found.seconds.get(precision, seconds), seconds)

    def _step(self, precision: str, rows: int, watch: StepWatch | None = None) -> None:
        """One step on the first rows, by the one loop of the precision: to make a loop takes longer than a small
        step."""
        self._enter(precision)
        if precision not in self._loops:
            asked = replace(
                self._settings, precision=precision, n_epochs=MOST_STEPS, learning_rate=1e-10,
                init_scale=CALM_SCALE, scale_floor=1.0,
            )  # fmt: skip
            self._loops[precision] = self._loop_of(asked, self._settings.batch_size)
            self._loops[precision].on_epoch(0)
        with watch or nullcontext():
            self._loops[precision].step(0, torch.arange(rows))

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        start = {name: copied(tensor) for name, tensor in named_tensors(self._module).items()}
        with generators_untouched():
            try:
                yield
            finally:
                self._loops.clear()
                put_into(self._module, start)
                self._module.zero_grad(set_to_none=True)
                self._enter(self._settings.precision)


def timed_steps(
    module: nn.Module, loss_of: LossOf, parts_of: PartsOf, rows: int, settings: Settings, device: str,
    clock: Clock = time.perf_counter, work_clock: Clock = time.process_time,
) -> dict[str, float]:  # fmt: skip
    """Seconds of a step by precision, of a training with one loss and one optimizer over so many rows; what the device
    does not have, and on a processor what is much slower, is left out. No job needs it: scripts that reproduce a slow
    kernel measure a module by itself with it."""

    def loop(asked: Settings, count: int) -> BatchLoop:
        return Loop(module, loss_of, count, asked, device, parts_of)

    steps = total_steps(rows, settings)
    test = PrecisionTest(module, loop, settings, steps, device, clock=clock, work_clock=work_clock)
    return test.timed().seconds
