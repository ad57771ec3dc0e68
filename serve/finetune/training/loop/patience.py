"""Decides when a training that makes no progress is ended, and checks the weights that it leaves. Needs torch alone."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .training_terms import GRADIENT_OVERFLOW, Settings, Stopped


class Patience:
    """Ends a job that skips step after step where the loss scale cannot help: it did not fall.

    That is: it is at its floor, or there is none (bf16, fp32), or the loss itself was not finite. ``diagnose`` says why
    gradients are not finite.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.taken = 0
        self.in_a_row = 0
        self.cause: str | None = None
        self.diagnose: Callable[[], str] = lambda: ""

    def count(self, cause: str | None, scale_fell: bool) -> None:
        """Count one step: ``cause`` says why it was skipped."""
        if cause is None:
            self.taken, self.in_a_row = self.taken + 1, 0
            return
        self.cause = cause
        self.in_a_row += not scale_fell

    def check(self, step: int) -> None:
        """Raises Stopped where ``max_floor_hits`` such steps came without one taken between them."""
        if self.in_a_row >= self.settings.max_floor_hits:
            raise self.stopped(f"stopped at step {step}, after {self.in_a_row} skipped steps in a row")

    def at_the_end(self) -> None:
        """Raises Stopped where no step was taken: a job may have fewer steps than ``max_floor_hits``."""
        if not self.taken:
            raise self.stopped("not one step was taken")

    def stopped(self, what: str) -> Stopped:
        half = self.settings.is_fp16
        if self.cause == GRADIENT_OVERFLOW:
            why = f"the gradients overflow half at every loss scale down to the floor of {self.settings.scale_floor:g}"
            code, why = ("SCALE_COLLAPSE", why) if half else ("DIVERGED", "the gradients are not finite")
            why += f". {self.diagnose()}."
        else:
            code, why = ("DIVERGED", LOST) if self.taken else ("BAD_DATA", POISONED)
            why += (
                " In fp16 an activation above 65504 is infinite: bf16 or fp32 would show it." if half else ""
            )
        return Stopped(code, f"{what}: {why}")


LOST = "the loss was finite and no longer is. Lower the learning rate, or look for extreme rows in the data."
POISONED = "the loss was never finite. Look for non-finite or extreme values in the inputs and targets."


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and every buffer, those that a state_dict leaves out too; of tied ones the first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def finite_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """The names of the tensors without NaN or infinity. A mask of −inf is no fault, but is not among these tensors."""
    return {name for name, tensor in tensors.items() if bool(torch.isfinite(tensor).all())}


def audit(tensors: Mapping[str, Tensor], sound: set[str]) -> None:
    """Raises Stopped where a tensor that was finite before the training is no longer."""
    if spoilt := sorted(sound - finite_names(tensors)):
        named = ", ".join(f"'{name}'" for name in spoilt[:5])
        raise Stopped(
            "NONFINITE_WEIGHTS",
            f"after the training {len(spoilt)} tensors hold NaN or infinity ({named}{', …' if spoilt[5:] else ''}): "
            "nothing was written. Train in bf16 or fp32, or at a lower learning rate.",
        )
