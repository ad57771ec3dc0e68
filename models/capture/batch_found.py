"""Finds the batch axis of a module's inputs and outputs: along it, a row alone gets the same answer as in a batch.

PyTorch's recurrent and transformer layers have time on the first axis unless ``batch_first`` is set, and their states
have layers there. Runs in the child.
"""

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from . import failures
from .agreement import TOLERANCE, distance

if TYPE_CHECKING:
    from torch import Tensor

Named = Mapping[str, "Tensor"]
Call = Callable[[Named], dict[str, "Tensor"]]
Axes = dict[str, dict[str, int]]

NOT_BATCHED = {
    "rows": "not batched, because output '{name}' has shape {shape} for 2 rows, with no place for each (a loss, or a "
    "parameter?): a module around it that leaves that out is batched",
    "steps": "not batched, because a row alone is answered otherwise than among others",
    "whole": "not batched, because the module takes the samples only all together",
}
MOVED = "the axis that has as many rows as the batch"
FIRST = {"inputs": {}, "outputs": {}}  # the batch is the first axis of every tensor


def find(torch: ModuleType, call: Call, given: Named) -> Axes | tuple[str, str]:
    """The batch axes ``{"inputs": name → axis, "outputs": name → axis}``, or a word and a sentence where the module has
    no batch.

    ``"rows"``: the module runs with any number of rows, but some output has no axis for them. ``"steps"``: the answer
    to a row depends on the other rows. ``"whole"``: the module runs with all rows of the samples together only.

    ``call``: inputs by name → outputs by name. ``given``: example inputs by name.
    """
    found = "whole", NOT_BATCHED["whole"]
    for lead in (0, 1):
        axes = input_axes(given, lead)
        if axes is None:
            continue
        try:
            outcome = _outcome(torch, call, given, axes)
        except failures.PLAIN:
            continue
        if isinstance(outcome, dict):
            return outcome
        if not any(axes.values()):
            found = outcome
    return found


def input_axes(given: Named, lead: int) -> dict[str, int] | None:
    """Name → the axis, 0 or 1, that is as long as axis ``lead`` of the first input; None where an input has none."""
    first, axes = next(iter(given.values())), {}
    for name, tensor in given.items():
        fitting = [
            a for a in (lead, 1 - lead) if tensor.shape[a : a + 1] == first.shape[lead : lead + 1] != ()
        ]
        if not fitting:
            return None
        axes[name] = fitting[0]
    return axes


def taken(
    torch: ModuleType, given: Named, axes: Mapping[str, int], rows: Iterable[int]
) -> dict[str, "Tensor"]:
    """The inputs with only the given rows; row numbers beyond the last row begin again at the first row."""
    chosen = {}
    for name, tensor in given.items():
        axis = axes.get(name, 0)
        chosen[name] = tensor.index_select(axis, torch.tensor(rows) % tensor.shape[axis])
    return chosen


def in_front(tensors: Named, axes: Mapping[str, int]) -> dict[str, "Tensor"]:
    """Tensors by name, with the batch on the first axis."""
    return {
        name: tensor.movedim(axes.get(name, 0), 0) if tensor.ndim else tensor
        for name, tensor in tensors.items()
    }


def called_in_front(call: Call, axes: Axes) -> Call:
    """A function like ``call`` whose inputs and outputs have the batch on the first axis."""

    def run(given: Named) -> dict[str, "Tensor"]:
        moved = {n: t.movedim(0, axes["inputs"].get(n, 0)) if t.ndim else t for n, t in given.items()}
        return in_front(call({name: tensor.contiguous() for name, tensor in moved.items()}), axes["outputs"])

    return run


def _outcome(torch: ModuleType, call: Call, given: Named, inputs: dict[str, int]) -> Axes | tuple[str, str]:
    two, three = (call(taken(torch, given, inputs, range(count))) for count in (2, 3))
    outputs = {}
    for name, one in two.items():
        sizes = zip(one.shape[:2], three[name].shape[:2], strict=False)
        fitting = [axis for axis, pair in enumerate(sizes) if pair == (2, 3)]
        if not fitting:
            return "rows", NOT_BATCHED["rows"].format(name=name, shape=list(one.shape))
        outputs[name] = fitting[0]
    axes = {"inputs": inputs, "outputs": outputs}
    gaps = [_gap(torch, call(taken(torch, given, inputs, range(2))), two, two)]
    # A row alone and the same row in a pair may differ by too little to see, by chance.
    pair = {name: tensor.narrow(outputs[name], 0, 2) for name, tensor in three.items()}
    gaps.append(_gap(torch, pair, two, two))
    for row in range(2):
        among = {name: tensor.narrow(outputs[name], row, 1) for name, tensor in two.items()}
        gaps.append(_gap(torch, call(taken(torch, given, inputs, [row])), among, two))
    is_random = gaps[0] > TOLERANCE  # which the capture refuses
    return axes if is_random or max(gaps) <= TOLERANCE else ("steps", NOT_BATCHED["steps"])


def _gap(torch: ModuleType, one: Named, other: Named, scales: Named) -> float:
    """The largest difference of any output, as `agreement.distance` measures it. An output whose shape differs is left
    out: `describing` finds outputs that grow with the batch along a second axis."""
    same = [name for name in one if one[name].shape == other[name].shape]
    return max((distance(torch, one[name], other[name], scales[name]) for name in same), default=0.0)
