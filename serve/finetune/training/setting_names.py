"""The schedules that a job may have, and its usual learning rate. The server and the trainer read them here; needs
nothing, not even torch."""

from collections.abc import Mapping

USUAL_LEARNING_RATE = 1e-4  # AdamW's, for going on with a trained model
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
