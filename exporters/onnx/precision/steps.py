"""Integer and boolean outputs of an ONNX graph that come from a step (`gate/steps.py`): Round, Floor, Ceil, a Cast to
integers, or a comparison, through shape and type ops and limits (Clip) alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from ...gate.divergence import SENTINEL
from ...gate.steps import Step, distance_of, largest_of
from ...policy.classes import Trait, has
from ..reading.graph import ONNX, attribute, element_type
from ..reading.one_node import key_of, session
from ..runtime import session_of

Arrays = Mapping[str, np.ndarray]
_COMPARES = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
_ROUNDS = {"Round": "round", "Floor": "floor", "Ceil": "floor"}
_WHOLE = {getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}
_KEEPS_PLACES = ("Cast", "Clip", "Not", "Identity")


@dataclass(frozen=True, slots=True)
class Stepped:
    """An output whose integers or booleans come from ``node``, a step of this ``kind``; ``path``: the nodes from it."""

    output: str
    node: NodeProto
    kind: str
    path: tuple[NodeProto, ...]

    @property
    def compared(self) -> list[str]:
        return list(self.node.input[: 2 if self.kind == "compare" else 1])

    @property
    def asked(self) -> list[str]:
        """The record of a run: what is compared, and the shapes on the way to the output."""
        return [*self.compared, *(name for node in self.path for name in node.input[1:] if name)]


def find_stepped(model: ModelProto) -> list[Stepped]:
    """The integer and boolean outputs that come from a step in the main graph."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    whole = {*_WHOLE, TensorProto.BOOL}
    outputs = [value.name for value in model.graph.output if value.type.tensor_type.elem_type in whole]
    return [found for name in outputs if (found := _traced(name, made_by)) is not None]


def _traced(output: str, made_by: Mapping[str, NodeProto]) -> Stepped | None:
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
    return Stepped(
        output, path[cast], "floor", tuple(reversed(path[:cast]))
    )  # it cuts off what is behind the point


@dataclass(slots=True)
class FileSteps:
    """Runs the FP32 model and gives, for each output that comes from a step, how far its values are from it: the
    ``steps`` of `gate.steps.Steps`. ``model`` has its constants."""

    model: ModelProto
    stepped: Sequence[Stepped]
    _session: onnxruntime.InferenceSession | None = None

    def __call__(self, inputs: Arrays) -> dict[str, Step]:
        asked = list(dict.fromkeys(name for each in self.stepped for name in each.asked))
        self._session = self._session or self._watching(asked)
        found = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in self.model.graph.initializer
            if tensor.name in asked
        }
        names = [value.name for value in self._session.get_outputs()]
        feed = {value.name: np.asarray(inputs[value.name]) for value in self._session.get_inputs()}
        found |= feed | dict(zip(names, map(np.asarray, self._session.run(names, feed)), strict=True))
        return {each.output: self._step(each, found) for each in self.stepped}

    def _watching(self, asked: Sequence[str]) -> onnxruntime.InferenceSession:
        graph, watched = self.model.graph, ModelProto()
        watched.CopyFrom(self.model)
        known = {value.name for value in (*graph.output, *graph.input, *graph.initializer)}
        watched.graph.output.extend(ValueInfoProto(name=name) for name in asked if name not in known)
        return session_of(watched)

    def _step(self, stepped: Stepped, found: Arrays) -> Step:
        values = [found[name] for name in stepped.compared]
        if values[0].dtype.kind != "f":  # whole numbers do not come near a step
            return Step(np.full(0, np.inf), 0.0)
        distances = np.asarray(distance_of(stepped.kind, values))
        for node in stepped.path:
            distances = distances if node.op_type in _KEEPS_PLACES else self._moved(node, distances, found)
        return Step(distances, largest_of(values, SENTINEL))

    def _moved(self, node: NodeProto, part: np.ndarray, found: Arrays) -> np.ndarray:
        """The distances after a shape op."""
        arrays = [part.astype(np.float32), *(found.get(name) for name in node.input[1:])]
        types = [TensorProto.UNDEFINED if each is None else element_type(each) for each in arrays]
        key = key_of(node, types, self.model.opset_import, self.model.ir_version)
        feed = {f"i{place}": each for place, each in enumerate(arrays) if each is not None}
        return np.asarray(session(key).run(["o0"], feed)[0])
