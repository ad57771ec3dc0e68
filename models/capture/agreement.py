"""The captured program against the module that it was captured from, and rows in a batch against rows alone.

Runs in the child.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import failures

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

Request = Mapping[str, Any]

# Largest |program − module| in FP32, and largest |batch n − alone|, as a share of the output's largest value.
# Kernels may sum in another order at another batch size; anything above is another answer.
TOLERANCE = 1e-4
MOST_ROWS = 16  # in one check: more rows test nothing new of a program whose batch is a symbol


def rows_of(samples: Sequence["Tensor"], rows: int, request: Request, start: int = 0) -> list["Tensor"]:
    """``rows`` samples from ``start`` on, wrapping around; one sample without its axis where not batched."""
    import torch

    if request["max_batch_size"] == 0:
        return [tensor[start % len(tensor)] for tensor in samples]
    return [tensor[(torch.arange(rows) + start) % len(tensor)] for tensor in samples]


def check(
    torch: ModuleType, flat: Any, program: "ExportedProgram", samples: Sequence["Tensor"], request: Request
) -> dict[str, Any]:
    """Compare the program with the module at batch sizes 1, 2, 3 and max, and rows in a batch with the same rows
    alone."""
    run = program.module(check_guards=False)
    largest = request["max_batch_size"]
    notes, as_captured = [], min(3, max(1, largest))
    for rows in sorted({min(b, MOST_ROWS) for b in (1, 2, 3, largest) if 0 < b <= largest}) or [1]:
        inputs = rows_of(samples, rows, request)
        spare = None if rows == as_captured else notes
        theirs = answers(torch, flat, inputs, spare)  # first: its errors have the user's lines
        if theirs is None:
            continue
        refuse_nan(theirs, run, inputs, samples, request)
        for name, program_out, module_out in zip(request["outputs"], run(*inputs), theirs, strict=True):
            gap = distance(torch, program_out, module_out)
            if not gap <= TOLERANCE:
                raise failures.Refused(
                    f"the captured program does not answer as the module does: output '{name}' at batch size "
                    f"{rows} differs by {gap:.3g} of its largest value; {_why_otherwise(torch, program, request)}"
                )
    if largest > 1 and (gap := batch_gap(torch, run, samples, request)) > TOLERANCE:
        notes.append(
            f"answers in a batch differ from answers alone by {gap:.3g} of the largest value: max_batch_size was set "
            "to 1; where another axis than the first is the batch, set batch_axis, or max_batch_size = 0 where none is"
        )
        largest = 1
    return {"notes": notes, "max_batch_size": largest}


def _why_otherwise(torch: ModuleType, program: "ExportedProgram", request: Request) -> str:
    """The cause of another answer: a node that draws random numbers, with its line; a question where none does."""
    for module in program.graph_module.modules():
        graph: Any = getattr(module, "graph", None)
        for node in () if graph is None else graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                return (
                    f"random numbers are drawn by node '{node.name}'{failures.line_of_node(node, request)}: make what "
                    "is drawn an input, or draw nothing in evaluation"
                )
    return "does forward keep state from one call to the next?"


def answers(
    torch: ModuleType, flat: Any, inputs: Sequence["Tensor"], notes: list[str] | None
) -> Sequence["Tensor"] | None:
    """The module's own answers; None where torch would have to compile its control flow for them and cannot.

    Without ``notes`` (at the batch size of the capture) that is an error.
    """
    try:
        return flat.module(*inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        if notes is None:
            raise
        text = failures.first_lines(error)[:200]
        notes.append(f"the module itself cannot be run at batch size {inputs[0].shape[0]}: {text}")
        return None


def refuse_nan(
    outputs: Sequence["Tensor"],
    run: Any,
    inputs: Sequence["Tensor"],
    samples: Sequence["Tensor"],
    request: Request,
) -> None:
    """NaN in the module's own answers is its own fault: reported with sample, node and source line."""
    from . import nonfinite  # it imports torch

    for name, output in zip(request["outputs"], outputs, strict=True):
        if nonfinite.is_nan(output):
            rows = inputs[0].shape[0] if request["max_batch_size"] else 1
            bad = sorted({row % len(samples[0]) for row in nonfinite.nan_rows(output, rows)})
            found = nonfinite.origin(run, inputs)
            place = failures.line_of_node(found[0], request) if found else ""
            raise failures.Refused(
                nonfinite.sentence(name, bad, found, place, [spec["name"] for spec in request["inputs"]])
            )


def batch_gap(
    torch: ModuleType, run: Callable[..., Any], samples: Sequence["Tensor"], request: Request
) -> float:
    """The largest difference between a row's answer in a batch and alone, as a share of the output's largest value.
    Raises Refused for an output whose first axis is not the batch, or that grows with the batch on another axis too."""
    rows = min(request["max_batch_size"], 4)
    together = run(*rows_of(samples, rows, request))
    worst, shapes = 0.0, [[] for _ in together]
    for row in range(rows):
        alone = run(*rows_of(samples, 1, request, start=row))
        for one, many in zip(alone, together, strict=True):
            if many.ndim == 0 or many.shape[0] != rows or (one.ndim == many.ndim and one.shape[0] != 1):
                raise failures.Refused(
                    f"an output has shape {list(many.shape)} for a batch of {rows}: its first axis must be "
                    "the batch; set batch_axis in model.toml where the batch is another axis, or "
                    "max_batch_size = 0 for a model that is not batched"
                )
            worst = max(worst, distance(torch, many[row : row + 1], one, many))
        for known, one in zip(shapes, alone, strict=True):
            known.append(one.shape)
    for name, known, many in zip(request["outputs"], shapes, together, strict=True):
        if (axis := axis_of_rows(known, many.shape)) is not None:
            raise failures.Refused(paired_rows(name, known[0], many.shape, axis))
    return worst


def axis_of_rows(shapes: Sequence[Sequence[int]], joint: Sequence[int]) -> int | None:
    """The axis after the first whose size grows as the number of rows does, from each of ``shapes`` to ``joint``; None
    where no axis does. Such an output (x·xᵀ) has one number for each pair of rows, so its rows cannot be taken apart.

    ``shapes`` and ``joint``: shapes of one output for different numbers of rows; the first axis is the batch.
    """

    def grows(shape: Sequence[int], axis: int) -> bool:
        return shape[axis] != joint[axis] and shape[axis] * joint[0] == joint[axis] * shape[0]

    if any(len(shape) != len(joint) for shape in shapes):
        return None
    inner = range(1, len(joint))
    return next((axis for axis in inner if all(grows(shape, axis) for shape in shapes)), None)


def paired_rows(name: str, alone: Sequence[int], joint: Sequence[int], axis: int) -> str:
    """The error message for an output that grows with the batch along ``axis`` too (`axis_of_rows`)."""
    return (
        f"output '{name}' has shape {list(joint)} for a batch of {joint[0]} and {list(alone)} for one row: axis {axis} "
        "has a place for each row too, so rows cannot be batched; set max_batch_size = 0 in model.toml, for a model "
        "that is not batched, and give the whole input for each sample"
    )


def same_alone(
    torch: ModuleType,
    run: Callable[..., Any],
    original: Callable[..., Any],
    samples: Sequence["Tensor"],
    request: Request,
) -> None:
    """Raises Refused where one row is answered otherwise than by what the program was made from."""
    for row in range(min(4, len(samples[0]))):
        inputs = rows_of(samples, 1, request, start=row)
        for came, expected in zip(run(*inputs), original(*inputs), strict=True):
            if not (gap := distance(torch, came, expected)) <= TOLERANCE:
                raise failures.Refused(
                    f"a row alone would be answered otherwise by {gap:.3g} of the largest value"
                )


def distance(torch: ModuleType, one: "Tensor", other: "Tensor", scale_of: "Tensor | None" = None) -> float:
    """Largest difference as a share of the largest value; infinite where shapes, dtypes, NaNs or infinities differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    if not all(
        torch.equal(is_odd(one), is_odd(other)) for is_odd in (torch.isnan, torch.isposinf, torch.isneginf)
    ):
        return float("inf")
    one, other = (torch.nan_to_num(t.double(), 0.0, 0.0, 0.0) for t in (one, other))
    scale = torch.nan_to_num((other if scale_of is None else scale_of).double(), 0.0, 0.0, 0.0).abs()
    largest = float(scale.max()) if scale.numel() else 0.0
    gap = float((one - other).abs().max()) if one.numel() else 0.0
    return gap if largest == 0.0 else gap / largest
