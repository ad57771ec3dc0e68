"""ONNX files that were written before, run node by node: with true half storage, or in FP32.

A version is judged again with them, by the server too, and a half that was just written is judged for the first time.
"""

from pathlib import Path

import numpy as np
from onnx import ModelProto

from ...models.engines.cpu.setup import CpuSetup
from ...models.engines.onnx_engine import OnnxEngine
from ...models.spec.spec import ModelSpec
from ...models.store.store import Version
from ..inputs.samples import Samples
from ..proof.prove import ReferenceRun, Taken, answers_of, take
from ..proof.subject import CPU
from ..proof.threads import threads_now
from ..question import Answers, TieTolerance
from .bounded_answers import bounded_answers, is_unbounded
from .output_names import as_in_spec
from .own_layout import put_as_proven
from .precision.oracle import Oracle, to_half_and_back
from .precision.ties import ties_of
from .reading.bounded_file import external_files, read_graph, read_model
from .reading.large_files import DATA
from .reading.normalise import close_bodies, named_and_lifted


def stored_ties(version: Version, dtype: str, judging: Samples) -> TieTolerance | None:
    """The integers that may differ because their scores tie, found in the version's stored ``original.onnx``."""
    return ties_of(*_bare(_stored(version, "original.onnx")), version.spec(), dtype, judging)


def stored_oracle(version: Version) -> Answers:
    """A version's half file with true half storage."""
    return half_storage(_stored(version, "half.onnx"), version.spec())


def half_file_on_cpu(
    path: Path, spec: ModelSpec, dtype: str, run: ReferenceRun
) -> tuple[Answers, list[Taken]]:
    """ONNX Runtime's answers of a half file that was just written, and the trials that judge the file.

    ONNX Runtime computes FP16 chains in FP32 on a CPU, so the file is judged with true half storage too. It has more
    nodes than its program where the program's own are composite (attention), and rounds after each.
    """
    serves = answers_of(spec, OnnxEngine(path, dtype, CPU, CpuSetup(threads_now())))
    storage = half_storage(read_model(path, path.parent), spec)
    return serves, [take(run, storage), take(run, serves)]


def half_storage(model: ModelProto, spec: ModelSpec) -> Answers:
    """The answers of a half graph on a CPU, where every value that is half in the graph is rounded to half."""
    return as_in_spec(spec, Oracle(*_bare(model), to_half_and_back).run)


def stored_original(version: Version) -> Answers:
    """A version's FP32 file node by node: with its sums in another order than ONNX Runtime's."""
    return as_in_spec(version.spec(), Oracle(*_bare(_stored(version, "original.onnx"))).run)


def bounded_original(version: Version, samples: Samples) -> Answers | None:
    """A version's FP32 file as ONNX Runtime runs it on a CPU, bounded (`bounded_answers`); None for a file with nothing
    to bound."""
    model = _stored(version, "original.onnx")
    if not is_unbounded(model):
        return None
    return as_in_spec(version.spec(), bounded_answers(model, version.spec(), samples))


def _bare(model: ModelProto) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """The model and its constants by name. A file that was written from a program has some in its bodies."""
    close_bodies(model)
    return named_and_lifted(model)


def _stored(version: Version, name: str) -> ModelProto:
    model = _read(version, name)
    put_as_proven(model, version.spec(), version.folder / name)
    return model


def _read(version: Version, name: str) -> ModelProto:
    # The weights stand beside the file, perhaps.
    if any(file.endswith(DATA) for file in version.manifest["files"]):
        path = version.file(name)
        for place in external_files(path, read_graph(path)):
            version.file(place)
        return read_model(path, version.folder)
    with version.opened(name) as file:
        return read_model(file.again, version.folder)
