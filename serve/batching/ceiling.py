"""The number of rows that the device has memory for is learned when it ran out, and remembered across restarts.

Rows are not equal where lengths are free, so a ceiling belongs to a row's size: it holds for rows of that many
elements and for longer ones, and one caller's long texts do not make all batches small. It never rises by itself,
because a try would delay a caller: to forget a ceiling, delete the file and load the model again.
"""

import json
import logging
import sys
from pathlib import Path

from ...models.files.durable import replace_text
from ...models.files.stored_json import stored_json

logger = logging.getLogger("halfeven.batcher")


class Ceiling:
    """The most rows of one run, by the elements of a row's inputs. ``path``: where it is kept (None: in memory).

    Only the device thread uses it; ``smallest`` may be read from any thread. ``known``: some size has a ceiling.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._rows = _read(path) if path is not None else {}  # elements of a row: rows
        self.known = bool(self._rows)

    def rows(self, row_elements: int) -> int:
        """The most rows of this size that are known to be safe; ``sys.maxsize`` where none ever failed."""
        return min([rows for size, rows in self._rows.items() if size <= row_elements], default=sys.maxsize)

    @property
    def smallest(self) -> int:
        """The lowest ceiling of any size, 0 where there is none: the number for metrics."""
        return min(list(self._rows.values()), default=0)

    def lower(self, row_elements: int, rows: int, keep: bool = True) -> None:
        """From now on no run of rows of this size has more than ``rows`` (at least 1).

        ``keep`` False: only until the process ends. Where the disk is full, the ceiling is forgotten at the end too.
        """
        rows = max(rows, 1)
        if rows >= self.rows(row_elements):
            return
        left = {size: most for size, most in self._rows.items() if size < row_elements or most < rows}
        self._rows = {**left, row_elements: rows}
        self.known = True
        if keep and self.path is not None:
            try:
                _write(self.path, self._rows)
            except OSError as error:
                logger.error(
                    "the row ceiling %d could not be kept in %s: %s", rows, self.path, error.strerror
                )


def _read(path: Path) -> dict[int, int]:
    try:
        entries = stored_json(path)["ceilings"]
        found = {int(entry["row_elements"]): int(entry["rows"]) for entry in entries}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, OverflowError, TypeError, KeyError) as error:
        logger.warning("%s is not a file of row ceilings and is left aside: %s", path, error)
        return {}
    return {size: rows for size, rows in found.items() if rows >= 1}


def _write(path: Path, rows: dict[int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"row_elements": size, "rows": most} for size, most in sorted(rows.items())]
    replace_text(path, json.dumps({"ceilings": entries}) + "\n")
