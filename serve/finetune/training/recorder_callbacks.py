"""The flight recorder as a callback: of Hugging Face's Trainer, and of Lightning's. Each needs its own library alone,
and begins where the training has a loss scaler (fp16)."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .loop.overflow_search import Overflow
from .loop.scaler_recorder import ScalerRecorder

logger = logging.getLogger("halfeven.training")


class Recording:
    """The common part of the callbacks for Hugging Face and for Lightning. Each skipped step is logged as a warning;
    ``recorder`` is None without a loss scaler."""

    recorder: ScalerRecorder | None = None
    _newest: Overflow | None = None

    @property
    def records(self) -> Sequence[Overflow]:
        return () if self.recorder is None else tuple(self.recorder.records)

    @property
    def skipped(self) -> int:
        return 0 if self.recorder is None else self.recorder.skipped

    def begin(self, module: nn.Module | Mapping[str, nn.Module], scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and scaler.is_enabled():
            self.recorder = ScalerRecorder(module, scaler)

    def report(self) -> None:
        if self.records and self.records[-1] is not self._newest:
            self._newest = self.records[-1]
            logger.warning("step %d, scale %g: %s", self._newest.step, self._newest.scale, self._newest)

    def end(self) -> None:
        """The hooks go; the records stay."""
        if self.recorder is not None:
            self.recorder.close()


def trainer_recorder() -> Any:
    """A callback for ``transformers.Trainer(callbacks=[…])``."""
    from transformers import TrainerCallback

    class TrainerRecorder(Recording, TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.begin(more["model"], getattr(more["optimizer"], "scaler", None))

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.report()

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.end()

    return TrainerRecorder()


def lightning_recorder() -> Any:
    """A callback for ``lightning.Trainer(callbacks=[…])``, or that of ``pytorch_lightning``. It watches the modules
    that are attributes of the LightningModule: its ``training_step`` need not call ``forward``."""
    try:
        from lightning.pytorch import Callback  # type: ignore[import-not-found]
    except ImportError:
        from pytorch_lightning import Callback  # type: ignore[import-not-found]

    class LightningRecorder(Recording, Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            parts = {
                name: one for name, one in pl_module.named_children() if any(True for _ in one.parameters())
            }
            self.begin(parts or pl_module, getattr(trainer.precision_plugin, "scaler", None))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
            self.report()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.end()

    return LightningRecorder()
