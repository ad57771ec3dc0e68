"""Tells masks, types and positions by the name of an input, word by word: an input ``masked_image`` is not a mask."""

import re

from .spec import TensorSpec

_IDS = {"id", "ids", "index", "indices"}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words(name: str) -> list[str]:
    """The words of a name in small letters, without numbers: attentionMask_2 has two."""
    return [word.lower() for word in _WORD.findall(name)]


def is_mask(tensor: TensorSpec) -> bool:
    """The last word says what a thing is: ``attention_mask`` and ``attnmask`` are masks, ``mask_embeddings`` none."""
    found = words(tensor.name)
    return bool(found) and found[-1].endswith(("mask", "masks"))


def has_types(tensor: TensorSpec) -> bool:
    """True if the input's name says that it holds the kind of each token (``token_type_ids``): small integers."""
    return _thing(tensor) in ("type", "types")


def has_positions(tensor: TensorSpec) -> bool:
    """True if the input's name says that it holds positions in a sequence (``position_ids``)."""
    return _thing(tensor) in ("position", "positions", "pos")


def _thing(tensor: TensorSpec) -> str:
    """The last word of the name, or that before ``ids``: ``type_embeddings`` and ``pos_tags`` are other things."""
    found = words(tensor.name)
    return next((word for word in reversed(found) if word not in _IDS), "")
