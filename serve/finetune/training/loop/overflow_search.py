"""Finds where the numbers of one pass left half's range: layer, operation, rows. Needs torch and numpy.

The pass is run again as it was (inputs, random numbers, autocast, emulated products), by a copy of the module, and
each operation is looked at, forward and backward, in the order in which they run. The first whose result is not finite
although what it was given is, is named.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .seeding import generators_untouched, set_torch_generators

MOST_ROWS = 16  # rows that are named
_MOST_TRIES = 32  # backward passes that look for them
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Rerun:
    """The terms of a second run of a pass: the contexts of its two directions, and the copy of the module that is run.
    It is a copy because a module may keep more of a pass than its buffers."""

    forward: Context
    backward: Context = contextlib.nullcontext
    copied: Callable[[nn.Module], nn.Module] = copy.deepcopy


@dataclass(frozen=True, slots=True)
class Overflow:
    """``layer``: a module's name; `the model` for its own lines, `the loss` for what comes behind it. ``rows``: of the
    batch, none where no single row is to blame. ``direction``: forward or backward. ``net``: of several, those whose
    optimizer's step was skipped; ``layer`` begins with the name of its net then."""

    step: int
    scale: float
    layer: str
    operation: str
    direction: str
    rows: tuple[int, ...]
    net: str = ""

    def __str__(self) -> str:
        whose = f"the step of {self.net} was skipped: " if self.net else ""
        what = "the values" if self.direction == "forward" else "the gradients"
        rows = (
            f" in row{'s' if len(self.rows) > 1 else ''} {', '.join(map(str, self.rows))}"
            if self.rows
            else ""
        )
        return f"{whose}{what} of {self.layer} left the range of half first, in {self.operation}{rows}"


@dataclass(eq=False)
class Pass:
    """One forward pass, as it was. ``gradients``: of its results, by their place among the tensors of the output.
    ``net``: the name of its module, of several."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    generators: Mapping[str, Tensor]  # of torch (`seeding.torch_generators`)
    rerun: Rerun
    gradients: dict[int, Tensor] = field(default_factory=dict)
    net: str = ""

    @property
    def rows(self) -> int:
        tensors = [
            one
            for one in tree_leaves((self.args, dict(self.kwargs)))
            if isinstance(one, Tensor) and one.dim()
        ]
        return len(tensors[0]) if tensors else 0


@dataclass(frozen=True, slots=True)
class Found:
    """``entered``: what came back from behind the module was not finite already."""

    layer: str
    operation: str
    direction: str
    rows: tuple[int, ...]
    entered: bool = False


def search(module: nn.Module, one: Pass) -> Found | None:
    """The first operation of the pass whose result is not finite; None where all are."""
    module = one.rerun.copied(module)
    args, kwargs = tree_map(_cut, (one.args, dict(one.kwargs)))
    with _as_it_was(one), _Operations(module, one.rows) as operations:
        with one.rerun.forward():
            output = module(*args, **kwargs)
        results = tensors_of(output)
        if operations.found is not None and not (operations.filled and all_finite(results)):
            return operations.found
        given = [
            (results[place], gradient) for place, gradient in one.gradients.items() if place < len(results)
        ]
        for _, gradient in given:
            if not all_finite((gradient,)):
                return Found(
                    "the loss", "its gradient", "backward", rows_of(gradient, one.rows), entered=True
                )
        with one.rerun.backward():
            return operations.backward(given, tensors_of((args, kwargs))) or operations.found


def _cut(one: Any) -> Any:
    """An input with a gradient, which goes no further back than this module."""
    return one.detach().requires_grad_() if isinstance(one, Tensor) and one.requires_grad else one


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of a module's answer, or of what it was given, that have a gradient."""
    leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)  # it is called in every step
    return [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]


def rows_of(tensor: Tensor, rows: int) -> tuple[int, ...]:
    """The rows of the batch in which values are not finite; none where the first axis is not that of the batch."""
    if not rows or not tensor.dim() or len(tensor) % rows:
        return ()
    bad = ~torch.isfinite(tensor).reshape(rows, -1).all(dim=1)
    return tuple(bad.nonzero().flatten()[:MOST_ROWS].tolist())


@contextlib.contextmanager
def _as_it_was(one: Pass) -> Iterator[None]:
    """The random numbers of the pass, and afterwards all generators as they were before."""
    with generators_untouched(), torch.enable_grad():
        set_torch_generators(one.generators)
        yield


class _Operations(TorchFunctionMode):
    """Inside, each operation is looked at, and known by the layer that ran it."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        super().__init__()
        self._module, self._rows = module, rows
        self._layers: list[str] = []
        self._origins: dict[Any, tuple[str, str]] = {}  # a node of the graph → layer, operation
        self.found: Found | None = None
        self.filled = False  # with an infinity that the module's own code names: a mask

    def __enter__(self) -> "_Operations":
        super().__enter__()
        self._handles = []
        for name, layer in self._module.named_modules():
            self._handles.append(layer.register_forward_pre_hook(self._enter(name)))
            self._handles.append(layer.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._layers.append(name or "the model")

    def _leave(self, *_: Any) -> None:
        self._layers.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._layers:
            with torch._C.DisableTorchFunction():
                self._look(getattr(func, "__name__", str(func)), args, kwargs or {}, result)
        return result

    def _look(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        results = [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.is_floating_point()]
        for one in results:
            self._name_nodes(one.grad_fn, (self._layers[-1], name))
            if self.found is None and not all_finite((one,)):
                given = [each for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor)]
                if all_finite([each for each in given if each.is_floating_point()]):
                    self.found = Found(self._layers[-1], name, "forward", rows_of(one, self._rows))
                    self.filled = any(each in (float("inf"), -float("inf")) for each in tree_leaves(args)
                                      if isinstance(each, float))  # fmt: skip

    def _name_nodes(self, node: Any, origin: tuple[str, str]) -> None:
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one is not None and one not in self._origins:
                self._origins[one] = origin
                waiting += [before for before, _ in one.next_functions]

    def backward(self, given: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor] = ()) -> Found | None:
        """Asks each node behind its run. The gradients go nowhere: those of the weights stay as they are. ``inputs``:
        those that have a gradient too."""
        weights = [*(one for one in self._module.parameters() if one.requires_grad), *inputs]
        if not given or not weights:
            return None
        first: list[tuple[Any, Tensor | None, tuple[Tensor | None, ...]]] = []

        def hook_of(node: Any) -> Callable[..., None]:
            def look(made: tuple[Tensor | None, ...], taken: tuple[Tensor | None, ...]) -> None:
                if not first and all_finite(taken):
                    bad = next((one for one in made if one is not None and not all_finite((one,))), None)
                    if bad is not None:
                        first.append((node, bad, taken))

            return look

        handles = [node.register_hook(hook_of(node)) for node in self._origins]
        self._run(given, weights)
        for handle in handles:
            handle.remove()
        if not first:
            return None
        node, bad, _ = first[0]
        layer, operation = self._origins[node]
        rows = rows_of(bad, self._rows) if bad is not None and not self._is_of_weight(bad) else ()
        rows = rows or self._alone(given, weights)
        return Found(layer, f"{operation} ({node.name()})", "backward", rows)

    def _is_of_weight(self, gradient: Tensor) -> bool:
        """True if ``gradient`` is that of a weight, whose first axis is not that of the batch."""
        shapes = {tuple(one.shape) for one in self._module.parameters()}
        return tuple(gradient.shape) in shapes or tuple(reversed(gradient.shape)) in shapes

    @staticmethod
    def _run(given: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        results, gradients = [one for one, _ in given], [one for _, one in given]
        return torch.autograd.grad(results, weights, gradients, retain_graph=True, allow_unused=True)

    def _alone(self, given: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Tensor]) -> tuple[int, ...]:
        """Rows whose gradient alone is too large; none where only their sum is. Halves of rows are tried, and of each
        half that is too large its own halves: a pass for each row would cost more than many steps."""
        rows = self._rows
        if not rows or any(not gradient.dim() or len(gradient) % rows for _, gradient in given):
            return ()
        bad, left, tried = list[int](), [range(rows)], 0
        while left and len(bad) < MOST_ROWS and tried < _MOST_TRIES:
            some = left.pop()
            if len(some) == 1:
                bad.append(some[0])
                continue
            middle, tried = len(some) // 2, tried + 2
            for half in (some[middle:], some[:middle]):
                only = [(result, _only(gradient, half, rows)) for result, gradient in given]
                if not all_finite(self._run(only, weights)):
                    left.append(half)
        return tuple(bad)


def _only(gradient: Tensor, some: range, rows: int) -> Tensor:
    kept, size = torch.zeros_like(gradient), len(gradient) // rows
    of_them = slice(some.start * size, some.stop * size)
    kept[of_them] = gradient[of_them]
    return kept


def all_finite(tensors: Sequence[Tensor | None]) -> bool:
    return all(bool(torch.isfinite(one).all()) for one in tensors if one is not None)
