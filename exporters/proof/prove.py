"""Run the original and the half on the same inputs and let the gate judge.

On a CPU most samples may be judged by half-rounding emulation where true half kernels would take too long; the small
batch sizes are answered by true kernels always. ONNX Runtime's CPU provider computes FP16 chains in FP32, so there an
ONNX half is judged by the same program's half storage as well.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...models.engines.engine import Engine
from ...models.errors import EngineFailed, ExportFailed, HalfevenError
from ...models.spec.buckets import buckets_of
from ...models.spec.spec import ModelSpec
from ..gate.noise import ROOM, Noise
from ..gate.parity import judge, noise_of
from ..gate.rejudge import judge_apart
from ..gate.trial import Trial
from ..gate.verdict import ParityReport
from ..inputs.perturbed import changeable, perturbed_rows
from ..inputs.samples import Samples
from ..inputs.synthetic import adversarial
from ..question import (
    REFUSALS,
    Answers,
    Arrays,
    Invented,
    Question,
    RowsDiffer,
    TieTolerance,
    answers_or_refusal,
    first_rows,
    is_refused,
)
from .neutral_lengths import JoinedLengths, filling, joined_lengths

SMALL_BATCHES = 4  # of each size below the largest; one each for a model that would need more operations
SMALL_OPERATIONS = 1 << 35  # than this for them all
SMALL_BYTES = 1 << 30  # of their inputs and answers, in the same way
MAX_JUDGED = 2048  # of a conversion's own samples; of others all judge
# Above this the bulk is judged by emulation. Where a CPU has no half convolutions an operation of theirs takes ten
# times as long as in FP32 (0.7 ns against 0.07 on one core): 12 seconds.
TRUE_KERNELS_OPERATIONS = 1 << 34
# The share of the output's largest value, half of u: kernels sum in another order, round sines otherwise.
SAME_IN_FP32 = 2.5e-4


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """The questions of one proof with the original's answers; every form is then asked the same questions.

    ``tie_tolerance``: which integers may differ because their scores tie. ``row_operations``: an estimate for one row
    (`policy/operations.py`; 0: unknown). ``is_slow``: that is so many, or the answers are so large, that every sample
    is asked as seldom as the gate allows. ``noise``: what the original answers otherwise when it is evaluated another
    way, by output. ``perturbed``: inputs made of few judging samples, judged apart. ``invented``: of these how many
    were made, and how many the original refused. ``joined``: rows of other lengths, judged apart once they are filled
    up. ``otherwise``: the original evaluated another way. An input of ours that it refuses as well is left out where a
    half refuses it: ONNX Runtime reads ``Gather`` at a ``Range`` as a slice, which takes indices beyond the table.
    """

    spec: ModelSpec
    small: list[Question]
    bulk: list[Question]
    adversarial: list[Question]
    targets: Mapping[str, np.ndarray]
    is_slow: bool = False
    tie_tolerance: TieTolerance | None = None
    row_operations: int = 0
    noise: Mapping[str, Noise] = field(default_factory=dict)
    perturbed: list[Question] = field(default_factory=list)
    invented: Invented | None = None
    joined: JoinedLengths = field(default_factory=JoinedLengths)
    otherwise: Answers | None = None

    @property
    def left_out(self) -> str:
        """A sentence about perturbed inputs that the original refuses; empty where there are none."""
        found = self.invented
        if found is None or not found.refused:
            return ""
        others = "the others are judged" if found.is_used else "so none of them is judged"
        return f"the FP32 model does not run with {found.refused} of {found.made} perturbed inputs: {others}"


Taken = tuple[list[Trial], list[Trial], list[Trial]]  # trials on real, on adversarial, on perturbed samples


def answers_of(spec: ModelSpec, engine: Engine) -> Answers:
    """An engine as a function of named arrays. Errors of ONNX Runtime, which are of kinds of its own, become
    EngineFailed."""

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        try:
            outputs = engine.run([[arrays[tensor.name]] for tensor in spec.inputs])
        except (HalfevenError, MemoryError, *REFUSALS):
            raise
        except Exception as error:
            raise EngineFailed(f"'{spec.name}' does not run with these inputs: {error}") from error
        return {tensor.name: output for tensor, output in zip(spec.outputs, outputs, strict=True)}

    return answer


def ask_reference(
    spec: ModelSpec,
    judging: Samples,
    original: Answers,
    tie_tolerance: TieTolerance | None = None,
    row_operations: int = 0,
    exact: Answers | None = None,
    device: str = "cpu",
) -> ReferenceRun:
    """Let the original answer the judging samples at batch sizes 1, 2, 3 and max, and the adversarial inputs.

    Where batches are filled up to fixed sizes on ``device``, also at each of those: they are what is served.

    ``exact``: the original evaluated another way, where there is one.
    """
    if not judging.all_judge:
        judging = judging.take(slice(0, MAX_JUDGED))

    def ask(samples: tuple[int, ...], inputs: Arrays, name: str = "") -> Question:
        return Question(samples, inputs, original(inputs), name)

    largest = min(spec.max_batch_size, max(judging.count, 3)) if spec.batched else 0
    sizes = [rows for rows in sorted({1, 2, 3, *buckets_of(spec, device)}) if rows < largest]
    bulk = [ask(*batch) for batch in judging.batches(largest)]
    rows = sum(sizes) * SMALL_BATCHES
    of_a_row = max((one.nbytes // len(one.samples) for one in bulk), default=0)
    is_slow = row_operations * rows > SMALL_OPERATIONS or of_a_row * rows > SMALL_BYTES
    batches = 1 if is_slow else SMALL_BATCHES
    odd = [
        Question(tuple(range(_rows(spec, inputs))), inputs, {}, name)
        for name, inputs in adversarial(spec, judging)
    ]
    invented = Invented(original)
    perturbed = [question for question in _perturbed(spec, judging, invented) if question.samples]
    noise = noise_among(spec, bulk, original, exact, row_operations)
    return ReferenceRun(
        spec,
        small=[ask(*batch) for rows in sizes for batch in judging.batches(rows, batches)],
        bulk=bulk,
        adversarial=list(Invented(original).answered(odd)),
        targets=judging.targets,
        is_slow=is_slow,
        tie_tolerance=tie_tolerance,
        row_operations=row_operations,
        noise=noise,
        perturbed=perturbed if invented.is_used else [],
        invented=invented,
        joined=joined_lengths(spec, judging, original, noise),
        otherwise=exact,
    )


def _perturbed(spec: ModelSpec, judging: Samples, invented: Invented) -> Iterator[Question]:
    """Questions made from few judging samples (`augmented`); only those whose FP32 answer is finite."""
    more = augmented(spec, judging)
    rows = min(spec.max_batch_size, more.count) if more and spec.batched else 0
    questions = (Question(samples, inputs, {}) for samples, inputs in (more.batches(rows) if more else ()))
    for question in invented.answered(questions):
        yield _finite(spec, question)


def _finite(spec: ModelSpec, question: Question) -> Question:
    """The question without the rows whose FP32 answer has NaN or infinity."""
    fine = np.ones(len(question.samples), bool)
    for array in question.reference.values():
        fine &= np.isfinite(array.astype(np.float64)).reshape(len(fine), -1).all(1)
    if fine.all() or not spec.batched:
        return question if fine.all() else replace(question, samples=())
    return Question(
        tuple(np.array(question.samples)[fine].tolist()),
        {name: array[fine] for name, array in question.inputs.items()},
        {name: array[fine] for name, array in question.reference.items()},
    )


def take(reference_run: ReferenceRun, half: Answers, stand_in: Answers | None = None) -> Taken:
    """Put every question to ``half``, the form on its device.

    ``stand_in``, the emulated half program, takes all but the small batches where these are too many operations.
    """
    real = _answered(reference_run, reference_run.small, half)
    bulk = (*reference_run.bulk, *reference_run.adversarial, *reference_run.perturbed)
    left = sum(len(question.samples) for question in bulk)
    too_many = reference_run.row_operations * left > TRUE_KERNELS_OPERATIONS
    rest = stand_in if stand_in and reference_run.small and too_many else half
    real += _answered(reference_run, reference_run.bulk, rest)
    odd = _answered(reference_run, reference_run.adversarial, rest, reference_run.otherwise)
    apart = _answered(reference_run, reference_run.perturbed, rest, reference_run.otherwise)
    for lengths, question in reference_run.joined.questions:
        apart += _answered(reference_run, [question], filling(reference_run.spec, lengths, rest))
    return real, odd, apart


def judged(reference_run: ReferenceRun, dtype: str, takes: Sequence[Taken]) -> ParityReport:
    """One report over all executions of the same half."""
    real, odd, perturbed = ([trial for one in takes for trial in one[kind]] for kind in range(3))
    spec, noise = reference_run.spec, reference_run.noise
    report = judge(spec, dtype, real, odd, reference_run.targets, noise=noise)
    return replace(report, perturbed=judge_apart(spec, dtype, perturbed, noise))


def floor_report(reference_run: ReferenceRun, dtype: str, floor: Answers) -> ParityReport:
    """The gate's report on the floor, which rounds the mantissa only; of a slow model, on one batch."""
    bulk = reference_run.bulk[:1] if reference_run.is_slow else reference_run.bulk
    questions = replace(reference_run, small=[], bulk=bulk, adversarial=[], perturbed=[])
    return judged(questions, dtype, [(_answered(questions, bulk, floor), [], [])])


def check_original_form(reference_run: ReferenceRun, answers: Answers) -> None:
    """Check that the FP32 program in another form answers as the original does, so that a fault of the exporter does
    not count as half's. What nearly ties may differ, as it may in a half. Raises ExportFailed naming the output."""
    for question in (*reference_run.small, *reference_run.bulk[:1]):
        for name, apart in _gaps(reference_run, question, answers(question.inputs)).items():
            if not apart <= SAME_IN_FP32:
                raise ExportFailed(
                    f"in FP32 the exported form of '{reference_run.spec.name}' already differs from the program: "
                    f"output '{name}' by {apart:.3g} of its largest value (at most {SAME_IN_FP32:g}); "
                    f"{_cause(apart, reference_run.noise.get(name))}: serve the torch form (--form torch)"
                )


def _gaps(reference_run: ReferenceRun, question: Question, came: Arrays) -> dict[str, float]:
    """The `gap` of each output, without the elements that nearly tie."""
    reference, ties = question.reference, reference_run.tie_tolerance
    gaps = {name: gap(expected, came[name]) for name, expected in reference.items()}
    if ties is None or max(gaps.values()) <= SAME_IN_FP32:
        return gaps
    tied = ties(question.inputs, reference, came)
    return gaps | {
        name: gap(reference[name], np.where(tied[name], reference[name], came[name])) for name in tied
    }


def _cause(gap: float, noise: Noise | None) -> str:
    """The cause of a difference in FP32 between two forms. ``gap``: that difference, as a share of the output's largest
    value; ``noise``: how much the program itself differs when it is computed another way."""
    own = noise.numbers["error"] if noise else 0.0
    if np.isfinite(gap) and SAME_IN_FP32 < gap <= ROOM * own:
        return (
            f"the program itself differs by {own:.3g} when it is computed in FP64 or with other sums (near ties, or "
            "values at the end of FP32's range), so neither form is wrong and no other form can be held against it"
        )
    return "this is the exporter's fault, not half precision's"


def _answered(
    reference_run: ReferenceRun,
    questions: Sequence[Question],
    half: Answers,
    otherwise: Answers | None = None,
) -> list[Trial]:
    """A trial of each question, but of those that the half and ``otherwise`` refuse."""
    ties = reference_run.tie_tolerance
    trials = (
        tried(q.samples, q.inputs, q.reference, answers_or_refusal(half, q.inputs), ties, q.name)
        for q in questions
    )
    return [
        trial
        for question, trial in zip(questions, trials, strict=True)
        if not (trial.refused and is_refused(otherwise, question.inputs))
    ]


def tried(
    samples: tuple[int, ...],
    inputs: Arrays,
    reference: Arrays,
    candidate: Arrays | Exception,
    tie_tolerance: TieTolerance | None,
    name: str = "",
) -> Trial:
    """A trial with its ties tolerated. ``candidate``: the half's answers, or the error with which it does not run."""
    if isinstance(candidate, Exception):
        return Trial(samples, reference, {}, name=name, refused=str(candidate) or type(candidate).__name__)
    stepped = getattr(tie_tolerance, "stepped", frozenset[str]())
    ties = tie_tolerance(inputs, reference, candidate) if tie_tolerance else {}
    return Trial(samples, reference, candidate, ties, name, stepped=stepped)


def _rows(spec: ModelSpec, arrays: Arrays) -> int:
    return len(arrays[spec.inputs[0].name]) if spec.batched else 1


def gap(expected: np.ndarray, came: np.ndarray) -> float:
    """The largest difference as a share of the largest number expected; infinite for another shape, NaN or infinity."""
    if expected.shape != came.shape or expected.dtype != came.dtype:
        return float("inf")
    with np.errstate(invalid="ignore"):
        one, other = expected.astype(np.float64), came.astype(np.float64)
        finite = np.isfinite(one)
        odd = (np.where(np.isfinite(side), 0.0, side) for side in (one, other))
        if not np.array_equal(*odd, equal_nan=True):
            return float("inf")
        gap, scale = np.abs(one - other)[finite], np.abs(one)[finite]
    largest = float(scale.max(initial=0.0))
    return float(gap.max(initial=0.0)) / (largest or 1.0)


ENOUGH = 32  # samples: with so many, a proof needs no others


def augmented(spec: ModelSpec, samples: Samples, seed: int = 0) -> Samples | None:
    """The perturbed samples that ``samples`` lack to `ENOUGH`; None where they are enough, or where no input can be
    changed."""
    missing = ENOUGH - samples.count
    if missing <= 0 or not changeable(spec, samples):
        return None
    return perturbed_rows(spec, samples, np.arange(missing) % samples.count, np.random.default_rng(seed))


NOISE_ROWS = 16  # that are evaluated again, to find the noise
NOISE_OPERATIONS = 1 << 34  # for each way; FP64 takes several times as long as FP32 for as many


def noise_among(
    spec: ModelSpec,
    questions: Iterable[Question],
    original: Answers,
    exact: Answers | None = None,
    row_operations: int = 0,
) -> Mapping[str, Noise]:
    """FP32's own noise by output (`gate/noise.py`): what the original answers otherwise when it is evaluated another
    way, on the first rows of the questions, which ``original`` has answered.

    ``exact``: the original in FP64, or with its sums in another order; None where there is none. Its rows one at a time
    are another way for every model that takes several.
    """
    rows = min(NOISE_ROWS, max(1, NOISE_OPERATIONS // max(row_operations, 1)))
    some = list(first_rows(questions, rows, spec.batched))
    several = any(len(one.samples) > 1 for one in some)
    ways = [*([exact] if exact else []), *([one_at_a_time(original)] if several else [])]
    trials = [[Trial(one.samples, one.reference, way(one.inputs)) for one in some] for way in ways]
    if exact and several:
        _refuse_dependent_rows(*(noise_of(spec, each) for each in trials))
    return noise_of(spec, [trial for each in trials for trial in each])


# The share of an output's largest value, and times what other sums change, by which a row alone differs from the same
# row among others where its answer depends on them.
DEPENDS, DEPENDS_TIMES = 0.05, 8.0


def _refuse_dependent_rows(of_sums: Mapping[str, Noise], of_others: Mapping[str, Noise]) -> None:
    """Raises RowsDiffer where a row alone is answered otherwise than among others by far more than FP32's noise."""
    for name in of_sums.keys() & of_others.keys():
        error = of_others[name].numbers["error"]
        if error > max(DEPENDS, DEPENDS_TIMES * of_sums[name].numbers["error"]):
            raise RowsDiffer(f"output '{name}' depends on the other rows of its batch")


def one_at_a_time(answers: Answers) -> Answers:
    """A function that answers like ``answers``, but runs the model once for each row of a batch."""

    def answer(inputs: Arrays) -> dict[str, np.ndarray]:
        rows = min(map(len, inputs.values()))
        alone = [
            answers({name: array[row : row + 1] for name, array in inputs.items()}) for row in range(rows)
        ]
        for name in alone[0]:
            if len(shapes := {one[name].shape[1:] for one in alone}) > 1:
                raise RowsDiffer(f"output '{name}' has rows of the shapes {sorted(map(list, shapes))}")
        return {name: np.concatenate([one[name] for one in alone]) for name in alone[0]}

    return answer
