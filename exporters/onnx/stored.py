"""A foreign version of the store, judged again: the part of this package that a server needs."""

from onnx import ModelProto, numpy_helper

from ...models.store import Version
from ..inputs.samples import Samples
from ..question import Answers, TieTolerance
from .precision.oracle import Oracle, to_half_and_back
from .precision.ties import ties_of
from .reading.bounded_file import read_model


def stored_ties(version: Version, dtype: str, judging: Samples) -> TieTolerance | None:
    """The integers that may differ because their scores tie, found in the version's stored ``whole.onnx``."""
    return ties_of(_stored(version, "whole.onnx"), version.spec(), dtype, judging)


def stored_oracle(version: Version) -> Answers:
    """A version's half file with true half storage."""
    return half_storage(_stored(version, "half.onnx"))


def half_storage(model: ModelProto) -> Answers:
    """A half graph with true half storage; its constants are taken out of ``model``."""
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    del model.graph.initializer[:]
    return Oracle(model, weights, to_half_and_back).run


def stored_whole(version: Version) -> Answers:
    """A version's FP32 file node by node: with its sums in another order than ONNX Runtime's."""
    model = _stored(version, "whole.onnx")
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    del model.graph.initializer[:]
    return Oracle(model, weights).run


def _stored(version: Version, name: str) -> ModelProto:
    if version.has(beside := f"{name}.data"):
        version.file(beside)
    with version.opened(name) as file:
        return read_model(file.again, version.folder)
