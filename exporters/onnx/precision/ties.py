"""Integer outputs of an ONNX graph that may differ because their scores tie (rule 2 of `gate/parity.py`).

An index that comes out of TopK, ArgMax or ArgMin, through shape and type ops alone, may be another one where the
original's own values at both indices are closer than 4u·S; the rule itself is that of `exporters/gate/ties.py`.
Outputs may also come from a step (`gate/steps.py`), or be computed from such an index.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from ....models.spec.spec import ModelSpec
from ...gate.steps import CHOOSES, Made, Rest, See, near_ties, steps_behind
from ...gate.ties import Choice, lines_along
from ...inputs.samples import Samples
from ...policy.classes import Trait, has
from ...question import TieTolerance
from ..reading.graph import ONNX, assembled, attribute, read_by
from ..reading.typing import value_types
from ..runtime import WatchedRun
from .oracle import Oracle

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
        which, _ = _CHOOSERS[tied.chooser.op_type]
        values, indices = found[tied.chooser.input[0]], found[tied.chooser.output[which]]
        rows, lines = lines_along(values, indices, _axis(tied.chooser))
        for node, slot in tied.path:
            if node.op_type != "Cast":
                indices, lines = (self._run.moved(node, part, found, slot) for part in (indices, lines))
        integral = values.dtype.kind != "f"
        return Choice(rows.astype(np.float64), lines.reshape(-1), indices.reshape(-1), integral)


def ties_of(
    model: ModelProto, weights: Arrays, spec: ModelSpec, dtype: str, judging: Samples
) -> TieTolerance | None:
    """The tie tolerance of an FP32 original, whose constants are ``weights``; None where no scores can tie."""
    tied = find_tied(model)
    names = [one.output for one in tied]
    steps = FileSteps(model, weights, set(names))
    compared = FileChoices(assembled(model, weights), tied) if tied else None
    return near_ties(names, compared, steps.outputs, steps.run, spec, dtype, judging)


_FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}


class FileSteps:
    """Finds the steps of a file, whose constants are ``weights``, and runs it (`gate.steps.Steps`). ``outputs``: the
    steps of each output that has some, but for those in ``tied``, which are judged by their scores."""

    def __init__(self, model: ModelProto, weights: Arrays, tied: Set[str]) -> None:
        self._model, self._weights = model, weights
        self._makers = {name: node for node in self._model.graph.node for name in node.output if name}
        self._types = value_types(self._model, self._weights)
        outputs = [value.name for value in self._model.graph.output if value.name not in tied]
        found = {name: steps_behind(name, self._made) for name in outputs}
        self.outputs = {name: steps for name, steps in found.items() if steps}
        self._steps = {step for steps in self.outputs.values() for step in steps}
        self._oracle: Oracle | None = None

    def _made(self, name: str) -> Made[str]:
        node, is_whole = self._makers.get(name), self._types.get(name) not in _FLOATS
        if node is None:
            return Made("", (), is_whole)
        inputs = (each for each in sorted(read_by(node)) if each not in self._weights)
        op = node.op_type if node.domain in ONNX else f"{node.domain}.{node.op_type}"
        if op in _CHOOSERS and name == node.output[_CHOOSERS[op][0]]:
            op = CHOOSES
        return Made(op, tuple(inputs), is_whole)

    def run(self, inputs: Arrays, see: See[str]) -> None:
        """Run the file; ``see`` is shown each step."""
        self._oracle = self._oracle or Oracle(self._model, self._weights)
        read = {name for step in self._steps for name in self._makers[step].input if name}
        known = {name: array for name, array in (*self._weights.items(), *inputs.items()) if name in read}

        def visit(name: str, value: np.ndarray, rest: Rest) -> None:
            if name in read:
                known[name] = value
            if name in self._steps:
                see(name, self._operands(self._makers[name], known), value, rest)

        self._oracle.run(inputs, visit)

    def _operands(self, step: NodeProto, known: Arrays) -> list[np.ndarray]:
        if step.op_type in _CHOOSERS:
            return [known[step.input[0]], np.array(_axis(step))]
        return [known[each] for each in step.input if each]


def _axis(chooser: NodeProto) -> int:
    axis = attribute(chooser, "axis", _CHOOSERS[chooser.op_type][1])
    assert isinstance(axis, int)
    return axis
