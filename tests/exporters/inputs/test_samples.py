"""Claims about the inputs that judge a half: those that are given, and those that are made up."""

import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples, checked_samples, load_samples
from halfeven.exporters.inputs.synthetic import adversarial, generate
from halfeven.models.errors import BadSamples
from halfeven.models.spec.spec import ModelSpec
from safetensors.numpy import save_file

from tests.exporters.inputs.tensors import ENCODER, encoder_arrays
from tests.specs import tensor


def written(folder: Path, arrays: dict[str, np.ndarray], name: str = "samples.safetensors") -> Path:
    save_file(arrays, folder / name)
    return folder / name


# Reading


def test_what_is_saved_comes_back_bit_for_bit(random, tmp_path):
    targets = {"logits": random.integers(0, 5, (7, 6))}
    saved = Samples(encoder_arrays(random, 7), targets)
    saved.save(tmp_path / "samples.safetensors")
    loaded = load_samples(tmp_path / "samples.safetensors", ENCODER)
    assert (loaded.count, loaded.source) == (7, "given")
    for name, array in saved.arrays.items():
        assert loaded.arrays[name].dtype == array.dtype
        assert loaded.arrays[name].tobytes() == array.tobytes()
    assert np.array_equal(loaded.targets["logits"], targets["logits"])


def test_samples_are_for_their_owner_alone_unless_it_is_said_that_they_are_not(random, tmp_path):
    """Callers sent the samples of a job, and the inputs on which a half drifted."""
    saved = Samples(encoder_arrays(random, 2), {})
    for options, others in (({}, 0), ({"private": False}, 0o044)):
        saved.save(file := tmp_path / "samples.safetensors", **options)
        assert file.stat().st_mode & 0o077 == others
        file.unlink()


def test_npz_is_read_like_safetensors(random, tmp_path):
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 3),), (tensor("y", "INT32", -1),))
    x, y = random.standard_normal((4, 3)).astype(np.float32), random.integers(0, 9, 4).astype(np.int32)
    np.savez_compressed(tmp_path / "samples.npz", **{"x": x, "target:y": y})
    loaded = load_samples(tmp_path / "samples.npz", spec)
    assert np.array_equal(loaded.arrays["x"], x) and np.array_equal(loaded.targets["y"], y)


def test_npz_of_another_byte_order_has_the_same_numbers_in_the_byte_order_of_the_model(random, tmp_path):
    arrays = {"x": random.standard_normal((5, 3)), "n": random.integers(0, 1 << 40, 5)}
    np.savez(
        tmp_path / "big.npz",
        **{name: array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()},
    )
    spec = ModelSpec("m", (tensor("x", "FP64", -1, 3), tensor("n", "INT64", -1)), (tensor("y", "FP32", -1),))
    loaded = load_samples(tmp_path / "big.npz", spec)
    for name, array in arrays.items():
        assert loaded.arrays[name].dtype.isnative and np.array_equal(loaded.arrays[name], array)


def test_a_model_that_is_not_batched_has_a_samples_axis_in_front(random, tmp_path):
    spec = ModelSpec("m", (tensor("x", "FP32", 3, 4),), (tensor("y", "FP32", -1, 2),), max_batch_size=0)
    x = random.standard_normal((5, 3, 4)).astype(np.float32)
    loaded = load_samples(written(tmp_path, {"x": x}), spec)
    batches = list(loaded.batches(spec.max_batch_size))
    assert [indices for indices, _ in batches] == [(row,) for row in range(5)]
    assert all(np.array_equal(arrays["x"], x[row]) for row, (_, arrays) in enumerate(batches))
    with pytest.raises(BadSamples, match="first axis = samples"):
        load_samples(written(tmp_path, {"x": x[0]}), spec)


def changed(random: np.random.Generator, **changes: np.ndarray | None) -> dict[str, np.ndarray]:
    arrays = {**encoder_arrays(random, 6), **changes}
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ids": None}, r"missing \['ids'\]"),
        ({"idz": np.zeros((6, 6))}, r"unknown \['idz'\]"),
        ({"target:nothing": np.zeros(6)}, r"unknown \['target:nothing'\]"),
        ({"ids": np.zeros((6, 6), np.int32)}, "tensor 'ids': expected datatype INT64, got INT32"),
        ({"scale": np.zeros((6, 3), np.float32)}, "tensor 'scale': expected datatype BF16, got FP32"),
        (
            {"ids": np.zeros((6, 13), np.int64)},
            r"tensor 'ids': expected shape \[-1,length=2..12\], got \[6,13\]",
        ),
        (
            {"ids": np.zeros((6, 7), np.int64)},
            "'attention_mask': expected 'length' to be 7 as in 'ids', got 6",
        ),
        ({"scale": np.zeros((5, 3), ml_dtypes.bfloat16)}, "tensor 'scale': expected 6 rows .*, got 5 rows"),
        ({"scale": np.zeros((0, 3), ml_dtypes.bfloat16)}, r"tensor 'scale': .* got \[0,3\]"),
        ({"target:pooled": np.zeros((4, 4))}, "tensor 'target:pooled': expected 6 rows .*, got 4 rows"),
        ({"target:pooled": np.zeros(())}, "tensor 'target:pooled': .* got no samples axis"),
        (
            {"target:logits": np.zeros((6, 6), np.float32)},
            "'target:logits': expected integer classes, got FP32",
        ),
        ({"target:logits": np.zeros(6, np.int64)}, r"'target:logits': expected shape .*, got \[6\]"),
        ({"target:logits": np.full((6, 6), 5)}, r"'target:logits', row 0: expected classes 0\.\.4 .*, got 5"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(random, tmp_path, changes, sentence):
    with pytest.raises(BadSamples, match=sentence):
        load_samples(written(tmp_path, changed(random, **changes)), ENCODER)


def test_the_first_row_of_a_wrong_class_is_named(random, tmp_path):
    targets = random.integers(-1, 5, (6, 6))
    row = int(random.integers(0, 6))
    targets[row, 3] = 77
    with pytest.raises(BadSamples, match=f"row {row}: .* got 77"):
        load_samples(written(tmp_path, changed(random, **{"target:logits": targets})), ENCODER)


def test_nothing_is_unpickled(tmp_path):
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 3),), (tensor("y", "FP32", -1),))
    np.savez(tmp_path / "samples.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(BadSamples, match="object arrays are not read"):
        load_samples(tmp_path / "samples.npz", spec)


def test_a_file_beyond_its_bound_is_refused_packed_or_not(random, tmp_path):
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 3),), (tensor("y", "FP32", -1),))
    zeros = np.zeros((4000, 3), np.float32)
    np.savez_compressed(tmp_path / "bomb.npz", x=zeros)
    assert (tmp_path / "bomb.npz").stat().st_size < 4096
    for path in (tmp_path / "bomb.npz", written(tmp_path, {"x": zeros})):
        with pytest.raises(BadSamples, match="expected at most 4096 bytes, got"):
            load_samples(path, spec, max_bytes=4096)


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04 no archive", b"\x00" * 64, b"{}", b"\xff" * 9])
def test_a_file_that_is_neither_is_refused(tmp_path, content):
    (tmp_path / "samples.safetensors").write_bytes(content)
    with pytest.raises(BadSamples, match=r"samples\.safetensors: "):
        load_samples(tmp_path / "samples.safetensors", ENCODER)


def test_an_archive_whose_member_is_cut_short_is_refused(random, tmp_path):
    np.savez(tmp_path / "whole.npz", ids=random.integers(0, 9, (500, 4)))
    with zipfile.ZipFile(tmp_path / "whole.npz") as whole, zipfile.ZipFile(tmp_path / "cut.npz", "w") as cut:
        cut.writestr("ids.npy", whole.read("ids.npy")[:900])
    with pytest.raises(BadSamples, match="not a plain npz file"):
        load_samples(tmp_path / "cut.npz", ENCODER)


def test_rows_that_take_no_bytes_are_bounded_too(tmp_path):
    spec = ModelSpec(
        "m", (tensor("x", "FP32", -1, "0..5"),), (tensor("y", "FP32", -1, "0..5"),), max_batch_size=8
    )
    for rows in (5, 2**40):
        head = b'{"x":{"dtype":"F32","shape":[%d,0],"data_offsets":[0,0]}}' % rows
        (tmp_path / str(rows)).write_bytes(len(head).to_bytes(8, "little") + head)
    assert load_samples(tmp_path / "5", spec).count == 5
    with pytest.raises(BadSamples, match="1099511627776 rows without an element"):
        load_samples(tmp_path / str(2**40), spec)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadSamples, match=r"nowhere\.npz: cannot be read"):
        load_samples(tmp_path / "nowhere.npz", ENCODER)
    np.save(tmp_path / "alone.npy", np.zeros((2, 4)))
    with pytest.raises(BadSamples, match=r"alone\.npy: an npy file, whose array has no name: .*numpy\.savez"):
        load_samples(tmp_path / "alone.npy", ENCODER)


# Dividing


def test_the_parts_are_disjoint_and_complete_and_always_the_same(random):
    count = int(random.integers(2, 40))
    samples = Samples({"x": np.arange(count)}, {"y": np.arange(count)})
    planning, judging = samples.split()
    assert sorted([*planning.arrays["x"], *judging.arrays["x"]]) == list(range(count))
    assert 0 <= judging.count - planning.count <= 1 and planning.count >= 1
    assert np.array_equal(judging.arrays["x"], judging.targets["y"])
    assert np.array_equal(samples.split()[1].arrays["x"], judging.arrays["x"])


def test_copies_of_a_sample_are_left_out_and_the_order_stays(random):
    x, right = random.standard_normal((6, 3)).astype(np.float32), random.integers(0, 5, 6)
    rows = [0, 1, 1, 2, 0, 3, 4, 5, 5]
    relabelled = np.append(right[rows], right[3] + 1)  # the same input with another target is another sample
    left = Samples({"x": x[[*rows, 3]]}, {"y": relabelled}).distinct()
    assert np.array_equal(left.arrays["x"], x[[0, 1, 2, 3, 4, 5, 3]])
    assert np.array_equal(left.targets["y"], [*right, right[3] + 1])
    assert left.distinct() is left


def test_a_single_sample_judges_and_none_is_left_to_plan():
    planning, judging = Samples({"x": np.zeros((1, 2))}).split()
    assert (planning.count, judging.count) == (0, 1)


def test_every_batch_is_full_and_every_sample_is_in_one(random):
    count, rows = int(random.integers(1, 30)), int(random.integers(1, 12))
    samples = Samples({"x": np.arange(count)})
    batches = list(samples.batches(rows))
    assert all(len(indices) == rows == len(arrays["x"]) for indices, arrays in batches)
    assert all(arrays["x"].tolist() == list(indices) for indices, arrays in batches)
    assert {index for indices, _ in batches for index in indices} == set(range(count))
    assert len(list(samples.batches(rows, most=1))) == 1


# Made up


def test_a_scalar_of_a_model_that_is_not_batched_stays_one() -> None:
    arrays = {"x": np.zeros((4, 3), np.float32), "rate": np.arange(4)}
    batches = [inputs for _, inputs in Samples(arrays).batches(0)]
    assert [inputs["rate"].shape for inputs in batches] == [()] * 4
    assert all(isinstance(inputs["rate"], np.ndarray) for inputs in batches)


def test_generated_samples_fit_the_spec_and_repeat_with_the_seed(random, tmp_path):
    seed = int(random.integers(0, 1 << 30))
    made = generate(ENCODER, 9, seed)
    assert (made.count, made.source) == (9, "generated")
    ENCODER.check_inputs({name: array[:8] for name, array in made.arrays.items()})
    again = generate(ENCODER, 9, seed)
    assert all(np.array_equal(array, again.arrays[name]) for name, array in made.arrays.items())
    other = generate(ENCODER, 9, seed + 1)
    assert not np.array_equal(made.arrays["scale"], other.arrays["scale"])
    made.save(tmp_path / "made.safetensors")
    assert load_samples(tmp_path / "made.safetensors", ENCODER).count == 9


def test_generated_samples_that_no_memory_holds_are_refused_before_they_are_drawn():
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 1 << 20, 1 << 20),), (tensor("y", "FP32", -1),))
    with pytest.raises(BadSamples, match=r"'x' of shape \[1048576, 1048576\] would take \d+ bytes"):
        generate(spec)


def test_generated_ids_are_small_and_masks_are_masks(random):
    spec = ModelSpec(
        "m",
        (
            tensor("ids", "INT64", -1, -1),
            tensor("token_type_ids", "INT64", -1, -1),
            tensor("attention_mask", "INT64", -1, -1),
            tensor("position_ids", "INT64", -1, -1),
            tensor("keep", "BOOL", -1, -1),
        ),
        (tensor("y", "FP32", -1),),
    )
    made = generate(spec, 200, int(random.integers(0, 1 << 30))).arrays
    assert len({array.shape for array in made.values()}) == 1, "unnamed free dimensions share their size"
    assert 10 < made["ids"].max() < 100 and made["ids"].min() >= 0
    assert set(np.unique(made["token_type_ids"])) == {0, 1} and set(np.unique(made["keep"])) == {False, True}
    mask = made["attention_mask"]
    assert (mask[:, 0] == 1).all() and (np.diff(mask, axis=1) <= 0).all() and mask.min() == 0
    assert np.array_equal(made["position_ids"][7], np.arange(mask.shape[1]))


@pytest.mark.parametrize("channels_first", [True, False])
def test_generated_pictures_are_pixels_through_scale_mean_and_deviation(random, channels_first):
    mean, deviation = random.uniform(0.3, 0.6, 3), random.uniform(0.2, 0.3, 3)
    picture = {"size": [20, 24], "color": "RGB", "scale": 1 / 255, "mean": list(mean), "std": list(deviation)}
    shape = (-1, 3, -1, -1) if channels_first else (-1, -1, -1, 3)
    spec = ModelSpec("m", (tensor("image", "FP32", *shape, picture=picture),), (tensor("y", "FP32", -1),))
    image = generate(spec, 4, int(random.integers(0, 1 << 30))).arrays["image"]
    image = np.moveaxis(image, 1, -1) if channels_first else image
    assert image.shape == (4, 20, 24, 3)
    pixels = (image * deviation + mean) * 255
    assert np.allclose(pixels, np.rint(pixels), atol=1e-3)
    assert -0.001 <= pixels.min() < 3 and 252 < pixels.max() <= 255.001


def test_numbers_are_standard_normal_and_bounds_are_kept(random):
    spec = ModelSpec("m", (tensor("x", "FP32", -1, "3..5", "40..900"),), (tensor("y", "FP32", -1),))
    x = generate(spec, 64, int(random.integers(0, 1 << 30))).arrays["x"]
    assert 3 <= x.shape[1] <= 5 and x.shape[2] == 40
    assert abs(x.mean()) < 0.1 and abs(x.std() - 1) < 0.1


def named(spec: ModelSpec, samples: Samples) -> dict[str, dict[str, np.ndarray]]:
    return dict(adversarial(spec, samples))


def test_adversarial_inputs_fit_the_spec_and_keep_integers_that_were_seen(random):
    samples = Samples(encoder_arrays(random, 20))
    made = named(ENCODER, samples)
    assert list(made) == [
        "zeros",
        "ones",
        "constant rows",
        "real × 0.01",
        "real × 4",
        "padded masks",
        "shortest",
        "longest",
    ]
    for arrays in made.values():
        assert ENCODER.check_inputs(arrays) == 4
        assert np.isin(arrays["ids"], samples.arrays["ids"]).all()
    assert not made["zeros"]["scale"].any() and (made["ones"]["scale"] == 1).all()
    real = samples.arrays["scale"][:4].astype(np.float64)
    assert np.allclose(made["real × 4"]["scale"].astype(np.float64), real * 4)
    assert np.allclose(made["real × 0.01"]["scale"].astype(np.float64), real * 0.01, rtol=0.01)


@pytest.mark.parametrize("rows", [8, 0])
def test_a_constant_row_holds_its_own_largest_value_everywhere(random, rows):
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 3),), (tensor("y", "FP32", -1),), max_batch_size=rows)
    values = np.linspace(-2, 2, 5, dtype=np.float32)  # in every column: all are of one kind
    x = random.permuted(np.broadcast_to(values[:, None], (5, 3)), axis=0)
    x = x if rows else np.stack([x, x], 1)
    x[0, 0] = np.inf
    made = named(spec, Samples({"x": x}))["constant rows"]["x"]
    real = np.where(np.isfinite(x), x, -np.inf)
    expected = real[:4].max(axis=1, keepdims=True) if rows else real[0].max()
    assert np.array_equal(made, np.broadcast_to(expected, made.shape)) and made.dtype == np.float32
    assert np.isin(made, x).all()


def test_a_constant_row_leaves_no_column_of_another_kind(random):
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 3),), (tensor("y", "FP32", -1),))
    x = (random.random((12, 3)) * [1.0, 90.0, 4e5]).astype(np.float32)  # a share, an age, an income
    made = named(spec, Samples({"x": x}))["constant rows"]["x"]
    assert np.array_equal(made, np.minimum(x[:4].max(1, keepdims=True), x.max(0)))


def test_free_dimensions_reach_their_bounds_or_twice_what_was_seen(random):
    made = named(ENCODER, Samples(encoder_arrays(random, 3)))
    assert made["shortest"]["ids"].shape[1] == 2 and made["longest"]["ids"].shape[1] == 12
    spec = ModelSpec("m", (tensor("x", "FP32", -1, -1, 3),), (tensor("y", "FP32", -1),))
    made = named(spec, Samples({"x": np.ones((2, 7, 3), np.float32)}))
    assert made["shortest"]["x"].shape == (4, 1, 3) and made["longest"]["x"].shape == (4, 14, 3)


def test_a_longer_input_repeats_the_sample_up_to_a_bound_that_is_more_than_twice_as_long(random):
    spec = ModelSpec("m", (tensor("ids", "INT64", -1, "1..90"),), (tensor("y", "FP32", -1),))
    ids = random.permutation(4 * 7).reshape(4, 7)
    longest = named(spec, Samples({"ids": ids}))["longest"]["ids"]
    assert longest.shape == (4, 90) and np.array_equal(longest, ids[:, np.arange(90) % 7])


def test_a_mask_of_numbers_is_padded_and_never_scaled(random):
    spec = ModelSpec(
        "m", (tensor("x", "FP32", -1, 5), tensor("mask", "FP32", -1, 5)), (tensor("y", "FP32", -1),)
    )
    mask = np.ones((6, 5), np.float32)
    made = named(spec, Samples({"x": random.standard_normal((6, 5)).astype(np.float32), "mask": mask}))
    assert all((arrays["mask"] == 1).all() for name, arrays in made.items() if name != "padded masks")
    assert set(np.unique(made["padded masks"]["mask"])) == {0.0, 1.0}


def test_padded_masks_differ_by_row_and_leave_at_least_one(random):
    mask = named(ENCODER, Samples(encoder_arrays(random, 5)))["padded masks"]["attention_mask"]
    lengths = mask.sum(axis=1)
    assert lengths.min() == 1 and len(set(lengths.tolist())) == 4
    zeroed = encoder_arrays(random, 5) | {"attention_mask": np.zeros((5, 6), np.int64)}
    assert named(ENCODER, Samples(zeroed))["padded masks"]["attention_mask"].sum(axis=1).tolist() == [1] * 4


def test_what_would_be_no_other_input_is_not_made(random):
    spec = ModelSpec("m", (tensor("ids", "INT64", -1, 8),), (tensor("y", "FP32", -1),))
    assert adversarial(spec, Samples({"ids": random.integers(0, 9, (5, 8))})) == []


def test_adversarial_inputs_of_a_model_that_is_not_batched_have_no_batch_axis(random):
    spec = ModelSpec("m", (tensor("x", "FP16", -1, 4),), (tensor("y", "FP32", -1),), max_batch_size=0)
    made = named(spec, Samples({"x": random.uniform(-6e4, 6e4, (3, 6, 4)).astype(np.float16)}))
    assert made["zeros"]["x"].shape == (6, 4) and made["longest"]["x"].shape == (12, 4)


def test_a_batch_is_no_larger_than_the_model_takes(random):
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 4),), (tensor("y", "FP32", -1),), max_batch_size=2)
    made = named(spec, Samples({"x": random.standard_normal((9, 4)).astype(np.float32)}))
    assert {arrays["x"].shape for arrays in made.values()} == {(2, 4)}


def test_npz_that_the_decompressor_or_zipfile_refuses_is_no_plain_npz(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", ids=np.arange(100))
    whole = (tmp_path / "whole.npz").read_bytes()
    begins = whole.index(b"ids.npy") + 7 + 20  # the name, and the field with 64-bit sizes
    directory = whole.rindex(b"PK\1\2")
    spoilt = {
        "damaged": whole[:begins] + b"\xff" * 8 + whole[begins + 8 :],
        "unknown method": whole[: directory + 10] + b"\x63\0" + whole[directory + 12 :],
        "encrypted": whole[: directory + 8] + b"\1\0" + whole[directory + 10 :],
    }
    for name, data in spoilt.items():
        (tmp_path / "spoilt.npz").write_bytes(data)
        with pytest.raises(BadSamples, match="not a plain npz file"):
            load_samples(tmp_path / "spoilt.npz", ENCODER)
            pytest.fail(name)


def test_a_member_of_an_npz_that_is_no_array_is_refused_by_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "samples.npz", "w") as archive:
        archive.writestr("ids.npy", b"no array")
    with pytest.raises(BadSamples, match="its member 'ids' is no npy file"):
        load_samples(tmp_path / "samples.npz", ENCODER)


def test_fp64_and_fp16_samples_of_an_fp32_input_are_converted_with_a_note(
    random: np.random.Generator,
) -> None:
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 3),), (tensor("y", "FP32", -1),))
    x = random.standard_normal((5, 3))
    read = checked_samples({"x": x}, spec)
    assert read.arrays["x"].dtype == np.float32 and np.allclose(read.arrays["x"], x, rtol=1e-6)
    assert read.notes == ("the samples of 'x' were FP64 and are converted to FP32",)
    assert checked_samples({"x": x.astype(np.float32)}, spec).notes == ()
    half = x.astype(np.float16)
    read = checked_samples({"x": half}, spec)
    assert read.arrays["x"].dtype == np.float32 and np.array_equal(read.arrays["x"], half)
    assert read.notes == ("the samples of 'x' were FP16 and are converted to FP32",)
    x[2, 1] = 1e300
    with pytest.raises(BadSamples, match=r"the sample 2 has 1e\+300, and the largest number of FP32 is"):
        checked_samples({"x": x}, spec)


def test_samples_of_a_bool_whose_byte_is_neither_0_nor_1_are_refused():
    spec = ModelSpec("m", (tensor("keep", "BOOL", -1, 2),), (tensor("y", "FP32", -1),))
    given = np.array([[0, 1], [1, 3]], np.uint8)
    with pytest.raises(BadSamples, match=r"tensor 'keep': values must lie in 0\.\.1, got 3 at \[1, 1\]"):
        checked_samples({"keep": given.view(np.bool_)}, spec)
    assert checked_samples({"keep": given.astype(np.bool_)}, spec).count == 2
