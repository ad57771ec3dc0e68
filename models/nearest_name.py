"""The known name that was probably meant by an unknown one."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A known name with these initials ("lr": learning_rate), or else the most similar one. ``known`` is not empty."""
    known = list(known)
    initials = [one for one in known if "_" in one and name == "".join(word[:1] for word in one.split("_"))]
    return initials[0] if initials else _most_similar(name, known)


def _most_similar(name: str, known: list[str]) -> str:
    """The name that `difflib.get_close_matches` finds, which compares all names in full."""
    compared, nearest, best = difflib.SequenceMatcher(), known[0], -1.0
    compared.set_seq2(name)
    for one in known:
        compared.set_seq1(one)
        if (
            compared.real_quick_ratio() > best
            and compared.quick_ratio() > best
            and (ratio := compared.ratio()) > best
        ):
            nearest, best = one, ratio
    return nearest
