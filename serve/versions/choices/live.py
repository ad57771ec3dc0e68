"""The times of live batches are held against what was measured."""

from collections.abc import Mapping

OFF = 1.5  # times as long, or as short: the event loop and other models take their share of the cores as well
_FEWEST_S = 0.25  # of batches; less says nothing
Batches = Mapping[int, tuple[int, int]]  # by rows: how many, and their nanoseconds in sum


def since(before: Batches, now: Batches) -> dict[int, tuple[int, int]]:
    """The batches that were run between two looks."""
    found: dict[int, tuple[int, int]] = {}
    for rows, (count, spent_ns) in now.items():
        earlier, earlier_ns = before.get(rows, (0, 0))
        if count > earlier:
            found[rows] = (count - earlier, spent_ns - earlier_ns)
    return found


def are_enough(batches: Batches) -> bool:
    """True if the batches were enough to tell what one takes."""
    return sum(spent_ns for _, spent_ns in batches.values()) / 1e9 >= _FEWEST_S


def share_on_core(batches: Batches, had_s: float, waited_s: float) -> float:
    """The share of the batches' time in which the device thread had a core, of those seconds in which it had one and in
    which it waited for one: they are those of the other models' batches and of loading, too."""
    busy_s = max(sum(spent_ns for _, spent_ns in batches.values()) / 1e9, had_s + waited_s)
    return max(1.0 - waited_s / busy_s, 0.1) if busy_s else 1.0


def seconds_by_rows(batches: Batches, on_core: float = 1.0) -> dict[int, float]:
    """Seconds of one batch on the core, by its rows. ``on_core``: as `share_on_core`."""
    return {rows: on_core * spent_ns / 1e9 / count for rows, (count, spent_ns) in batches.items()}


def rows_per_batch(batches: Batches) -> float:
    """The rows of a batch in the mean; 0 without batches."""
    return sum(rows * count for rows, (count, _) in batches.items()) / max(
        sum(n for n, _ in batches.values()), 1
    )


def of_new_sizes(batches: Batches, expected: Mapping[int, float]) -> dict[int, tuple[int, int]]:
    """The batches that are smaller or larger than all whose time is expected: other callers sent them."""
    return {
        rows: one
        for rows, one in batches.items()
        if not expected or not min(expected) <= rows <= max(expected)
    }


def off_by(batches: Batches, expected: Mapping[int, float], on_core: float = 1.0) -> float | None:
    """The ratio of the batches' time to the expected time; None where batches of the expected sizes were too few.

    ``expected``: seconds of one batch by rows; between two sizes a row costs the same. ``on_core``: as `share_on_core`.
    """
    taken, new = seconds_by_rows(batches, on_core), of_new_sizes(batches, expected)
    known = {rows: one for rows, one in batches.items() if rows not in new}
    if not are_enough(known):
        return None
    busy_s = sum(count * taken[rows] for rows, (count, _) in known.items())
    return busy_s / sum(count * expected_seconds(expected, rows) for rows, (count, _) in known.items())


def expected_seconds(expected: Mapping[int, float], rows: int) -> float:
    sizes = sorted(expected)
    below = max(size for size in sizes if size <= rows)
    above = min(size for size in sizes if size >= rows)
    if below >= above:
        return expected[below]
    share = (rows - below) / (above - below)
    return expected[below] + share * (expected[above] - expected[below])
