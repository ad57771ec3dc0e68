"""The signature of a small encoder, and inputs for it."""

import ml_dtypes
import numpy as np
from halfeven.models.spec.spec import ModelSpec

from tests.specs import tensor

ENCODER = ModelSpec(
    "encoder",
    (
        tensor("ids", "INT64", -1, "length=2..12"),
        tensor("attention_mask", "INT64", -1, "length=2..12"),
        tensor("scale", "BF16", -1, 3),
    ),
    (tensor("logits", "FP32", -1, "length=2..12", 5, kind="logits"), tensor("pooled", "FP32", -1, 4)),
    max_batch_size=8,
)


def encoder_arrays(random: np.random.Generator, count: int, length: int = 6) -> dict[str, np.ndarray]:
    return {
        "ids": random.integers(0, 50, (count, length)),
        "attention_mask": np.ones((count, length), np.int64),
        "scale": random.standard_normal((count, 3)).astype(ml_dtypes.bfloat16),
    }
