"""Integer and boolean outputs of an ONNX graph that come from a step (`gate/steps.py`): Round, Floor, Ceil, a Cast to
integers, or a comparison, through shape and type ops and limits (Clip) alone."""

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from ...gate.steps import VALUES, Step, Stepped, step_of
from ...policy.classes import Trait, has
from ..reading.graph import ONNX, attribute
from .watched_run import WatchedRun

Arrays = Mapping[str, np.ndarray]
_COMPARES = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
_ROUNDS = {"Round": "round", "Floor": "floor", "Ceil": "floor"}
_WHOLE = {getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}
_KEEPS_PLACES = ("Cast", "Clip", "Not", "Identity")


def find_stepped(model: ModelProto) -> list[Stepped[NodeProto]]:
    """The integer and boolean outputs that come from a step in the main graph."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    whole = {*_WHOLE, TensorProto.BOOL}
    outputs = [value.name for value in model.graph.output if value.type.tensor_type.elem_type in whole]
    return [found for name in outputs if (found := _traced(name, made_by)) is not None]


def _traced(output: str, made_by: Mapping[str, NodeProto]) -> Stepped[NodeProto] | None:
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
