"""Names of a version's files and facts in format 1: the original was called *whole* there. Both formats are read."""

from collections.abc import Container
from typing import Any

_PRESENT, _OLDER = "original.", "whole."
_KEYS = {"whole_because": "original_because", "accuracy_whole": "accuracy_original"}


def name_in(files: Container[str], file: str) -> str:
    """The name that ``file`` has among ``files``: that of format 1 where they have it under that name alone."""
    older = _OLDER + file.removeprefix(_PRESENT) if file.startswith(_PRESENT) else file
    return older if older in files and file not in files else file


def in_present_words(facts: Any) -> Any:
    """The facts of a JSON file with today's keys. "whole" is a key of ours only beside "half": elsewhere it may be the
    name of a tensor."""
    if isinstance(facts, list):
        return [in_present_words(fact) for fact in facts]
    if not isinstance(facts, dict):
        return facts
    keys = _KEYS | ({"whole": "original"} if "half" in facts else {})
    return {keys.get(key, key): in_present_words(fact) for key, fact in facts.items()}
