"""A flight recorder for a training loop: where the gradients of a step that a GradScaler skips left half's range.

    recorder = ScalerRecorder(model, scaler)      # before the loop; the loop stays as it is
    ...
    for one in recorder.records:                  # bounded; recorder.skipped counts all
        print(one.step, one)

Of several nets with optimizers of their own (a GAN), all are given by name: `ScalerRecorder({"critic": critic,
"generator": generator}, scaler)`, one recorder for each scaler. A record names the nets whose step was skipped.

A step that is taken costs a few references. Only where a step is skipped its passes are run again, between the steps,
and looked at (`overflow_search`). Weights, gradients, buffers and random numbers are the same bits as without it;
forward hooks of the script's own run once more.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .overflow_search import Context, Found, Overflow, Pass, Rerun, search, tensors_of
from .seeding import torch_generators
from .training_terms import GRADIENT_OVERFLOW

MOST_RECORDS = 50
MOST_PASSES = 16  # of one step: parts of a batch
MOST_SEARCHES = 200  # of one training


class ScalerRecorder:
    """Watches a module, or several by name, and their scaler until `close`, or until the end of a `with` block."""

    def __init__(
        self, module: nn.Module | Mapping[str, nn.Module], scaler: torch.amp.GradScaler | None = None,
        rerun: Rerun | None = None,
    ) -> None:  # fmt: skip
        """Nothing is watched but the module where there is no ``scaler``: the caller says `taken` or `look`. Without
        ``rerun`` a forward is run again under the autocast that it had."""
        self.records: deque[Overflow] = deque(maxlen=MOST_RECORDS)
        self.skipped = 0
        self._nets = {"": module} if isinstance(module, nn.Module) else dict(module)
        self._scaler, self._steps, self._searches = scaler, 0, 0
        self._rerun = rerun
        self._passes: deque[Pass] = deque(maxlen=MOST_PASSES * len(self._nets))
        self.failed: str | None = None  # why the last search ended without an answer
        self._optimizers: dict[torch.optim.Optimizer, RemovableHandle] = {}
        weights = (one for net in self._nets.values() for one in net.parameters())
        self._device = next((one.device.type for one in weights), "cpu")
        self._handles = self._watch()
        if scaler is not None:
            self._step, self._update = scaler.step, scaler.update
            scaler.step = self._watched_step  # type: ignore[method-assign]
            scaler.update = self._watched_update  # type: ignore[method-assign]

    def close(self) -> None:
        for handle in (*self._handles, *self._optimizers.values()):
            handle.remove()
        if self._scaler is not None:
            for name in ("step", "update"):
                self._scaler.__dict__.pop(name, None)
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
        found = self._looked(scale, list(self._nets), self._steps + 1)
        self.taken()
        return found

    def _looked(self, scale: float, owned: Sequence[str], step: int) -> Overflow | None:
        self.skipped += 1
        self.failed = None
        if self._searches >= MOST_SEARCHES:
            return None
        self._searches += 1
        for handle in self._handles:
            handle.remove()
        try:
            found = self._searched(owned)
        except Exception as error:  # no room, a module that cannot be copied: the training goes on
            self.failed, found = f"{type(error).__name__}: {error}".partition("\n")[0][:200], None
        finally:
            self._handles = self._watch()
        if found is None:
            return None
        net = ", ".join(owned) if len(owned) < len(self._nets) else ""
        overflow = Overflow(step, scale, found.layer, found.operation, found.direction, found.rows, net)
        self.records.append(overflow)
        return overflow

    def _searched(self, owned: Sequence[str]) -> Found | None:
        """The fault that is found in the passes of the nets ``owned``; where what they were given was not finite
        already, in those of the other nets: behind them, which gave the gradient, then before them."""
        passes, first = list(self._passes), None
        for place, one in enumerate(passes):
            if one.net not in owned or (found := self._in_pass(one)) is None:
                continue
            if not found.entered:
                return found
            first = first or found
            for other in (*passes[place + 1 :], *reversed(passes[:place])):
                found = None if other.net in owned else self._in_pass(other)
                if found is not None and not found.entered:
                    return found
        return first

    def _in_pass(self, one: Pass) -> Found | None:
        found = search(self._nets[one.net], one)
        if found is None or found.entered or not one.net:
            return found
        layer = one.net if found.layer == "the model" else f"{one.net}.{found.layer}"
        return replace(found, layer=layer)

    def _watch(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for name, net in self._nets.items():
            handles.append(net.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            handles.append(net.register_forward_hook(partial(self._behind, name)))
        return handles

    def _before(self, net: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and module.training:
            rerun = self._rerun or Rerun(_autocast_now(self._device))
            self._passes.append(Pass(args, kwargs, torch_generators(), rerun, net=net))

    def _behind(self, net: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        one = next((one for one in reversed(self._passes) if one.net == net), None)
        if one is None:
            return
        gradients = one.gradients

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
        taken = self._stepped and not (fused and self._found_inf(optimizer))
        owned = self._owned(optimizer)
        if not taken and self._scaler.is_enabled():
            self._looked(self._scaler.get_scale(), owned, self._steps + 1)
        if len(owned) == len(self._nets):
            self._passes.clear()  # no other optimizer has a part in them
        return result

    def _watched_update(self, *args: Any, **kwargs: Any) -> None:
        assert self._scaler is not None
        self._update(*args, **kwargs)
        self.taken()

    def _owned(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The nets whose parameters this optimizer changes; all where it has copies of them."""
        if len(self._nets) == 1:
            return [*self._nets]
        changed = {id(one) for group in optimizer.param_groups for one in group["params"]}
        nets = self._nets.items()
        return [name for name, net in nets if any(id(one) in changed for one in net.parameters())] or [
            *self._nets
        ]

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def _found_inf(self, optimizer: torch.optim.Optimizer) -> bool:
        """A fused optimizer asks the scaler's flag itself."""
        assert self._scaler is not None
        flags = self._scaler._found_inf_per_device(optimizer)
        return any(bool(flag.item()) for flag in flags.values())


def _autocast_now(device: str) -> Context:
    """The autocast of this moment on a device of this kind."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled)


def overflow_of(
    recorder: ScalerRecorder | None, cause: str | None, scale: float, batch: Tensor
) -> tuple[str, tuple[int, ...]] | None:
    """The words on an overflow, and rows as numbers of ``batch`` where it went through in one pass; for our own loop,
    which decides itself whether a step is taken."""
    if recorder is None:
        return None
    if cause is None:
        recorder.taken()
        return None
    whole = recorder.rows == len(batch)
    overflow = recorder.look(scale) if cause == GRADIENT_OVERFLOW else recorder.taken()
    if overflow is None:
        if cause != GRADIENT_OVERFLOW or recorder.failed is None:
            return None
        return f"the search for where values left the range of half failed: {recorder.failed}", ()
    return str(replace(overflow, rows=())), tuple(batch[list(overflow.rows)].tolist()) if whole else ()
