"""The guard around each reader of files that strangers made.

A reader refuses with words what it knows to be wrong. What it did not foresee (an error of a library, of arithmetic on
a huge number, of too deep a nesting) ends in a refusal that names the file too: the file is at fault, not the program
that reads it. The log has the traceback, by which the reader learns its own words; a command shows it with
``HALFEVEN_LOG_LEVEL=debug``.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from ..errors import HalfevenError, Unforeseen, packages_asked_for

logger = logging.getLogger("halfeven.reading")
P = ParamSpec("P")
T = TypeVar("T")
AtPath = TypeVar("AtPath", Path, str)


@contextmanager
def reading(path: Path | str, what: str) -> Iterator[None]:
    """Around what reads the file at ``path``, which should be ``what``. Raises Unforeseen, and what the block raises of
    `errors.py` or of the system."""
    try:
        with packages_asked_for():  # the file is not at fault for a package that is not installed
            yield
    except HalfevenError:
        raise
    except Exception as error:
        # An OSError without a number is raised by a library (bz2, for example) for damaged bytes.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        logger.error("%s was not read as %s", path, what, exc_info=error if _has_a_log() else None)
        said = " ".join(str(error).split())[:300]
        raise Unforeseen(
            f"{path} cannot be read as {what} ({type(error).__name__}{f': {said}' if said else ''}): is the file "
            "whole, and of that kind?"
        ) from error


def guarded(
    what: str,
) -> Callable[[Callable[Concatenate[AtPath, P], T]], Callable[Concatenate[AtPath, P], T]]:
    """`reading` around a function whose first argument is the path."""

    def around(read: Callable[Concatenate[AtPath, P], T]) -> Callable[Concatenate[AtPath, P], T]:
        @wraps(read)
        def safely(path: AtPath, /, *arguments: P.args, **more: P.kwargs) -> T:
            with reading(path, what):
                return read(path, *arguments, **more)

        return safely

    return around


def _has_a_log() -> bool:
    """True if this process shows tracebacks: a server writes them to its log, a command shows them when asked to."""
    return logging.getLogger().hasHandlers() or os.environ.get("HALFEVEN_LOG_LEVEL") == "debug"
