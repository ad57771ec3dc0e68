"""What the name of an input says of its numbers, by whole words: ``masked_image`` is no mask."""

import re

from ...models.spec import TensorSpec

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words(name: str) -> list[str]:
    """The words of a name in small letters, without numbers: attentionMask_2 has two."""
    return [word.lower() for word in _WORD.findall(name)]


def is_mask(tensor: TensorSpec) -> bool:
    """The last word says what a thing is: ``attention_mask`` and ``attnmask`` are masks, ``mask_embeddings`` none."""
    found = words(tensor.name)
    return bool(found) and found[-1].endswith(("mask", "masks"))


def has_types(tensor: TensorSpec) -> bool:
    """As ``token_type_ids``."""
    return not {"type", "types"}.isdisjoint(words(tensor.name))


def has_positions(tensor: TensorSpec) -> bool:
    """As ``position_ids``."""
    return not {"position", "positions", "pos"}.isdisjoint(words(tensor.name))
