"""The schedules that a job may have, its usual learning rate, and how many rows may be left out. The server, the reader
of its files and the trainer read them here; needs nothing, not even torch."""

from collections.abc import Mapping

USUAL_LEARNING_RATE = 1e-4  # AdamW's, for going on with a trained model
MOST_SHARE, MOST_ROWS = 0.1, 10  # of the rows of a file may be quarantined, whichever is more
ONE_CYCLE = "one_cycle"
EMULATED = "fp16_emulated"  # half is stored, and products are computed in FP32 (`emulated_half.py`)
HALF_LEVELS = ("O2", "O3")  # a half model: with norms in FP32, and with everything in half
PRECISIONS = ("fp16", "bf16", "fp32", EMULATED)
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
    """How many of so many rows may be left out, found by reading or in the training; with more the job ends."""
    return max(MOST_ROWS, int(MOST_SHARE * rows))
