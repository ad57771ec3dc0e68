"""A run of an FP32 file that gives its inner values too, and what a shape operation of the file does to such values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from ..reading.graph import element_type
from ..reading.one_node import key_of, session
from ..runtime import session_of

Arrays = Mapping[str, np.ndarray]


@dataclass(slots=True)
class WatchedRun:
    """Runs ``model``, which has its constants, and gives the values called ``asked``, whatever makes them."""

    model: ModelProto
    asked: Sequence[str]
    _session: onnxruntime.InferenceSession | None = None

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        if self._session is None:
            self._session = self._loaded()
        held = (tensor for tensor in self.model.graph.initializer if tensor.name in self.asked)
        found = {tensor.name: numpy_helper.to_array(tensor) for tensor in held}
        names = [value.name for value in self._session.get_outputs()]
        feed = {value.name: np.asarray(inputs[value.name]) for value in self._session.get_inputs()}
        return found | feed | dict(zip(names, map(np.asarray, self._session.run(names, feed)), strict=True))

    def _loaded(self) -> onnxruntime.InferenceSession:
        graph, watched = self.model.graph, ModelProto()
        watched.CopyFrom(self.model)
        known = {value.name for value in (*graph.output, *graph.input, *graph.initializer)}
        inner = (name for name in dict.fromkeys(self.asked) if name not in known)
        watched.graph.output.extend(ValueInfoProto(name=name) for name in inner)
        return session_of(watched)

    def moved(self, node: NodeProto, part: np.ndarray, found: Arrays, slot: int = 0) -> np.ndarray:
        """Numbers that belong to the elements of a shape operation's input, in the places of its output ``slot``."""
        arrays = [part, *(found.get(name) for name in node.input[1:])]
        types = [TensorProto.UNDEFINED if each is None else element_type(each) for each in arrays]
        key = key_of(node, types, self.model.opset_import, self.model.ir_version)
        feed = {f"i{place}": each for place, each in enumerate(arrays) if each is not None}
        return np.asarray(session(key).run([f"o{slot}"], feed)[0])
