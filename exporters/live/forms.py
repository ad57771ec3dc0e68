"""The live form of a module that cannot be captured: the operator's own ``nn.Module`` under autocast.

There is no capture and no rewrite. The plan is which modules stay in FP32 (`islands.py`); the module itself is proven
and served, built from the operator's folder in this process as it will be in the server. Its operations are counted
in a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...models.capture.agreement import TOLERANCE
from ...models.engines.engine import LIVE_FILE
from ...models.engines.live_engine import HALVES, LiveEngine, LiveModule, live_json
from ...models.engines.true_fp32 import use_true_fp32
from ...models.errors import CannotConvert, CaptureFailed, EngineFailed
from ...models.files.tensor_file import save_tensors
from ...models.folder.package import ModelFolder
from ...models.store.manifest import sha256_of
from ...models.store.store import Draft
from ..graph.actions import Kept
from ..graph.traffic import Half
from ..inputs.samples import Samples
from ..plan.aims import SEARCHED
from ..policy.operations import UNKNOWN, Counted, Operations
from ..proof.maker import Made, Maker, Notify
from ..proof.prove import Answers, ReferenceRun, answers_of, ask_reference, take
from ..proof.subject import Subject
from ..question import Arrays
from ..search.delta_debugging import NOT_ASKED, NOT_NEEDED, Found, outcome
from .building import Built, build, check_asked, example, largest_gap
from .islands import LiveRehearsal, asked_islands, find_islands, observed

_CASTS = (torch.ops.aten.to, torch.ops.aten._to_copy)


@dataclass(slots=True)
class Counts:
    """Ops with a floating result, those of them with a half one, and casts between floating dtypes."""

    nodes: int = 0
    half_nodes: int = 0
    casts: int = 0


def count(run: Callable[[], object]) -> Counts:
    """Count the ops of one run; views and copies in the same dtype are no ops."""
    counts = Counts()

    def see(func: Any, read: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        dtypes = {value.dtype for value in given if value.is_floating_point()}
        if not dtypes:
            return
        if func.overloadpacket in _CASTS:
            counts.casts += read[0].is_floating_point() and read[0].dtype not in dtypes
        elif not func.is_view:
            counts.nodes += 1
            counts.half_nodes += bool(dtypes & set(HALVES))

    with _Seen(see):
        run()
    return counts


def module_operations(run: Callable[[], object], inputs: Arrays) -> Operations:
    """The operations of any execution of a module, estimated from ``run``, an execution on ``inputs``."""
    counted = Counted()

    def see(func: Any, read: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        name = func._schema.name.removeprefix("aten::")
        made = () if func.is_view else given
        counted.add(name, [value.shape for value in read], [value.shape for value in made])

    with _Seen(see):
        run()
    return counted.estimate(sum(array.size for array in inputs.values()))


class _Seen(TorchDispatchMode):
    """Gives ``see`` each call of an operation: the tensors that it read, and those that it gave."""

    def __init__(self, see: Callable[[Any, Sequence[Tensor], Sequence[Tensor]], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read, given = (
            [one for one in tree_leaves(some) if isinstance(one, Tensor)] for some in ((args, kwargs), result)
        )
        self._see(func, read, given)
        return result


CPU = torch.device("cpu")
WEIGHTS = "weights.safetensors"


def live_subject(
    asked: ModelFolder, samples: Samples, origin: Mapping[str, Any], notify: Notify
) -> tuple[Subject, "LiveForms"]:
    """A model folder ready for the road (`conversion.road.travel`): its module built, checked and made again.

    Raises BadFolder or BadSetting for a fault that the operator can correct, CaptureFailed where the module's code does
    not run.
    """
    check_asked(asked.precision)
    use_true_fp32()
    notify(f"building {asked.spec.name}")
    built = build(asked, samples)
    subject = Subject(
        program=None,
        spec=built.live.spec,
        samples=samples,
        precision=asked.precision,
        forms=("live",),
        source=asked.guessed or asked.folder,
        origin=origin,
        notes=(*asked.notes, *built.notes),
    )
    return subject, LiveForms(subject, built)


@dataclass(slots=True)
class LiveForms(Maker):
    """Makes the live form (`proof.maker.Maker`)."""

    subject: Subject
    built: Built
    kept: tuple[Kept, ...] = ()
    counts: Counts = field(default_factory=Counts)
    _planned: bool = False
    _half: LiveEngine | None = None
    _search: str = NOT_ASKED
    _why_failed: str = ""
    _operations: Operations | None = None

    @property
    def row_operations(self) -> int:
        return self.operations.of(self._row)

    @property
    def operations(self) -> Operations:
        """The operations of one execution of the FP32 module; unknown where they cannot be counted."""
        if self._operations is None:
            original, row = self.original(), self._row
            try:
                self._operations = module_operations(lambda: original(row), row)
            except CaptureFailed:
                self._operations = UNKNOWN
        return self._operations

    @property
    def _row(self) -> Arrays:
        return next(self.subject.samples.batches(1 if self.subject.spec.batched else 0))[1]

    def original(self) -> Answers:
        answers = answers_of(self.subject.spec, LiveEngine(self.built.live, "fp32", CPU))

        def described(arrays: Arrays) -> dict[str, np.ndarray]:
            try:
                return answers(arrays)
            except EngineFailed as error:
                raise CaptureFailed(str(error)) from error

        return described

    def reference_run(self, judging: Samples) -> ReferenceRun:
        original = self.original()
        use_true_fp32()  # the model's own code may have set it otherwise since
        return ask_reference(self.subject.spec, judging, original, row_operations=self.row_operations)

    def plan(self, planning: Samples, share: float, notify: Notify) -> bool:
        """Plan; gives whether the plan differs from the one before. At O0 nothing is half, so nothing is searched."""
        before, first = self.kept, not self._planned
        self._planned = True
        self._lower()
        if not first and share == SEARCHED:
            return False  # the first plan was for no more
        inputs = example(self.subject.spec, planning)
        if self.subject.precision.level != "O0":
            self.kept = self._settled(planning, min(share, SEARCHED), inputs, notify)
        self.counts = self._counted(inputs)
        return first or self.kept != before

    def serve_original(self, because: str) -> None:
        self.subject, self.kept, self._planned = self.subject.served_original(because), (), False
        self._why_failed = ""

    def why_failed(self) -> str:
        return self._why_failed

    def make(self, name: str, draft: Draft, reference_run: ReferenceRun) -> Made:
        """Write ``live.json``, which serves the half and the original. Raises CannotConvert where it cannot run."""
        self._lower()
        self._check_original(reference_run)
        self._write(draft)
        if self.subject.precision.level == "O0":
            return Made(LIVE_FILE, self.original())
        self._half = LiveEngine(self.built.live, self.subject.precision.dtype, CPU, self.islands)
        answers = answers_of(self.subject.spec, self._half)
        try:
            answers((*reference_run.small, *reference_run.bulk)[0].inputs)
        except EngineFailed as error:
            raise CannotConvert(f"the live form does not run in half precision here: {error}") from error
        return Made(LIVE_FILE, answers, [take(reference_run, answers)] if self.counts.half_nodes else [])

    @property
    def islands(self) -> list[str]:
        return [kept.node for kept in self.kept]

    def facts(self) -> dict[str, Any]:
        """The facts as `proof.maker.Maker` has them; ops are counted in one run, for autocast casts at every
        request."""
        counts = self.counts
        size = sum(  # the FP32 weights stay in memory
            tensor.numel() * tensor.element_size() for tensor in self.built.live.module.state_dict().values()
        )
        by_policy = counts.nodes - counts.half_nodes
        half = Half(counts.nodes, counts.half_nodes, by_policy, self.kept, counts.casts, size, size)
        return {
            **half.facts(),
            "search": self._search,
            **({"original_because": self.subject.original_because} if self.subject.original_because else {}),
        }

    def plan_json(self) -> dict[str, Any]:
        return {
            **self.subject.precision.to_json(),
            "lists": "torch.autocast, those of the device that serves, at every request",
            "accumulation": "FP32",
            "nodes": [],
            "kept": [kept.to_json() for kept in self.kept],
        }

    def _lower(self) -> None:
        """Remove the islands of the last half, so that the module is the original again."""
        if self._half is not None:
            self._half.close()
            self._half = None

    def _write(self, draft: Draft) -> None:
        source, weights = self.built.live.source, draft.folder / WEIGHTS
        if not weights.exists():
            save_tensors(weights, self.built.state)
        text = source.text()  # also what forward imported when it was first called
        if any(text.get(file) != sha for file, sha in self.built.text.items()):
            raise CannotConvert(f"{source.folder} was changed while it was converted: convert it again")
        draft.write_json(LIVE_FILE, live_json(source, text, self.islands, sha256_of(weights)))

    def _settled(self, planning: Samples, share: float, inputs: Arrays, notify: Notify) -> tuple[Kept, ...]:
        """The islands that were asked for, and the fewest more where these do not pass on the planning samples."""
        live, dtype = self.built.live, self.subject.precision.dtype
        called = observed(live.module, lambda: self.original()(inputs))
        asked = asked_islands(live.module, called, self.subject.precision.keep)
        kept = [self._kept(path, f"asked for by keep = {pattern!r}") for path, pattern in asked.items()]
        rehearsal = LiveRehearsal(live, dtype, CPU, planning, share, self.operations)
        self._search, self._why_failed = NOT_NEEDED, ""
        if not rehearsal.score(asked).passed:
            notify("searching for the modules that must stay in FP32")
            found = find_islands(rehearsal, asked, notify)
            self._search = outcome(found)
            if found is None:
                at_the_limits = LiveRehearsal(live, dtype, CPU, planning, 1.0, self.operations).score(asked)
                self._why_failed = "" if at_the_limits.passed else at_the_limits.reason
            kept += [self._found(path, found) for path in found.kept] if found else []
        return tuple(kept)

    def _kept(self, path: str, reason: str, evidence: str = "") -> Kept:
        module = self.built.live.module.get_submodule(path)
        return Kept(path, type(module).__name__, reason, evidence)

    def _found(self, path: str, found: Found) -> Kept:
        score = found.certificate.get(path)
        if score is None:
            evidence = "the search was exhausted before the model was tried without it"
        elif np.isfinite(score.error_u):
            evidence = f"without it: error {score.error_u:.3g}u"
        else:
            evidence = "without it: the answer is not finite, or forward raises"
        return self._kept(path, "found by search", evidence)

    def _counted(self, inputs: Arrays) -> Counts:
        if self.subject.precision.level == "O0":
            return Counts()
        half = LiveEngine(self.built.live, self.subject.precision.dtype, CPU, self.islands)
        try:
            answers_of(self.subject.spec, half)(inputs)
        except EngineFailed:
            return Counts()  # `make` will say why
        else:
            return count(lambda: answers_of(self.subject.spec, half)(inputs))
        finally:
            half.close()

    def _check_original(self, reference_run: ReferenceRun) -> None:
        """The model's own fault, not half's, as a sentence: an answer that is not finite, or differs the second
        time."""
        for question in (*reference_run.small, *reference_run.bulk):
            for name, answer in question.reference.items():
                if answer.dtype.kind not in "biu" and np.isnan(answer.astype(np.float64)).any():
                    samples = sorted(set(question.samples))
                    raise CannotConvert(
                        f"the model itself answers NaN in FP32: output '{name}', among the samples {samples[:8]}, "
                        f"{_first_nan(self.built.live, question.inputs)}"
                    )
        question = (*reference_run.small, *reference_run.bulk)[0]
        if (gap := largest_gap(question.reference, self.original()(question.inputs))) > TOLERANCE:
            raise CaptureFailed(
                f"the module of '{self.subject.spec.name}' answers the same input in FP32 differently by {gap:.3g} "
                "of its largest value when it is asked again: is something in forward random, or does it keep state?"
            )


def _first_nan(live: LiveModule, inputs: Arrays) -> str:
    """The first module whose output has a NaN."""
    outputs = observed(live.module, lambda: answers_of(live.spec, LiveEngine(live, "fp32", CPU))(inputs))
    first = next((path for path, tensors in outputs.items() if any(t.isnan().any() for t in tensors)), None)
    return f"first in module '{first}'" if first else "in forward itself"
