"""Every class of the transformers library is built from its folder, also where it cannot compute attention as asked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.capture import sources

from tests.slow import EVERY_CASE

transformers: Any = pytest.importorskip("transformers")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_MAPPING  # noqa: E402

pytestmark = pytest.mark.slow
LARGEST = 3_000_000  # weights
SMALL = dict.fromkeys(
    ["hidden_size", "d_model", "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "image_size"], 32
) | dict.fromkeys(
    ["num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"], 2
) | {"num_hidden_layers": 1, "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1, "d_kv": 16, "head_dim": 16,
     "vocab_size": 99, "max_position_embeddings": 64, "patch_size": 8}  # fmt: skip


def saved(kind: Any, config_class: type, folder: Path) -> bool:
    """Write a small model of the class; False where these words make none, as each class has words of its own."""
    try:
        usual = config_class()
        config = config_class(**{word: size for word, size in SMALL.items() if hasattr(usual, word)})
        with torch.device("meta"):
            module = kind._from_config(config, attn_implementation="eager")
        if sum(weight.numel() for weight in module.parameters()) > LARGEST:
            return False
        kind._from_config(config, attn_implementation="eager").save_pretrained(folder)
    except Exception:
        return False
    return True


def kinds_without_sdpa() -> Iterator[tuple[Any, type]]:
    """Yield each class with its configuration, in an order that the seed draws: looking at one imports its code."""
    for name in np.random.default_rng().permutation(list(CONFIG_MAPPING)):
        try:
            kinds = MODEL_MAPPING[CONFIG_MAPPING[name]]
        except (KeyError, ValueError):  # no base model, or one that this release lacks
            continue
        kind = kinds[0] if isinstance(kinds, tuple) else kinds
        if not getattr(kind, "_supports_sdpa", False):
            yield kind, CONFIG_MAPPING[name]


def test_a_class_without_the_attention_that_is_asked_for_is_built_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    built = list[str]()
    for kind, config_class in kinds_without_sdpa():
        folder = tmp_path / kind.__name__
        if not saved(kind, config_class, folder):
            continue
        module = sources.transformers_module(torch, folder, "sdpa")
        assert type(module).__name__ == kind.__name__
        built.append(kind.__name__)
        if len(built) >= 3 and not EVERY_CASE:
            return
    assert len(built) > 40, built
