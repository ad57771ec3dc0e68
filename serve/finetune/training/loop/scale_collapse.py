"""Finds why the gradients of a batch are not finite at any loss scale, and what makes them finite: each remedy that is
named was tried on that batch. Needs torch alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .half_model import without_autocast
from .overflow_search import all_finite
from .passes import Passes, culprits, is_finite, restore, snapshot
from .seeding import generators_untouched
from .training_terms import SMALLEST_SCALE

FEW = 0.25  # of a batch: where more rows overflow, it is not the rows
MOST_NAMED = 10
MOST_MODULES = 4  # that are tried in FP32


class Trial(Protocol):
    """Gives a context in which the model computes in another precision, or with one more module in FP32."""

    def __call__(self, precision: str, module: str | None = None) -> AbstractContextManager[None]: ...


@dataclass
class Diagnosis:
    """The search for the cause of overflow in one optimizer's passes over ``batch``. ``weights``: the optimizer's.
    ``model``: its modules can be in FP32; ``trial``: see `Trial`; ``numbers``: of rows, as in the caller's file."""

    passes: Passes
    weights: Sequence[nn.Parameter]
    model: nn.Module
    trial: Trial
    numbers: Callable[[Sequence[int]], Sequence[int]]
    batch: Tensor
    loss: float = 0.0  # of the rows that were passed last

    def sentence(self) -> str:
        """The cause of the collapse, and a remedy. Weights, buffers and generators are afterwards as before."""
        with generators_untouched():
            try:
                return self._sentence()
            except Exception as error:
                # The search failed in the operator's code, or for lack of memory: the overflow is the fault to tell.
                return f"Train in bf16 or fp32 (why they overflow was not found: {type(error).__name__}: {error})"

    def _sentence(self) -> str:
        settings, batch = self.passes.settings, self.batch
        floor = settings.scale_floor if settings.is_fp16 else 1.0
        rows = culprits(lambda some: not self.finite(some, floor), batch, batch[:0])
        rest = batch[~torch.isin(batch, rows)]
        if 0 < len(rows) <= max(1, FEW * len(batch)) and len(rest) and self.finite(rest, floor):
            return _of_rows(list(self.numbers(rows[:MOST_NAMED].tolist())), len(rows))
        if settings.is_fp16 and (scale := self._scale()) is not None:
            return self._of_the_scale(scale)
        if not settings.is_fp16 or not self.finite(batch, 1.0, "fp32"):
            return self._in_any_precision()
        if name := self._module(floor):
            return (
                f"They overflow inside of the module '{name}', and in FP32 they do not: name it in model.toml "
                f'([training] fp32_modules = ["{name}"]) and convert again, or train in bf16 or fp32'
            )
        others = [one for one in ("bf16", "fp32") if self.finite(batch, 1.0, one)]
        return f"They are finite in {' and in '.join(others)}: train with precision = {others[0]}"

    def finite(
        self, rows: Tensor, scale: float, precision: str | None = None, module: str | None = None
    ) -> bool:
        """True if the gradients of these rows, with the weight that they have in the batch, are finite at this
        scale."""
        passes, before = self.passes, snapshot(self.passes.module)
        own, self.loss = precision is None and module is None, 0.0
        with nullcontext() if own else self.trial(precision or passes.settings.precision, module):
            for part in passes.parts_of(rows):
                with passes.forward_context(precision):
                    loss = passes.loss_of(part) * (part.numel() / len(self.batch))
                self.loss += loss.item()
                with passes.backward_context(precision):
                    (loss * scale).backward()
        gradients = [one.grad for one in self.weights if one.grad is not None]
        found = all(is_finite(one.abs().max()) for one in gradients if one.numel())
        for one in self.weights:
            one.grad = None
        restore(before)
        return found

    def _scale(self) -> float | None:
        """The largest scale below the last one at which the gradients are finite."""
        scale = min(self.passes.scaler.get_scale(), 2.0**16)
        while scale > SMALLEST_SCALE:
            scale /= 2
            if self.finite(self.batch, scale):
                return scale
        return None

    def _of_the_scale(self, scale: float) -> str:
        floor, where = self.passes.settings.scale_floor, f"They are finite at a loss scale of {scale:g}"
        if scale >= floor:
            return f"{where}, which so few steps do not reach: set init_scale = {scale:g}, or train in bf16 or fp32"
        lower = max(SMALLEST_SCALE, scale / 16)  # other batches may need a smaller one
        return (
            f"{where}: set scale_floor = {lower:g} and init_scale = {scale:g}, or train in bf16 or fp32. The loss is "
            f"{self.loss:.2g}: if that is not meant, look for extreme values in the inputs or targets, and scale them"
        )

    def _in_any_precision(self) -> str:
        names = self._first_modules(1.0, "fp32")[:1]
        where = f" inside of the module '{names[0]}'" if names else ""
        return (
            f"They are not finite in fp32 either{where}, so it is not the precision: a root or a norm of zero, a "
            "logarithm of zero and a division by zero have no finite slope. Add a small number to the argument in the "
            "code; where the weights have grown, lower the learning rate; look for extreme values in inputs and targets"
        )

    def _module(self, scale: float) -> str | None:
        """One module that makes the gradients finite where it computes in FP32."""
        names = self._first_modules(scale)[:MOST_MODULES]
        return next((name for name in names if self.finite(self.batch, scale, module=name)), None)

    def _first_modules(self, scale: float, precision: str | None = None) -> list[str]:
        """The modules without parts that give infinity for finite inputs, first those that do so in the forward, then
        those whose gradient does so in the backward, each in the order in which that happens."""
        forward: list[str] = []
        backward: list[str] = []
        with _watched(self.model, forward, backward):
            self.finite(self.batch, scale, precision)
        return [name for name in dict.fromkeys(forward + backward) if name]


@contextmanager
def _watched(module: nn.Module, forward: list[str], backward: list[str]) -> Iterator[None]:
    handles: list[Any] = []

    def after(name: str, one: nn.Module, inputs: Any, answer: Any) -> None:
        given = [each for each in inputs if isinstance(each, Tensor) and each.is_floating_point()]
        if not isinstance(answer, Tensor) or not answer.is_floating_point():
            return
        if not all_finite([answer]) and all_finite(given):
            forward.append(name)
        sound: list[bool] = []
        if answer.requires_grad and answer.grad_fn is not None:
            answer.register_hook(lambda gradient: sound.append(all_finite([gradient])))
        for tensor in (*given, *one.parameters(recurse=False)):
            if tensor.requires_grad:
                handles.append(tensor.register_hook(lambda gradient: _came(gradient, sound, name, backward)))

    for name, one in module.named_modules():
        if not any(True for _ in one.children()):
            handles.append(
                one.register_forward_hook(
                    lambda one, inputs, answer, name=name: after(name, one, inputs, answer)
                )
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _came(gradient: Tensor, sound: list[bool], name: str, found: list[str]) -> None:
    if sound and all(sound) and not all_finite([gradient]):
        found.append(name)


def trial_under_autocast(model: nn.Module, device: str) -> Trial:
    """The trials of a model that is trained under autocast, whose precision the caller sets."""

    @contextmanager
    def trial(precision: str, module: str | None = None) -> Iterator[None]:
        if module is None:
            yield
            return
        part = model.get_submodule(module)
        before = part.__dict__.get("forward")
        without_autocast(model, [module], device)
        try:
            yield
        finally:
            del part.forward
            if before is not None:
                part.forward = before

    return trial


def _of_rows(named: list[int], count: int) -> str:
    more = f", … ({count} rows)" if count > len(named) else ""
    return (
        f"Only the gradients of the rows {', '.join(map(str, named))}{more} overflow: look for extreme values in their "
        "inputs or targets, and mend them or leave them out; or train in bf16 or fp32"
    )
