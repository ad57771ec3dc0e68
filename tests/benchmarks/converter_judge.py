"""One judge for every converter: a half ONNX file against the FP32 file that it was made from.

    python -m tests.benchmarks.converter_judge   (the worker: a job a line, as `converter_peers.serve` has it)

ONNX Runtime's CPU answers, and so does the oracle with true half storage; both are held to our own gate.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from halfeven.exporters.gate.choosers import choices, find_tied
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF, judge
from halfeven.exporters.gate.ties import Ties
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.precision.oracle import Oracle
from halfeven.exporters.onnx.reading.graph import FLOAT, HALVES, graphs, walk
from halfeven.exporters.onnx.reading.normalise import close_bodies, in_order, named_and_lifted, unfold
from halfeven.exporters.onnx.reading.typing import value_types
from halfeven.models.program import runnable
from halfeven.models.spec.spec import ModelSpec
from onnx import ModelProto, NodeProto
from onnx.inliner import inline_local_functions

from tests.corpus import captured, fresh

# A file that errs by about as much as the gate allows is right in one draw and wrong in the next: it is asked often.
# Rows of many numbers are judged in fewer draws: node by node in half storage they would take most of the hours.
DRAWS, ROWS, BATCH, SEED = 8, 512, 8, 7919
FEWEST_DRAWS, NUMBERS = 2, DRAWS * ROWS * 64
GOOD, SILENT, WRONG, IO, LOAD, CONVERSION, MISSING = (
    "good", "silently wrong", "wrong", "io", "load", "conversion", "not installed",
)  # fmt: skip
NOT_COUNTED = {"Cast", "Constant", "Identity", "Shape", "Size", "If", "Loop", "Scan"}

Arrays = Mapping[str, np.ndarray]
Answers = Callable[[Arrays], dict[str, np.ndarray]]
Batch = tuple[tuple[int, ...], Arrays]
TieTolerance = Callable[[Arrays, Arrays, Arrays], Mapping[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Size:
    """The work of a file while it serves; a node that depends on constants alone is folded when the file is loaded.

    ``floats`` counts nodes that compute with floats, ``fp32`` those of them in FP32, ``casts`` all Casts.
    """

    floats: int = 0
    fp32: int = 0
    casts: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """``runtime`` and ``oracle`` are the gate's words on the first draw that it refuses, else on the worst; what ONNX
    Runtime answers wrongly is not asked in half storage too. ``checker`` is what onnx.checker objects to."""

    verdict: str
    reason: str = ""
    runtime: str = ""
    oracle: str = ""
    error_u: float | None = None
    checker: str = ""
    size: Size = Size()


@dataclass(frozen=True, slots=True)
class Questions:
    """Fresh inputs of one model with the FP32 file's answers. ``tie_tolerance`` marks integers whose scores tie."""

    spec: ModelSpec
    draws: Sequence[Sequence[Batch]]
    original: Answers
    tie_tolerance: TieTolerance = lambda inputs, reference, candidate: {}

    def judged(self, answers: Answers) -> ParityReport:
        """The first refusal, or of those that passed the one with the largest error."""
        worst: ParityReport | None = None
        for draw in self.draws:
            report = self._judged(draw, answers)
            if not report.passed:
                return report
            if worst is None or report.max_error_u > worst.max_error_u:
                worst = report
        assert worst is not None
        return worst

    def _judged(self, draw: Sequence[Batch], answers: Answers) -> ParityReport:
        trials = []
        for samples, inputs in draw:
            reference, candidate = self.original(inputs), answers(inputs)
            ties = self.tie_tolerance(inputs, reference, candidate)
            trials.append(Trial(samples, reference, candidate, ties))
        with np.errstate(all="ignore"):
            return judge(self.spec, "fp16", trials)


def judged(questions: Questions, path: Path, candidate: Path) -> Judgement:
    """The verdict on one converted file."""
    model, checker = onnx.load(candidate), _objection(candidate)
    try:
        session = session_of(candidate)
    except Exception as error:
        return Judgement(LOAD, _short(error), checker=checker)
    if changed := _changed_ends(session_of(path), session):
        return Judgement(IO, changed, checker=checker)
    try:
        runtime = questions.judged(answers_of(session))
    except Exception as error:
        return Judgement(LOAD, f"it does not run: {_short(error)}", checker=checker)
    model, weights = as_it_stands(model, candidate)
    oracle = questions.judged(Oracle(model, weights).run) if runtime.passed else None
    errors = [report.max_error_u for report in (runtime, oracle) if report]
    return Judgement(
        verdict=WRONG if oracle is None else GOOD if oracle.passed else SILENT,
        runtime=runtime.summary(),
        oracle=oracle.summary() if oracle else "",
        error_u=max(errors) if np.isfinite(errors).all() else None,
        checker=checker,
        size=size_of(model, weights),
    )


def session_of(path: Path) -> onnxruntime.InferenceSession:
    """A session with ONNX Runtime's own optimizations, but for the fusion of half transposes: after that fusion ONNX
    Runtime 1.31 segfaults on some valid files, which is the fault of no converter."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"], disabled_optimizers=["MatmulTransposeFusion"]
    )


def answers_of(session: onnxruntime.InferenceSession) -> Answers:
    names = [value.name for value in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))  # type: ignore[arg-type]


def _objection(path: Path) -> str:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        return _short(error)
    return ""


def _changed_ends(one: onnxruntime.InferenceSession, other: onnxruntime.InferenceSession) -> str:
    """Names and datatypes of inputs and outputs are the caller's: nobody may change them."""
    for what in ("get_inputs", "get_outputs"):
        was, came = ({value.name: value.type for value in getattr(each, what)()} for each in (one, other))
        if was != came:
            return f"{what.removeprefix('get_')} were {was}, are {came}"
    return ""


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# The file as the oracle reads it: constants apart, every name once, half where the file has half.


def as_it_stands(model: ModelProto, path: Path) -> tuple[ModelProto, dict[str, np.ndarray]]:
    if model.functions:
        model = inline_local_functions(model)
    model = in_order(model, path)
    unfold(model)
    for graph in graphs(model.graph):
        del graph.value_info[:]
    close_bodies(model)
    return named_and_lifted(model)


def size_of(model: ModelProto, weights: Arrays) -> Size:
    types, constant = value_types(model, weights), set(weights)
    floats = fp32 = casts = 0
    for node in walk(model.graph):
        if not _serves(node, constant):
            continue
        casts += node.op_type == "Cast"
        used = _datatypes(node, types, weights)
        floats += bool(used)
        fp32 += FLOAT in used
    return Size(floats, fp32, casts)


def _serves(node: NodeProto, constant: set[str]) -> bool:
    """True if a node works while the file serves; the results of a node that reads constants alone become constants."""
    if all(name in constant or not name for name in node.input) and node.op_type not in ("If", "Loop"):
        constant |= set(node.output)
        return False
    return True


def _datatypes(node: NodeProto, types: Mapping[str, int], weights: Arrays) -> set[int]:
    """The datatypes in which a node computes: those of its float results, else of the floats that it compares."""
    if node.op_type in NOT_COUNTED:
        return set()
    wanted = {FLOAT, *HALVES.values()}
    results = {types.get(name, 0) for name in node.output} & wanted
    return results or {types.get(name, 0) for name in node.input if name not in weights} & wanted


# The worker.


@cache
def questions_of(name: str, path: str) -> Questions:
    original = captured(name)
    rows = min(BATCH, original.spec.max_batch_size) if original.spec.batched else 0
    numbers = sum(array[0].size for array in _drawn(name, SEED).arrays.values())
    count = min(DRAWS, max(FEWEST_DRAWS, NUMBERS // (ROWS * numbers)))
    draws = [list(_drawn(name, SEED + draw).batches(rows)) for draw in range(count)]

    def inputs() -> Iterable[Arrays]:
        return (arrays for draw in draws for _, arrays in draw)

    module = runnable(original.program)
    names = [tensor.name for tensor in original.spec.inputs]
    tied = find_tied(module, [tensor.name for tensor in original.spec.outputs])
    ties = Ties(
        [one.output for one in tied],
        lambda asked: choices(module, tied, [asked[name] for name in names]),
        UNIT_ROUNDOFF["fp16"],
        inputs,
    )
    kept = dict[int, dict[str, np.ndarray]]()  # asked again for each converter
    session = answers_of(session_of(Path(path)))

    def fp32(inputs: Arrays) -> dict[str, np.ndarray]:
        if id(inputs) not in kept:
            kept[id(inputs)] = session(inputs)
        return kept[id(inputs)]

    return Questions(original.spec, draws, fp32, ties.tolerated)


def _drawn(name: str, seed: int) -> Samples:
    return Samples({key: tensor.numpy() for key, tensor in fresh(name, ROWS, seed).items()})


def main() -> None:
    print(json.dumps({"version": f"onnxruntime {onnxruntime.__version__}"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            questions = questions_of(job["name"], job["source"])
            answer = asdict(judged(questions, Path(job["source"]), Path(job["target"])))
        except Exception as error:
            answer = {"error": _short(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
