"""Sizes of free axes other than those of the samples: the program has to answer them as the module does.

A program keeps what forward decided in Python at the size of the samples (`if x.shape[1] % 2`, `int(1.5 * length)`).
torch.export guards such a decision; the program is served without its guards. Runs in the child.
"""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .agreement import TOLERANCE, Request, distance, rows_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

Place = tuple[int, int]  # the number of an input, and its axis
Sizes = list[list[Any]]  # as `child.dims` has them: a size, or [symbol, low, high]


def sizes_that_hold(
    torch: ModuleType,
    flat: Any,
    program: "ExportedProgram",
    samples: Sequence["Tensor"],
    request: Request,
    dims: Sizes,
) -> tuple[Sizes, list[str]]:
    """``dims`` with the size of the samples in the place of each symbol at whose other sizes the program does not
    answer as the module does, and a sentence on each."""
    run = program.module(check_guards=False)
    inputs = rows_of(samples, min(3, max(1, request["max_batch_size"])), request)
    batched, notes = request["max_batch_size"] > 0, list[str]()
    for (symbol, low, high), places in _free(dims, batched):
        (number, axis), *_ = places
        seen = inputs[number].shape[axis]
        others = [
            size
            for size in (seen + 1, seen + 2, seen - 1, seen // 2, 2 * seen)
            if size != seen and size >= low
        ]
        fits = (size for size in others if high is None or size <= high)
        wrong = next(
            (s for s in fits if _differs(torch, flat, run, _resized(torch, inputs, places, s))), None
        )
        if wrong is not None:
            name = request["inputs"][number]["name"]
            dims = [[seen if _is(size, symbol) else size for size in sizes] for sizes in dims]
            notes.append(
                f"input '{name}' must have size {seen} on axis {axis}: at size {wrong} the captured program does not "
                "answer as the module does, whose forward decides something by that size in Python"
            )
    return dims, notes


def _is(size: Any, symbol: str) -> bool:
    return not isinstance(size, int) and size[0] == symbol


def _free(dims: Sizes, batched: bool) -> Iterator[tuple[list[Any], list[Place]]]:
    """Each [symbol, low, high] once, but for the batch, with the places where it stands. A size that is computed from
    others (``2*s0``) is none."""
    found = dict[str, tuple[list[Any], list[Place]]]()
    for number, sizes in enumerate(dims):
        for axis, size in enumerate(sizes):
            if not isinstance(size, int) and size[0].isidentifier() and (axis or not batched):
                found.setdefault(size[0], (size, []))[1].append((number, axis))
    yield from found.values()


def _resized(
    torch: ModuleType, inputs: Sequence["Tensor"], places: Sequence[Place], size: int
) -> list["Tensor"]:
    """The inputs, cut or repeated to ``size`` in these places."""
    resized = list(inputs)
    for number, axis in places:
        tensor = resized[number]
        resized[number] = tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
    return resized


def _differs(torch: ModuleType, flat: Any, run: Callable[..., Any], inputs: Sequence["Tensor"]) -> bool:
    """True if the module answers these inputs, and the program does not answer them so. True as well for inputs that
    the guards of a foreign program refuse (`sources.program_module`): its answers are wrong there."""
    if _are_guarded_against(flat.module, inputs):
        return True
    try:
        theirs = flat.module(*inputs)
    except Exception:  # of whatever kind: an input of ours that is not taken shows nothing
        return False
    try:
        ours = run(*inputs)
    except Exception:
        return True
    return any(not distance(torch, *pair) <= TOLERANCE for pair in zip(ours, theirs, strict=True))


def _are_guarded_against(module: Any, inputs: Sequence["Tensor"]) -> bool:
    guarded = vars(module).get("guarded")
    if guarded is None:
        return False
    try:
        guarded(*inputs)
    except AssertionError as error:
        return "Guard failed" in str(error)
    except Exception:  # the guards come first: they passed
        return False
    return False
