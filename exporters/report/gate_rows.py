"""The gate as a table: for one output each rule with what was found, what was asked, and whether it held.

Reads an output of ``parity.json``; decides nothing. A rule that was not asked (a mask had already failed, an
output that decides nothing) has no row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """``found`` and ``asked`` are numbers to be shown as ``unit`` says (``u``, ``dB``, ``share``, ``nats``)
    or words (no unit). ``found`` None has no bound.
    """

    rule: str
    found: float | str | None
    asked: str
    unit: str
    held: bool


def gate_rows(output: Mapping[str, Any]) -> list[Row]:
    return list(_rows(output))


def _rows(output: Mapping[str, Any]) -> Iterator[Row]:
    broken = {failure["rule"]: failure for failure in output.get("failures", ())}
    yield _words("names, shapes, datatypes", "the same", broken, "shape", "datatype")
    if broken.keys() & {"shape", "datatype"}:
        return
    if output["datatype"].startswith(("FP", "BF")):
        yield _words("NaN, infinities, sentinels", "matched", broken, "masks", "sentinels")
        if not broken.keys() & {"masks", "sentinels"}:
            yield from _numbers(output, broken)
            yield from _decisions(output.get("decisions"), broken)
            yield from _order(output.get("order"), broken)
    else:
        ties = output["tied"]
        found = f"{output['different']} differ" + (f", {ties} tie" if ties else "")
        yield Row("integers and booleans", found, "equal, but for ties", "", "equal" not in broken)


def _words(rule: str, good: str, broken: Mapping[str, Any], *rules: str) -> Row:
    held = not any(name in broken for name in rules)
    return Row(rule, good if held else "different", good, "", held)


def _numbers(output: Mapping[str, Any], broken: Mapping[str, Any]) -> Iterator[Row]:
    limit = f"at most {output['limit_u']:g}u"
    yield Row("largest error of a sample", output["max_error_u"], limit, "u", "max_error" not in broken)
    held = "sqnr" not in broken
    yield Row(
        "signal to noise, pooled", output["sqnr_db"], f"at least {output['min_sqnr_db']:.1f}", "dB", held
    )
    if worst := output.get("worst_slice"):
        asked = f"at least {output['min_slice_sqnr_db']:g}"
        rule = f"worst slice (axis {worst['axis']}, index {worst['index']})"
        yield Row(rule, worst["db"], asked, "dB", "slice_sqnr" not in broken)


def _decisions(found: Mapping[str, Any] | None, broken: Mapping[str, Any]) -> Iterator[Row]:
    if not found:
        return
    yield Row("divergence", found["kl_nats"], f"at most {found['kl_limit']:g}", "nats", "kl" not in broken)
    flips = f"{found['flipped']} of {found['decisions']}"
    asked = f"at most {100 * found['max_flips']:g} %"
    yield Row("first choices changed", flips, asked, "", "flips" not in broken)
    if found["accuracy_half"] is not None:
        asked = f"as FP32: {100 * found['accuracy_original']:.2f} %"
        held = "accuracy" not in broken
        yield Row(f"accuracy of {found['graded']} graded", found["accuracy_half"], asked, "share", held)


def _order(found: Mapping[str, Any] | None, broken: Mapping[str, Any]) -> Iterator[Row]:
    if not found:
        return
    asked = f"at most {100 * found['max_ties']:g} %"
    ties = f"{found['tied']} of {found['pairs']}"
    yield Row("pairs distinct in FP32 that tie", ties + few_pairs(found), asked, "", "ties" not in broken)
    swaps = f"{found['swapped']} of {found['apart']}"
    asked = f"at most {100 * found['max_swaps']:g} %"
    yield Row("pairs beyond the allowed error that swap", swaps, asked, "", "swaps" not in broken)
    yield Row("widest swap, of the ranking's spread", found["swap_u"], "shown, not judged", "u", True)
    if (overlap := found["top10_overlap"]) is not None:
        asked = f"at least {100 * found['min_top10_overlap']:g} %"
        yield Row("ten best kept", overlap, asked, "share", "top10" not in broken)


def few_pairs(found: Mapping[str, Any]) -> str:
    """A sentence where the judged pairs are too few to show ``max_ties``: n pairs without a tie bound the share of ties
    by 3/n at 95 %; empty where they suffice."""
    share = found["max_ties"]
    if not share or found["tied"] > 1 or found["pairs"] >= 3 / share:
        return ""
    return f" (too few to show {100 * share:g} %)"
