"""Finds the modules of a live model that stay in FP32: those asked for, and the fewest more that the model needs.

A live model has no graph, so entire modules are kept in FP32. Inner modules are tried first, the modules around
them after.
"""

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...models.engines.live_engine import LiveEngine, LiveModule
from ...models.errors import BadSetting, EngineFailed
from ...models.spec.spec import ModelSpec
from ..gate.parity import judge
from ..gate.trial import Trial
from ..inputs.samples import Samples, few
from ..inputs.synthetic import adversarial
from ..plan.aims import stricter
from ..policy.operations import UNKNOWN, Meter, Operations
from ..proof.prove import Answers, Arrays, answers_of
from ..search.delta_debugging import Budget, Found, Score, smallest_set

BUDGET = Budget(evaluations=200, operations=1 << 41)
ROWS = 8  # of one batch

Outputs = dict[str, list[Tensor]]  # module path → the floating tensors that its last call gave


def observed(module: nn.Module, run: Callable[[], object]) -> Outputs:
    """The modules that ``run`` calls, in the order in which they end.

    Where it raises, those that did not end come last, the innermost first, without outputs.
    """
    begun: list[str] = []
    ended: Outputs = {}

    def watch(path: str, part: nn.Module) -> list[Any]:
        def end(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor)]
            ended[path] = [value.detach().float() for value in tensors if value.is_floating_point()]

        return [
            part.register_forward_pre_hook(lambda _module, _inputs: begun.append(path)),
            part.register_forward_hook(end),
        ]

    hooks = [hook for path, part in module.named_modules() if path for hook in watch(path, part)]
    try:
        run()
    except EngineFailed:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return ended | {path: [] for path in dict.fromkeys(reversed(begun)) if path not in ended}


def asked_islands(module: nn.Module, called: Iterable[str], patterns: Sequence[str]) -> dict[str, str]:
    """The outermost modules that keep patterns name, each with its pattern.

    A pattern is a module's path, with ``*``; one that is never called (a ModuleList) stands for those inside
    it. Raises BadSetting for ``op:``, and for a pattern that names no module or none that is ever called.
    """
    paths, called = [path for path, _ in module.named_modules() if path], list(called)
    found: dict[str, str] = {}
    for pattern in patterns:
        if pattern.startswith("op:"):
            raise BadSetting(
                f"keep = {pattern!r}: the live form has no graph whose ops could stay in FP32, only modules: "
                f"name a module's path, such as {', '.join(paths[:5])}"
            )
        named = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
        if not named:
            raise BadSetting(f"keep = {pattern!r} matches no module: expected a path, one of {paths[:20]}")
        hits = [path for path in called if path in named or _within(path, named)]
        if not hits:
            raise BadSetting(
                f"keep = {pattern!r}: the forward of '{named[0]}' is never called (another module reads its "
                f"weights), so it cannot be kept by itself: name one of {called[:20]}"
            )
        found |= {path: found.get(path, pattern) for path in hits}
    return {path: pattern for path, pattern in found.items() if not _within(path, found)}


class LiveRehearsal:
    """The gate on planning samples, with true half kernels: would the half with these islands pass?

    ``share``: how much of the gate's limits may be used; the samples that judge are others. ``operations``: of one
    execution.
    """

    def __init__(
        self,
        live: LiveModule,
        dtype: str,
        device: torch.device,
        planning: Samples,
        share: float,
        operations: Operations = UNKNOWN,
    ) -> None:
        self._live, self._dtype, self._device = live, dtype, device
        limits = stricter(live.spec.parity, dtype, share)
        self._spec = replace(live.spec, parity=limits)
        original = answers_of(live.spec, LiveEngine(live, "fp32", device))
        self.meter = Meter(operations)
        self._trials = list(_asked(live.spec, few(planning, operations), original))
        self._scores: dict[frozenset[str], Score] = {}

    def score(self, islands: Iterable[str]) -> Score:
        """The score of a set of islands, computed once for each set. A half that raises has failed."""
        key = frozenset(islands)
        if key not in self._scores:
            half = LiveEngine(self._live, self._dtype, self._device, sorted(key))
            try:
                self._scores[key] = self._judged(self.meter.on(answers_of(self._spec, half)))
            except EngineFailed as error:
                self._scores[key] = Score(False, math.inf, str(error))
            finally:
                half.close()
        return self._scores[key]

    def suspects(self) -> list[str]:
        """Every called module, the most suspicious first: where it raises or first is not finite, then by error."""
        inputs = self._trials[0][0]
        original, half = (self._observed(precision, inputs) for precision in ("fp32", self._dtype))
        errors = {path: _gap(outputs, half.get(path)) for path, outputs in original.items()}
        order = {path: position for position, path in enumerate(half)}
        return sorted(original, key=lambda path: (-errors[path], order.get(path, len(order))))

    def _observed(self, precision: str, inputs: Arrays) -> Outputs:
        engine = LiveEngine(self._live, precision, self._device)
        try:
            return observed(self._live.module, lambda: answers_of(self._spec, engine)(inputs))
        finally:
            engine.close()

    def _judged(self, half: Answers) -> Score:
        trials = [replace(trial, candidate=half(inputs)) for inputs, trial in self._trials]
        real, odd = [trial for trial in trials if not trial.name], [trial for trial in trials if trial.name]
        report = judge(self._spec, self._dtype, real, odd)
        wrong = any(verdict.failures for verdict in report.adversarial)
        return Score(report.passed, math.inf if wrong else report.max_error_u, report.summary())


def find_islands(
    rehearsal: LiveRehearsal, asked: Iterable[str], notify: Callable[[str], None]
) -> Found | None:
    """The fewest more islands that pass the rehearsal; None where not even all modules inside the root do.

    Modules without called modules inside are tried first, then also those around them: an overflow may be in the
    forward of a container.
    """
    asked = list(asked)
    suspects = [path for path in rehearsal.suspects() if path not in asked and not _within(path, asked)]
    heights = _heights(suspects)
    for most in range(max(heights.values(), default=-1) + 1):
        candidates = [path for path in suspects if heights[path] <= most]
        found = smallest_set(
            candidates,
            lambda more: rehearsal.score([*asked, *more]),
            budget=BUDGET,
            notify=notify,
            spent=rehearsal.meter.spent,
        )
        if found is not None:
            return found
    return None


def _asked(spec: ModelSpec, planning: Samples, original: Answers) -> Iterable[tuple[Arrays, Trial]]:
    rows = min(ROWS, spec.max_batch_size, max(planning.count, 1)) if spec.batched else 0
    # One row alone as well: PyTorch may have a half kernel for several rows only.
    alone = planning.batches(1, most=1) if rows > 1 else ()
    for samples, arrays in (*planning.batches(rows), *alone):
        yield arrays, Trial(samples, original(arrays), {})
    for name, arrays in adversarial(spec, planning):
        count = len(arrays[spec.inputs[0].name]) if spec.batched else 1
        try:
            reference = original(arrays)
        except EngineFailed:  # the operator's code refuses such an input
            continue
        yield arrays, Trial(tuple(range(count)), reference, {}, name=name)


def _heights(paths: Sequence[str]) -> dict[str, int]:
    """The number of levels of other called modules inside each module."""
    heights: dict[str, int] = {}
    for path in sorted(paths, key=len, reverse=True):
        below = [height for other, height in heights.items() if other.startswith(f"{path}.")]
        heights[path] = max(below, default=-1) + 1
    return heights


def _within(path: str, others: Iterable[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _gap(original: Sequence[Tensor], half: Sequence[Tensor] | None) -> float:
    """The largest relative error of a module's outputs; infinite where there are none or not as many."""
    if half is None or [t.shape for t in half] != [t.shape for t in original]:
        return math.inf
    worst = 0.0
    for expected, came in zip(original, half, strict=True):
        if not torch.equal(torch.isfinite(expected), torch.isfinite(came)):
            return math.inf
        one, other = (np.nan_to_num(t.cpu().numpy(), posinf=0, neginf=0) for t in (expected, came))
        worst = max(worst, float(np.abs(one - other).max(initial=0) / (np.abs(one).max(initial=0) or 1)))
    return worst
