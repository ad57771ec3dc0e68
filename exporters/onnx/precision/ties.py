"""Integer outputs of an ONNX graph that may differ because their scores tie (design, §4, rule 2).

An index that comes out of TopK, ArgMax or ArgMin, through shape and type ops alone, may be another one where the
original's own values at both indices are closer than 4u·S; the rule itself is that of `exporters/gate/ties.py`.
Outputs may also come from a step (`gate/steps.py`): Round, Floor, Ceil, a Cast to integers, or a comparison, through
shape and type ops and limits (Clip) alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from ....models.spec import ModelSpec
from ...gate.choosers import Choice
from ...gate.parity import UNIT_ROUNDOFF
from ...gate.steps import VALUES, Step, Stepped, Steps, near_ties, step_of
from ...gate.ties import Ties
from ...inputs.samples import Samples
from ...policy.classes import Trait, has
from ...prove import SEEN_AT_ONCE
from ...question import TieTolerance
from ..reading.graph import ONNX, attribute
from .watched_run import WatchedRun

Arrays = Mapping[str, np.ndarray]

_CHOOSERS = {"TopK": (1, -1), "ArgMax": (0, 0), "ArgMin": (0, 0)}  # op → which result has indices, its axis
_INTEGERS = {getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True, slots=True)
class Tied:
    """An output whose integers are the indices that ``chooser`` gave.

    ``path``: the nodes from it to the output, each with the number of the result that is read next.
    """

    output: str
    chooser: NodeProto
    path: tuple[tuple[NodeProto, int], ...]

    @property
    def asked(self) -> list[str]:
        """The record of a run: the values compared, the choices made, and the shapes on the way to the output."""
        which, _ = _CHOOSERS[self.chooser.op_type]
        others = [name for node, _ in self.path for name in node.input[1:] if name]
        return [self.chooser.input[0], self.chooser.output[which], *others]


def find_tied(model: ModelProto) -> list[Tied]:
    """The integer outputs that come from a node of the main graph which chooses by comparing."""
    made_by = {name: (node, slot) for node in model.graph.node for slot, name in enumerate(node.output)}
    found = (_traced(value.name, made_by) for value in model.graph.output)
    return [tied for tied in found if tied is not None]


def _traced(output: str, made_by: Mapping[str, tuple[NodeProto, int]]) -> Tied | None:
    path: list[tuple[NodeProto, int]] = []
    name = output
    while name in made_by and made_by[name][0].domain in ONNX:
        node, slot = made_by[name]
        if node.op_type in _CHOOSERS:
            return Tied(output, node, tuple(reversed(path))) if slot == _CHOOSERS[node.op_type][0] else None
        if not has(node.op_type, Trait.COPIES) and not (
            node.op_type == "Cast" and attribute(node, "to") in _INTEGERS
        ):
            return None
        path.append((node, slot))
        name = node.input[0]
    return None


class FileChoices:
    """Runs the FP32 model and gives, for each output whose integers a comparison chose, the values that it compared:
    the ``choices`` of `gate.ties.Ties`. ``model`` has its constants."""

    def __init__(self, model: ModelProto, tied: Sequence[Tied]) -> None:
        self._tied = tied
        self._run = WatchedRun(model, [name for each in tied for name in each.asked])

    def __call__(self, inputs: Arrays) -> dict[str, Choice]:
        found = self._run(inputs)
        return {tied.output: self._choice(tied, found) for tied in self._tied}

    def _choice(self, tied: Tied, found: Arrays) -> Choice:
        which, axis = _CHOOSERS[tied.chooser.op_type]
        said = attribute(tied.chooser, "axis", axis)
        assert isinstance(said, int)
        values, indices = found[tied.chooser.input[0]], found[tied.chooser.output[which]]
        rows, lines = _lines_along(values, indices, said)
        for node, slot in tied.path:
            if node.op_type != "Cast":
                indices, lines = (self._run.moved(node, part, found, slot) for part in (indices, lines))
        integral = values.dtype.kind != "f"
        return Choice(rows.astype(np.float64), lines.reshape(-1), indices.reshape(-1), integral)


def _lines_along(values: np.ndarray, indices: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The values as [lines, choices], and for every index the line that it points into."""
    values = values if values.ndim else values.reshape(1)
    moved = np.moveaxis(values, axis, -1)
    numbers = np.arange(moved[..., 0].size, dtype=np.int64).reshape(moved.shape[:-1])
    if indices.ndim == values.ndim:
        numbers = np.expand_dims(numbers, axis)
    rows = moved.reshape(-1, moved.shape[-1])
    return rows, np.ascontiguousarray(np.broadcast_to(numbers, indices.shape))


def ties_of(model: ModelProto, spec: ModelSpec, dtype: str, judging: Samples) -> TieTolerance | None:
    """The tie tolerance of an FP32 original; None where no scores can tie."""
    rows, u = min(spec.max_batch_size, SEEN_AT_ONCE) if spec.batched else 0, UNIT_ROUNDOFF[dtype]

    def asked() -> Iterator[Arrays]:
        return (arrays for _, arrays in judging.batches(rows))

    tied, stepped = find_tied(model), find_stepped(model)
    return near_ties(
        Ties([one.output for one in tied], FileChoices(model, tied), u, asked) if tied else None,
        Steps([one.output for one in stepped], FileSteps(model, stepped), u, asked) if stepped else None,
    )


def may_tie(model: ModelProto) -> bool:
    """Whether a near tie can change this output of the model: an operation that compares scores (argmax, topk) chooses
    it, or it comes from an operation with a step (rounding, a threshold)."""
    return bool(find_tied(model) or find_stepped(model))


_COMPARES = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
_ROUNDS = {"Round": "round", "Floor": "floor", "Ceil": "floor"}
_WHOLE = {getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}
_KEEPS_PLACES = ("Cast", "Clip", "Not", "Identity")


def find_stepped(model: ModelProto) -> list[Stepped[NodeProto]]:
    """The integer and boolean outputs that come from a step in the main graph."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    whole = {*_WHOLE, TensorProto.BOOL}
    outputs = [value.name for value in model.graph.output if value.type.tensor_type.elem_type in whole]
    return [found for name in outputs if (found := _traced_step(name, made_by)) is not None]


def _traced_step(output: str, made_by: Mapping[str, NodeProto]) -> Stepped[NodeProto] | None:
    path, name, cast = list[NodeProto](), output, -1
    while (node := made_by.get(name)) is not None and node.domain in ONNX and node.output[0] == name:
        if node.op_type in _COMPARES or node.op_type in _ROUNDS:
            return Stepped(output, node, _ROUNDS.get(node.op_type, "compare"), tuple(reversed(path)))
        if node.op_type == "Cast" and attribute(node, "to") in _WHOLE:
            cast = len(path)
        elif not (has(node.op_type, Trait.COPIES) or node.op_type in _KEEPS_PLACES):
            break
        path.append(node)
        name = node.input[0]
    if cast < 0:
        return None
    # A cast to integers cuts off what is behind the point.
    return Stepped(output, path[cast], "floor", tuple(reversed(path[:cast])))


class FileSteps:
    """Runs the FP32 model and gives, for each output that comes from a step, how far its values are from it: the
    ``steps`` of `gate.steps.Steps`. ``model`` has its constants."""

    def __init__(self, model: ModelProto, stepped: Sequence[Stepped[NodeProto]]) -> None:
        self._stepped = stepped
        # The shapes on the way to the output are asked as well as what is compared.
        sizes = [name for each in stepped for node in each.path for name in node.input[1:] if name]
        self._run = WatchedRun(model, [*(name for each in stepped for name in _compared(each)), *sizes])

    def __call__(self, inputs: Arrays) -> dict[str, Step]:
        found = self._run(inputs)
        return {each.output: self._step(each, found) for each in self._stepped}

    def _step(self, stepped: Stepped[NodeProto], found: Arrays) -> Step:
        step = step_of(stepped.kind, [found[name] for name in _compared(stepped)])
        distances = step.distances
        for node in stepped.path if distances.size else ():
            if node.op_type not in _KEEPS_PLACES:
                distances = self._run.moved(node, distances.astype(np.float32), found)
        return Step(distances, step.largest)


def _compared(stepped: Stepped[NodeProto]) -> list[str]:
    return list(stepped.node.input[: VALUES[stepped.kind]])
