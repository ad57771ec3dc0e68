"""What the search's judge asks: the samples, their shaken neighbours, adversarial inputs; early ends change no verdict."""

# ruff: noqa: E501  (graphs in their own lines)

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.foreign.conversion import ForeignHalf, convert_onnx, oracle_answers, whole_answers
from halfeven.exporters.foreign.trials import ENOUGH, FEW, Trials
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF, judge
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.inputs.shaken import SHAKEN
from halfeven.exporters.onnx.export import write_onnx
from halfeven.models.package import ModelFolder, Precision
from onnx import ModelProto

from tests.corpus import captured, fresh
from tests.exporters.foreign.onnx_files import parsed, spec_of
from tests.exporters.foreign.traps import normal

SCORED = "g (float[n,8] x, float[n,8] mask) => (float[n,8] y) { y = Mul(x, mask) }"
PICKED = "g (float[n,8] x, float[n,8] mask) => (int64[n,1] y) { m = Mul(x, mask) y = ArgMax<axis=1>(m) }"
FRESH = 32  # as many as a folder without samples is judged and planned on


def trials_of(model: ModelProto, rows: int = 24) -> Trials:
    random = np.random.default_rng()
    arrays = {"x": normal(random, rows, 8), "mask": (random.random((rows, 8)) < 0.5).astype(np.float32)}
    spec = spec_of(model)
    return Trials(spec, Samples(arrays), lambda inputs: {"y": inputs["x"] * inputs["mask"]}, "fp16")


def test_the_samples_are_asked_and_then_their_neighbours_with_the_masks_as_they_are() -> None:
    trials = trials_of(parsed(SCORED))
    count = sum(len(asked.samples) for asked in trials.own)
    assert count == 24 and sum(len(asked.samples) for asked in trials.real) == 24 + SHAKEN * FEW
    for asked in trials.real[len(trials.own) :]:
        assert set(np.unique(asked.inputs["mask"])) <= {0.0, 1.0}
        assert not any(np.array_equal(asked.inputs["x"], own.inputs["x"]) for own in trials.own)


def test_what_picks_has_no_neighbours() -> None:
    trials = trials_of(parsed(PICKED))
    assert trials.real == trials.own


def test_an_error_is_held_against_the_largest_of_all_answers_that_are_asked_for() -> None:
    trials = trials_of(parsed(SCORED))
    asked = [*trials.own, *trials.lessons.many]
    largest = max(float(np.abs(one.reference["y"]).max()) for one in asked)
    first = trials.own[0]
    moved = {"y": first.reference["y"] + np.float32(0.01)}
    report = trials._judged(ENOUGH, [Trial(first.samples, first.reference, moved)], [])
    assert report.max_error_u == pytest.approx(0.01 / (UNIT_ROUNDOFF["fp16"] * largest), rel=1e-3)


@pytest.mark.parametrize("name", ["log energy", "causal", "clamp at 1e-8", "sigmoid tail"])
def test_a_plan_from_the_file_holds_on_inputs_that_nobody_has_seen(name: str, tmp_path: Path) -> None:
    """The first fell over its samples' neighbours: two squares that one sample in a hundred makes too loud.
    The last over a score that one in five hundred brings into the flat end of its sigmoid.
    """
    foreign, inputs = converted(name, "O3", tmp_path), unseen(name, 512)
    trial = Trial(tuple(range(512)), whole_answers(foreign)(inputs), oracle_answers(foreign)(inputs))
    assert judge(foreign.spec, "fp16", [trial]).passed


@pytest.mark.parametrize("name", ["tiny product", "warp"])
def test_by_the_lists_a_plan_holds_for_few_inputs_too_whose_answers_are_small(
    name: str, tmp_path: Path
) -> None:
    """The largest answer of thousands excuses more than that of thirty-two."""
    foreign, rows = converted(name, "O1", tmp_path), 2048
    inputs = unseen(name, rows)
    whole, half = whole_answers(foreign)(inputs), oracle_answers(foreign)(inputs)
    for start in range(0, rows, FRESH):
        few = slice(start, start + FRESH)
        reference, candidate = ({key: array[few] for key, array in one.items()} for one in (whole, half))
        report = judge(foreign.spec, "fp16", [Trial(tuple(range(FRESH)), reference, candidate)])
        assert report.passed, report.summary()


def converted(name: str, level: str, place: Path) -> ForeignHalf:
    whole = captured(name)
    spec, precision = replace(whole.spec, name="model"), Precision(level)
    write_onnx(whole.program, spec, place / "whole.onnx", {})
    arrays = {key: tensor.numpy() for key, tensor in fresh(name, FRESH, 1).items()}
    folder = ModelFolder(place, "whole.onnx", (), None, None, spec, precision)
    planning, _ = Samples(arrays).split()
    return convert_onnx(place / "whole.onnx", folder, planning, precision)


def unseen(name: str, rows: int) -> dict[str, np.ndarray]:
    return {key: tensor.numpy() for key, tensor in fresh(name, rows, 7919).items()}
