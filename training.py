"""For a loop of your own, Hugging Face's or Lightning's: `from halfeven.training import …` (docs/finetune.md)."""

from halfeven.serve.finetune.training.loop.scaler_recorder import ScalerRecorder
from halfeven.serve.finetune.training.recorder_callbacks import lightning_recorder, trainer_recorder

__all__ = ["ScalerRecorder", "lightning_recorder", "trainer_recorder"]
