"""The way from a model folder to the module served live, checked against itself in FP32 before a half is made."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...models.capture import agreement, sources
from ...models.capture.failures import Refused
from ...models.engines.arrays import to_torch
from ...models.engines.live_engine import LiveEngine, LiveModule
from ...models.engines.live_source import LiveSource
from ...models.errors import BadFolder, BadSetting, CaptureFailed, EngineFailed
from ...models.folder.package import ModelFolder, Precision
from ...models.spec.spec import ModelSpec
from ..inputs.samples import Samples
from ..proof.prove import Arrays, answers_of

CPU = torch.device("cpu")
CHECKED = 8  # samples whose answers in a batch are compared with their answers alone


@dataclass(slots=True)
class Built:
    """The module as the server will make it, its weights, and the text that it was made from."""

    live: LiveModule
    state: dict[str, Tensor]
    text: dict[str, str]
    notes: list[str]


def check_asked(precision: Precision) -> None:
    """Raises BadSetting for options that a module under autocast cannot have."""
    if precision.level in ("O2", "O3"):
        raise BadSetting(
            f"level = {precision.level!r}: the live form is the module under autocast, with FP32 weights; expected "
            "O1 (autocast lists) or O0 (FP32)"
        )
    if precision.embeddings != "keep" and precision.level != "O0":
        raise BadSetting("embeddings = 'half': autocast leaves embeddings in FP32, and so does the live form")
    if operators := [pattern for pattern in precision.keep if pattern.startswith("op:")]:
        raise BadSetting(
            f"keep = {operators[0]!r}: the live form has no graph whose ops could stay in FP32, only modules; "
            "name a module's path"
        )


def build(asked: ModelFolder, samples: Samples) -> Built:
    """Build the module, take its weights, and build it again as the server will: both must give the same answers."""
    source = LiveSource(asked.folder, asked.source, tuple(root.resolve() for root in asked.path))
    module = source.build()
    try:
        notes = sources.load_weights(torch, module, str(asked.weights) if asked.weights else None)
    except Refused as error:
        raise BadFolder(f"{asked.folder}: {error}") from None
    state = module.state_dict()
    if odd := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise BadFolder(f"{asked.folder}: the module's state '{odd[0]}' is no tensor and cannot be stored")
    state = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    text = source.text()
    again = source.build(proven=text)
    try:
        again.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CaptureFailed(
            f"the module of {asked.folder} is another when it is built again: {error}"
        ) from None
    live = LiveModule(again, source, asked.spec)
    _check_same(LiveModule(module, source, asked.spec), live, samples)
    live.spec, more = _exact(live, samples)
    return Built(live, state, text, [*notes, *more])


def _check_same(first: LiveModule, again: LiveModule, samples: Samples) -> None:
    """Compare the module with one that is built again, as the server will: no answer may depend on chance."""
    inputs = example(first.spec, samples)
    try:
        one, other = (
            answers_of(first.spec, LiveEngine(live, "fp32", CPU))(inputs) for live in (first, again)
        )
    except EngineFailed as error:
        given = ", ".join(
            f"'{t.name}' {t.datatype} {t.describe_shape()} (tried with {list(inputs[t.name].shape)})"
            for t in first.spec.inputs
        )
        raise CaptureFailed(
            f"the model cannot be served live: {error}. model.toml declares the inputs {given}: "
            "correct there the name, shape or datatype that the model does not take"
        ) from error
    if (gap := largest_gap(one, other)) > agreement.TOLERANCE:
        raise CaptureFailed(
            f"the module of {first.source.folder} answers differently by {gap:.3g} of its largest value when it is "
            "built again with the same weights: is something in it random, or kept outside of its state_dict?"
        )


def largest_gap(expected: Arrays, came: Arrays) -> float:
    """The largest difference over all outputs, as a share of the output's largest value."""
    pairs = [(to_torch(came[name].copy()), to_torch(np.array(one))) for name, one in expected.items()]
    return max((agreement.distance(torch, one, other) for one, other in pairs), default=0.0)


def example(spec: ModelSpec, samples: Samples) -> Arrays:
    """A small batch of the first samples."""
    rows = min(3, max(1, spec.max_batch_size)) if spec.batched else 0
    return next(iter(samples.batches(rows, 1)))[1]


def _exact(live: LiveModule, samples: Samples) -> tuple[ModelSpec, list[str]]:
    """The spec with ``max_batch_size`` 1 where answers depend on the batch; outputs checked against model.toml."""
    spec = replace(live.spec, form="live")
    _check_outputs(spec, live, samples)
    if spec.max_batch_size <= 1:
        return spec, []
    tensors = [to_torch(samples.arrays[tensor.name][:CHECKED].copy()) for tensor in spec.inputs]

    def run(*inputs: Tensor) -> list[Tensor]:
        return live([tensor.clone() for tensor in inputs], half=False)

    request = {"max_batch_size": spec.max_batch_size, "outputs": [tensor.name for tensor in spec.outputs]}
    try:
        with torch.inference_mode():
            gap = agreement.batch_gap(torch, run, tensors, request)
    except Refused as error:
        raise BadFolder(f"the model in {live.source.folder}: {error}") from None
    except EngineFailed as error:
        raise CaptureFailed(str(error)) from error
    if gap <= agreement.TOLERANCE:
        return spec, []
    note = f"answers in a batch differ from answers alone by {gap:.3g} of the largest value"
    return spec.with_max_batch_size(1), [f"{note}: max_batch_size was set to 1"]


def _check_outputs(spec: ModelSpec, live: LiveModule, samples: Samples) -> None:
    answers = answers_of(spec, LiveEngine(live, "fp32", CPU))(example(spec, samples))
    for tensor in spec.outputs:
        if fault := tensor.output_fault(answers[tensor.name].shape, tensor.datatype):
            raise BadFolder(
                f"output '{tensor.name}' of '{spec.name}': model.toml and the model differ: {fault}"
            )
