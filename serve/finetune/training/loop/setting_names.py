"""The schedules that a job may have, its usual learning rate, which precision is taken, when the loss scale grows, and
how many rows may be left out. The server, the reader of its files and the trainer read them here; needs nothing, not
even torch."""

from collections.abc import Mapping, Sequence

USUAL_LEARNING_RATE = 1e-4  # AdamW's, for going on with a trained model
MOST_SHARE, MOST_ROWS = 0.1, 10  # of the rows of a file may be quarantined, whichever is more
ONE_CYCLE = "one_cycle"
EMULATED = "fp16_emulated"  # half is stored, and products are computed in FP32 (`emulated_half.py`)
HALF_LEVELS = ("O2", "O3")  # a half model: with norms in FP32, and with everything in half
PRECISIONS = ("fp16", "bf16", "fp32", EMULATED)
EXACT_FIRST = ("fp32", "fp16", "bf16")
HALF_MODELS = ("fp16", "bf16")  # the precisions of a half model
REFUSE, MASK = "refuse", "mask"  # of a target that is NaN
STATE_FILE = "training_state.safetensors"  # of a version: what the next training may begin with
NO_GRADIENT = "NO_GRADIENT"  # code of a finding and an event: parameters that the loss does not depend on
NONE, NETS, ALL = "none", "nets", "all"  # of that state
NEARLY = 1.03  # of the shortest time: what is hardly slower and more exact is taken
# Each schedule with the settings that it reads besides `warmup_ratio`, which all of them read.
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "cosine": (),
    "constant": (),
    "linear": (),
    "polynomial": ("schedule_power",),
    "step": ("schedule_period", "schedule_gamma"),
    "exponential": ("schedule_gamma",),
    "cosine_restarts": ("schedule_period",),
    ONE_CYCLE: (),
}


def most_quarantined(rows: int) -> int:
    """The number of rows, of so many, that may be left out, by reading or in training; with more the job ends."""
    return max(MOST_ROWS, int(MOST_SHARE * rows))


def batch_count(rows: int, size: int) -> int:
    """The number of batches that so many rows are divided into, of at most ``size``; a single row is never left alone
    where ``size`` is not 1: then one batch has a row more."""
    count = -(-rows // size)
    return max(1, min(count, rows // 2)) if size > 1 else count


def chosen_precision(seconds: Mapping[str, float], among: Sequence[str] = EXACT_FIRST) -> str:
    """The first precision of ``among``, the most exact first, that is nearly as fast as the fastest; ``among[0]`` where
    nothing could be timed. ``seconds``: of a step, by precision."""
    fastest = min(seconds.values(), default=0.0)
    return next((one for one in among if one in seconds and seconds[one] <= NEARLY * fastest), among[0])


def growth_interval(steps: int) -> int:
    """Clean steps before the scale doubles, in a training of so many steps: torch's 2000 would never come in a short
    one."""
    return min(2000, max(20, steps // 10))
