"""A mistake that `halfeven lint` names, and the lines to write instead."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake. ``instead``: what to write in place of the lines ``first`` to ``last``, without the indentation of
    the first of them. They are the line of the mistake, but where lines are moved."""

    file: str
    line: int
    rule: str
    message: str
    instead: str
    first: int
    last: int
