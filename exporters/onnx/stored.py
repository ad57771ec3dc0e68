"""A foreign version of the store, judged again: the part of this package that a server needs."""

import numpy as np
from onnx import ModelProto

from ...models.store import Version
from ..inputs.samples import Samples
from ..question import Answers, TieTolerance
from .precision.oracle import Oracle, to_half_and_back
from .precision.ties import ties_of
from .reading.bounded_file import read_model
from .reading.normalise import close_bodies, named_and_lifted


def stored_ties(version: Version, dtype: str, judging: Samples) -> TieTolerance | None:
    """The integers that may differ because their scores tie, found in the version's stored ``whole.onnx``."""
    return ties_of(_stored(version, "whole.onnx"), version.spec(), dtype, judging)


def stored_oracle(version: Version) -> Answers:
    """A version's half file with true half storage."""
    return half_storage(_stored(version, "half.onnx"))


def half_storage(model: ModelProto) -> Answers:
    """A half graph with true half storage."""
    return Oracle(*_bare(model), to_half_and_back).run


def stored_whole(version: Version) -> Answers:
    """A version's FP32 file node by node: with its sums in another order than ONNX Runtime's."""
    return Oracle(*_bare(_stored(version, "whole.onnx"))).run


def _bare(model: ModelProto) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """The model and its constants by name. A file that was written from a program has some in its bodies."""
    close_bodies(model)
    return named_and_lifted(model)


def _stored(version: Version, name: str) -> ModelProto:
    if version.has(beside := f"{name}.data"):
        version.file(beside)
    with version.opened(name) as file:
        return read_model(file.again, version.folder)
