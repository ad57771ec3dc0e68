"""A converted folder's ranges: in its spec, over new weights, beside versions that have none."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.conversion.retrain import subject_of
from halfeven.exporters.inputs.samples import load_samples
from halfeven.exporters.inputs.synthetic import generate
from halfeven.models.errors import BadFolder, BadSamples
from halfeven.models.folder.package import read_folder
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.spec.value_range import ValueRange
from halfeven.models.store.store import Store

from tests.model_folders import tensor, write_folder

WORDS = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.words, self.kinds, self.head = nn.Embedding(12, 8), nn.Embedding(3, 8), nn.Linear(8, 3)

    def forward(self, ids, kind):
        return self.head((self.words(ids) + self.kinds(kind - 1)[:, None]).mean(1))

def build():
    return Words()
"""
INPUTS = (tensor("ids", "INT64", [-1, 4]), tensor("kind", "INT64", [-1]))
RANGES = [ValueRange((0,), (11,)), ValueRange((1,), (3,))]
TORCH = Options(forms=("torch",))


@pytest.mark.slow
def test_small_tables_are_converted_without_samples_and_again_beside_a_version_without_ranges(
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path / "words", WORDS, inputs=INPUTS)
    store = Store(tmp_path / "store")
    version = convert(folder, store, TORCH).version
    assert [t.range for t in version.spec().inputs] == RANGES
    drawn = load_samples(version.file("samples.safetensors"), version.spec()).arrays
    assert [(int(drawn[name].min()), int(drawn[name].max())) for name in ("ids", "kind")] == [(0, 11), (1, 3)]
    assert [t.range for t in subject_of(version).spec.inputs] == RANGES
    spec = version.spec()
    older = ModelSpec.from_json(_without_ranges(spec.to_json()))
    assert [t.range for t in older.inputs] == [None, None]
    assert older.signature() == spec.signature()


def _without_ranges(data: dict) -> dict:  # type: ignore[type-arg]
    text = json.loads(json.dumps(data))
    for entry in text["inputs"]:
        del entry["range"]
    return text


def test_given_samples_that_a_table_has_no_row_for_are_refused_by_name(tmp_path: Path) -> None:
    samples = {"ids": np.full((8, 4), 3), "kind": np.full(8, 2)}
    samples["kind"][5] = 4
    folder = write_folder(tmp_path / "words", WORDS, inputs=INPUTS, samples=samples)
    text = (folder / "model.toml").read_text().replace('name = "kind"', 'name = "kind"\nrange = [1, 3]')
    (folder / "model.toml").write_text(text)
    with pytest.raises(BadSamples, match=r"tensor 'kind': values must lie in 1\.\.3, got 4 at \[5\]"):
        convert(folder, Store(tmp_path / "store"), TORCH)


def test_a_range_in_model_toml_is_read_and_held(tmp_path: Path) -> None:
    def read(**more: object) -> ModelSpec:
        inputs = (tensor("ids", "INT64", [-1, 2], **more),)
        return read_folder(write_folder(tmp_path / "words", WORDS, inputs=inputs)).spec

    assert read(range=[0, 9]).inputs[0].range == ValueRange((0,), (9,))
    assert read(range=[[0, 9], [-1, 4]]).inputs[0].range == ValueRange((0, -1), (9, 4))
    for wrong, message in (
        ([3], "two whole numbers"),
        ([9, 0], "empty"),
        ([0.5, 2], "two whole numbers"),
        ([[0, 1], [0, 1], [0, 1]], "3 pairs"),
    ):
        with pytest.raises(BadFolder, match=f"inputs.0..range.*{message}"):
            read(range=wrong)
    with pytest.raises(BadFolder, match="the nearest known key is 'range'"):
        read(ranges=[0, 9])
    folder = write_folder(tmp_path / "float", WORDS, inputs=(tensor("x", "FP32", [-1, 2], range=[0, 1]),))
    with pytest.raises(BadFolder, match="only an input of integers has a range"):
        read_folder(folder)


def test_generated_samples_are_drawn_from_the_range(random: np.random.Generator) -> None:
    seed = int(random.integers(0, 1 << 30))
    spec = read_spec()
    drawn = generate(spec, 400, seed).arrays
    assert (drawn["ids"].min(), drawn["ids"].max()) == (0, 5)
    assert set(drawn["pair"][:, 0]) == {3, 4} and set(drawn["pair"][:, 1]) == {0}
    assert set(drawn["token_type"]) == {0} and set(drawn["far"]) <= set(range(7, 107))
    assert set(drawn["negative"]) == {-3, -2}


def read_spec() -> ModelSpec:
    from tests.specs import tensor as of

    big = np.iinfo(np.int64).max
    return ModelSpec(
        "drawn",
        (
            of("ids", "INT64", -1, range=ValueRange((-100,), (5,))),
            of("pair", "INT32", -1, 2, range=ValueRange((3, 0), (4, 0))),
            of("token_type", "INT64", -1, range=ValueRange((0,), (0,))),
            of("far", "INT64", -1, range=ValueRange((7,), (int(big),))),
            of("negative", "INT64", -1, range=ValueRange((-3,), (-2,))),
        ),
        (of("y", "FP32", -1),),
    )


def test_ranges_are_narrower_or_not() -> None:
    columns = ValueRange((0, 1), (9, 5))
    assert ValueRange((1,), (5,)).within(columns) and not ValueRange((0,), (5,)).within(columns)
    assert columns.within(ValueRange((0,), (9,)))
    assert columns.both(ValueRange((0,), (6,))) == ValueRange((0, 1), (6, 5))
    assert replace(columns) == ValueRange.parse(columns.to_json())
