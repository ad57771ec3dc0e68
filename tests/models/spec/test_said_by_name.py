"""Names say what an input has by whole words, and the last one says what it is."""

import numpy as np
import pytest
from halfeven.exporters.inputs.synthetic import adversarial, generate
from halfeven.models.spec.said_by_name import has_positions, has_types, is_mask
from halfeven.models.spec.spec import ModelSpec

from tests.specs import tensor


@pytest.mark.parametrize(
    "name",
    [
        "mask",
        "attention_mask",
        "attentionMask",
        "decoder_attention_mask_2",
        "attnmask",
        "l_pixel_mask_",
        "Masks",
    ],
)
def test_masks(name: str) -> None:
    assert is_mask(tensor(name, "FP32", -1, 4))


@pytest.mark.parametrize(
    "name",
    [
        "masked_image",
        "masked_image_latents",
        "mask_embeddings",
        "attention_mask_logits",
        "mask_ids",
        "unmasked",
        "damask_rose",
        "x",
        "_0",
    ],
)
def test_what_only_begins_like_a_mask_is_none(name: str) -> None:
    assert not is_mask(tensor(name, "FP32", -1, 4))


@pytest.mark.parametrize(
    "name",
    [
        "masked_image",
        "prototypes",
        "composition",
        "typed",
        "typewriter",
        "type_embeddings",
        "position_bias",
        "pos_tags",
        "ids",
    ],
)
def test_numbers_whose_name_has_such_letters_are_drawn_as_numbers(name: str) -> None:
    each = tensor(name, "FP32", -1, 16)
    assert not has_types(each) and not has_positions(each)
    spec = ModelSpec("m", (each,), (tensor("y", "FP32", -1, 3),), 8)
    samples = generate(spec, 32)
    assert np.abs(samples.arrays[name] - np.round(samples.arrays[name])).max() > 0.1
    assert "zeros" in dict(adversarial(spec, samples)), "it is multiplied as numbers are"


@pytest.mark.parametrize(
    "name", ["token_type_ids", "tokenTypeIds", "segment_type", "position_ids", "positionIds"]
)
def test_types_and_positions(name: str) -> None:
    each = tensor(name, "INT64", -1, 16)
    assert has_types(each) != has_positions(each)
