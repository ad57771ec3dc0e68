"""Few samples are joined by inputs made of them: near them, of the same kind, and the same at every call."""

import numpy as np
import pytest
from halfeven.exporters.inputs.perturbed import DIMMEST
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.proof.prove import ENOUGH, augmented
from halfeven.models.spec.spec import ModelSpec, TensorSpec

from tests.exporters.inputs.tensors import ENCODER, encoder_arrays
from tests.specs import tensor


def model(*inputs: TensorSpec, rows: int = 8) -> ModelSpec:
    return ModelSpec("m", inputs, (tensor("y", "FP32", -1, 3),), rows)


NUMBERS = model(tensor("x", "FP32", -1, 4))


@pytest.mark.parametrize("count", [1, 5, ENOUGH - 1])
def test_as_many_are_made_as_are_missing(count: int, random: np.random.Generator) -> None:
    x = random.standard_normal((count, 4)).astype(np.float32)
    more = augmented(NUMBERS, Samples({"x": x}))
    assert more is not None and more.count == ENOUGH - count and more.arrays["x"].dtype == np.float32
    again = augmented(NUMBERS, Samples({"x": x}))
    assert again is not None and np.array_equal(more.arrays["x"], again.arrays["x"])
    origin = x[np.arange(more.count) % count]
    distance = np.abs(more.arrays["x"] - origin) / origin.std(1, keepdims=True)
    assert 0 < distance.max() < 4 and not (more.arrays["x"] == origin).all(1).any()


def test_enough_samples_are_left_alone(random: np.random.Generator) -> None:
    assert augmented(NUMBERS, Samples({"x": random.standard_normal((ENOUGH, 4)).astype(np.float32)})) is None


def test_inputs_that_cannot_be_changed_give_none(random: np.random.Generator) -> None:
    masks = model(tensor("mask", "INT64", -1, 4), tensor("is_new", "BOOL", -1))
    arrays = {"mask": np.ones((3, 4), np.int64), "is_new": np.ones(3, bool)}
    assert augmented(masks, Samples(arrays)) is None
    assert (
        augmented(model(tensor("ids", "INT64", -1, 4)), Samples({"ids": np.ones((1, 4), np.int64)})) is None
    )


def test_ids_continue_as_those_of_another_sample_and_masks_stay(random: np.random.Generator) -> None:
    arrays = {**encoder_arrays(random, 4), "attention_mask": random.integers(0, 2, (4, 6))}
    more = augmented(ENCODER, Samples(arrays))
    assert more is not None
    assert np.array_equal(more.arrays["attention_mask"], arrays["attention_mask"][np.arange(28) % 4])
    for row, ids in enumerate(more.arrays["ids"]):
        own = arrays["ids"][row % 4]
        ends = [np.append(own[:cut], other[cut:]) for other in arrays["ids"] for cut in range(7)]
        assert any(np.array_equal(ids, end) for end in ends)
    assert not np.array_equal(more.arrays["ids"], arrays["ids"][np.arange(28) % 4])
    assert more.arrays["scale"].dtype == arrays["scale"].dtype


def test_pictures_move_a_little_and_are_dimmed_within_their_range(random: np.random.Generator) -> None:
    picture = {"size": [16, 16], "color": "L", "scale": 0.0625, "mean": [0.0], "std": [1.0]}
    spec = model(tensor("image", "FP32", -1, 1, 16, 16, picture=picture))
    plain = np.zeros((2, 1, 16, 16), np.float32)
    plain[:, :, 6:10, 6:10] = 1.0
    more = augmented(spec, Samples({"image": plain}))
    assert more is not None and more.count == ENOUGH - 2
    images = more.arrays["image"]
    assert images.min() == 0.0 and DIMMEST <= images.max((1, 2, 3)).min() <= images.max() <= 1.0
    places = [np.argwhere(image[0]) for image in images]
    assert all(len(found) == 16 and (np.abs(found.mean(0) - 7.5) <= 2).all() for found in places)
    assert len({tuple(found[0]) for found in places}) > 5


def test_a_model_without_a_batch_gets_samples_of_its_own_shape(random: np.random.Generator) -> None:
    spec = ModelSpec("m", (tensor("x", "FP32", 3), tensor("rate", "INT64")), (tensor("y", "FP32", 3),), 0)
    arrays = {"x": random.standard_normal((2, 3)).astype(np.float32), "rate": np.array([8, 16])}
    more = augmented(spec, Samples(arrays))
    assert more is not None and more.arrays["x"].shape == (30, 3) and set(more.arrays["rate"]) == {8, 16}


def test_columns_of_different_kinds_get_noise_of_their_own_width(random: np.random.Generator) -> None:
    """An age, an income, a latitude and a constant in one row."""
    columns = [
        random.uniform(18, 90, 16),
        random.uniform(1e4, 2e5, 16),
        random.uniform(-90, 90, 16),
        np.ones(16),
    ]
    x = np.stack(columns, 1).astype(np.float32)
    more = augmented(NUMBERS, Samples({"x": x}))
    assert more is not None
    moved = (more.arrays["x"] - x[np.arange(16)]).std(0) / x.std(0).clip(1e-9)
    assert ((moved[:3] > 0.2) & (moved[:3] < 1.0)).all() and moved[3] == 0.0


@pytest.mark.filterwarnings("error")
def test_infinities_stay_and_the_numbers_beside_them_are_moved(random: np.random.Generator) -> None:
    bias = random.standard_normal((16, 4)).astype(np.float32)
    bias[random.random(bias.shape) < 0.4] = -np.inf
    bias[0] = -np.inf
    more = augmented(NUMBERS, Samples({"x": bias}))
    assert more is not None
    origin = bias[np.arange(more.count) % 16]
    finite = np.isfinite(origin)
    assert np.array_equal(np.isneginf(more.arrays["x"]), ~finite) and not np.isnan(more.arrays["x"]).any()
    assert (more.arrays["x"][finite] != origin[finite]).mean() > 0.5


def test_a_column_of_whole_numbers_keeps_numbers_of_the_samples(random: np.random.Generator) -> None:
    """A length that a graph casts to an integer, beside numbers, and alone."""
    x = random.standard_normal((16, 4)).astype(np.float32)
    x[:, 2] = lengths = random.integers(1, 40, 16)
    more = augmented(NUMBERS, Samples({"x": x}))
    alone = augmented(model(tensor("x", "FP32", -1)), Samples({"x": lengths.astype(np.float32)}))
    assert more is not None and alone is not None
    for moved in (more.arrays["x"][:, 2], alone.arrays["x"]):
        assert set(moved) <= set(lengths) and (moved != lengths).any()
    others = more.arrays["x"][:, [0, 1, 3]]
    assert (others != np.rint(others)).all()


def test_letters_in_floating_point_continue_as_those_of_another_sample(random: np.random.Generator) -> None:
    letters = random.integers(0, 50, (16, 24)).astype(np.float32)
    more = augmented(model(tensor("x", "FP32", -1, 24)), Samples({"x": letters}))
    assert more is not None
    for row in more.arrays["x"]:
        assert any(
            (row[:cut] == one[:cut]).all() and (row[cut:] == other[cut:]).all()
            for cut in range(25)
            for one in letters
            for other in letters
        )


def test_an_input_without_elements_is_left_as_it_is(random: np.random.Generator) -> None:
    """A cache of keys that is empty before the first step."""
    spec = model(tensor("x", "FP32", -1, 4), tensor("past", "FP32", -1, -1, 8))
    samples = Samples(
        {"x": random.standard_normal((8, 4)).astype(np.float32), "past": np.zeros((8, 0, 8), np.float32)}
    )
    more = augmented(spec, samples)
    assert more is not None and more.arrays["past"].shape[1:] == (0, 8)
