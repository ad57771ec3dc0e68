"""A plan made from a file on few samples holds on many that were never tried."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.folder.package import ModelFolder, Precision

from tests.corpus import captured, fresh
from tests.exporters.onnx.onnx_files import ConvertedFile, convert, convert_file, errors_u, parsed

FRESH = 32  # as many as a folder without samples is judged and planned on


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log energy", "causal", "clamp at 1e-8", "sigmoid tail"])
def test_a_plan_from_the_file_holds_on_inputs_that_nobody_has_seen(name: str, tmp_path: Path) -> None:
    """The first fails on perturbed samples: two squares that one sample in a hundred makes too loud.
    The last over a score that one in five hundred brings into the flat end of its sigmoid.
    """
    foreign, inputs = converted(name, "O3", tmp_path), unseen(name, 512)
    trial = Trial(tuple(range(512)), foreign.original_answers()(inputs), foreign.oracle_answers()(inputs))
    assert judge(foreign.spec, "fp16", [trial]).passed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny product", "warp"])
def test_by_the_lists_a_plan_holds_for_few_inputs_too_whose_answers_are_small(
    name: str, tmp_path: Path
) -> None:
    """The largest answer of thousands excuses more than that of thirty-two."""
    foreign, rows = converted(name, "O1", tmp_path), 2048
    inputs = unseen(name, rows)
    original, half = foreign.original_answers()(inputs), foreign.oracle_answers()(inputs)
    for start in range(0, rows, FRESH):
        few = slice(start, start + FRESH)
        reference, candidate = ({key: array[few] for key, array in one.items()} for one in (original, half))
        report = judge(foreign.spec, "fp16", [Trial(tuple(range(FRESH)), reference, candidate)])
        assert report.passed, report.summary()


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_row_of_a_table_that_leaves_half_s_range_is_answered_though_no_sample_takes_it(
    level: str, tmp_path: Path
) -> None:
    random = np.random.default_rng()
    table = random.uniform(100.0, 9000.0, (50, 2)).astype(np.float32)
    table[40:, 0] *= 1000.0
    w, v = (random.normal(size=size).astype(np.float32) for size in ((2, 8), (8, 4)))
    weights = {"table": table, "w": w / 9000, "v": v, "both": np.array([-1, 2])}
    text = """g (int64[n] id) => (float[n,4] y)
    { r = Gather(table, id) f = Reshape(r, both) p = MatMul(f, w) t = Tanh(p) y = MatMul(t, v) }"""
    usual, rare = ({"id": np.arange(*ends)} for ends in ((0, 40), (40, 50)))
    foreign = convert(tmp_path, parsed(text, weights), usual, level, max_batch_size=16)
    assert foreign.half_nodes > 0
    assert errors_u(foreign, rare)["y"] <= 4.0


def converted(name: str, level: str, place: Path) -> ConvertedFile:
    original = captured(name)
    spec, precision = replace(original.spec, name="model"), Precision(level)
    write_onnx(original.program, spec, place / "original.onnx", {})
    arrays = {key: tensor.numpy() for key, tensor in fresh(name, FRESH, 1).items()}
    folder = ModelFolder(place, "original.onnx", (), None, None, spec, precision)
    planning, _ = Samples(arrays).split()
    return convert_file(folder, planning, precision)


def unseen(name: str, rows: int) -> dict[str, np.ndarray]:
    return {key: tensor.numpy() for key, tensor in fresh(name, rows, 7919).items()}
