"""The known name that was probably meant by an unknown one."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A known name with these initials ("lr": learning_rate), or else the most similar one. ``known`` is not empty."""
    known = list(known)
    initials = [one for one in known if "_" in one and name == "".join(word[:1] for word in one.split("_"))]
    return initials[0] if initials else difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
