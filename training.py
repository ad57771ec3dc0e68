"""For a training loop of your own: `from halfeven.training import ScalerRecorder` (docs/finetune.md)."""

from halfeven.serve.finetune.training.loop.scaler_recorder import ScalerRecorder

__all__ = ["ScalerRecorder"]
