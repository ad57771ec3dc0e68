"""A flight recorder for a training loop: where the gradients of a step that a GradScaler skips left half's range.

    recorder = ScalerRecorder(model, scaler)      # before the loop; the loop stays as it is
    ...
    for one in recorder.records:                  # bounded; recorder.skipped counts all
        print(one.step, one)

A step that is taken costs a few references. Only where a step is skipped its passes are run again, between the steps,
and looked at (`overflow_search`). Weights, gradients, buffers and random numbers are the same bits as without it;
forward hooks of the script's own run once more.
"""

from collections import deque
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .overflow_search import Found, Overflow, Pass, search, tensors_of
from .seeding import torch_generators
from .training_terms import GRADIENT_OVERFLOW

MOST_RECORDS = 50
MOST_PASSES = 16  # of one step: parts of a batch
MOST_SEARCHES = 200  # of one training


class ScalerRecorder:
    """Watches a module and its scaler until `close`, or until the end of a `with` block."""

    def __init__(self, module: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
        """Without a ``scaler`` nothing is watched but the module: the caller says `taken` or `look`."""
        self.records: deque[Overflow] = deque(maxlen=MOST_RECORDS)
        self.skipped = 0
        self._module, self._scaler, self._steps, self._searches = module, scaler, 0, 0
        self._passes: deque[Pass] = deque(maxlen=MOST_PASSES)
        self.failed: str | None = None  # why a search ended without an answer
        self._optimizers: dict[torch.optim.Optimizer, RemovableHandle] = {}
        self._device = next((one.device.type for one in module.parameters()), "cpu")
        self._handles = self._watch()
        if scaler is not None:
            self._step = scaler.step
            scaler.step = self._watched_step  # type: ignore[method-assign]

    def close(self) -> None:
        for handle in (*self._handles, *self._optimizers.values()):
            handle.remove()
        if self._scaler is not None:
            self._scaler.__dict__.pop("step", None)
        self._passes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def rows(self) -> int:
        """The number of rows of the first pass since the last step."""
        return self._passes[0].rows if self._passes else 0

    def taken(self) -> None:
        """The step was taken: what was kept of its passes is let go."""
        self._steps += 1
        self._passes.clear()

    def look(self, scale: float) -> Overflow | None:
        """The step is skipped: the passes since the last step are run again and searched."""
        self._steps += 1
        self.skipped += 1
        passes, self._passes = list(self._passes), deque(maxlen=MOST_PASSES)
        if self._searches >= MOST_SEARCHES:
            return None
        self._searches += 1
        for handle in self._handles:
            handle.remove()
        try:
            found = next((one for each in passes if (one := search(self._module, each)) is not None), None)
        except Exception as error:  # no room, a module that cannot be copied: the training goes on
            self.failed, found = f"{type(error).__name__}: {error}", None
        finally:
            self._handles = self._watch()
        return self._kept(found, scale)

    def _watch(self) -> list[RemovableHandle]:
        return [
            self._module.register_forward_pre_hook(self._before, with_kwargs=True),
            self._module.register_forward_hook(self._behind),
        ]

    def _kept(self, found: Found | None, scale: float) -> Overflow | None:
        if found is None:
            return None
        overflow = Overflow(self._steps, scale, found.layer, found.operation, found.direction, found.rows)
        self.records.append(overflow)
        return overflow

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and module.training:
            device = self._device
            casts = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            self._passes.append(Pass(args, kwargs, torch_generators(), casts))

    def _behind(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or not module.training or not self._passes:
            return
        gradients = self._passes[-1].gradients

        def keep(place: int) -> Any:
            def kept(gradient: Tensor) -> None:
                gradients[place] = gradient if place not in gradients else gradients[place] + gradient

            return kept

        for place, one in enumerate(tensors_of(output)):
            one.register_hook(keep(place))

    def _watched_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        assert self._scaler is not None
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = optimizer.register_step_post_hook(self._note)
        self._stepped = False
        result = self._step(optimizer, *args, **kwargs)
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._stepped and not (fused and self._found_inf(optimizer)):
            self.taken()
        elif self._scaler.is_enabled():
            self.look(self._scaler.get_scale())
        return result

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def _found_inf(self, optimizer: torch.optim.Optimizer) -> bool:
        """A fused optimizer asks the scaler's flag itself."""
        assert self._scaler is not None
        flags = self._scaler._found_inf_per_device(optimizer)
        return any(bool(flag.item()) for flag in flags.values())


def overflow_of(
    recorder: ScalerRecorder | None, cause: str | None, scale: float, batch: Tensor
) -> tuple[str, tuple[int, ...]] | None:
    """For our own loop, which decides itself whether a step is taken: the words, and rows as numbers of ``batch``,
    where it went through in one pass."""
    if recorder is None:
        return None
    if cause is None:
        recorder.taken()
        return None
    whole = recorder.rows == len(batch)
    overflow = recorder.look(scale) if cause == GRADIENT_OVERFLOW else recorder.taken()
    if overflow is None:
        return None
    return str(replace(overflow, rows=())), tuple(batch[list(overflow.rows)].tolist()) if whole else ()
