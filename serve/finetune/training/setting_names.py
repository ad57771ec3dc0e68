"""The words that a job's settings may have: schedules and losses. The server and the trainer read them here; needs
nothing, not even torch."""

from collections.abc import Mapping

ONE_CYCLE = "one_cycle"
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
