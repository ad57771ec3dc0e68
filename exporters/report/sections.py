"""The sections of a report beyond the gate, each made from the findings of another part of the road.

All are JSON of bounded size (a page and ``parity.json`` have them) and all are optional; `report/page.py` documents
them. Each is added to the facts under its name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...models.files.json_fields import finite
from ..graph.traffic import Cast, Worth
from ..search.delta_debugging import Found, outcome

MAX_ROWS = 24
MAX_READERS = 4


def search_section(found: Found, ops: Mapping[str, str]) -> dict[str, Any]:
    """``search``: the error under the policy alone, the error under the plan, and the error without each kept node."""
    certificate = [
        {"node": node, "op": ops.get(node, ""), "error_u": finite(score.error_u), "reason": score.reason}
        for node, score in found.certificate.items()
    ]
    return {
        "outcome": outcome(found),
        "evaluations": found.evaluations,
        "unseen": found.unseen,
        "minimal": found.minimal,
        "before": {"passed": found.before.passed, "error_u": finite(found.before.error_u)},
        "after": {"passed": found.after.passed, "error_u": finite(found.after.error_u)},
        "certificate": certificate,
    }


def casts_section(casts: Sequence[Cast], before: int) -> dict[str, Any]:
    """``casts``: of a half, those that move most first; ``before``: bytes before casts were placed."""
    rows = sorted(casts, key=lambda cast: -cast.bytes)
    shown = [
        {
            "source": cast.source,
            "from": cast.from_dtype,
            "to": cast.to_dtype,
            "bytes": cast.bytes,
            "readers": list(cast.readers[:MAX_READERS]),
            "more": max(0, len(cast.readers) - MAX_READERS),
        }
        for cast in rows[:MAX_ROWS]
    ]
    total = sum(cast.bytes for cast in rows)
    return {"count": len(rows), "bytes": total, "bytes_before": before, "rows": shown}


def recommendation_section(worth: Worth) -> dict[str, Any] | None:
    """``recommendation``: why not to convert, or None where half is worth it."""
    return None if worth.pays else {"convert": False, "message": worth.reason}


def weights_section(ledger: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``weights``: the rows of `ledger.Ledger.to_json` that lost most; those that stay FP32 first."""

    def lost(row: Mapping[str, Any]) -> float:
        return math.inf if row["fp32"] or row["error_u"] is None else row["error_u"]

    rows = sorted(ledger, key=lost, reverse=True)[:MAX_ROWS]
    worst = [
        {key: value for key, value in row.items() if key != "fp32"} | {"read_in": _read_in(row)}
        for row in rows
    ]
    return {"tensors": len(ledger), "worst": worst}


def profile_section(profile: Mapping[str, Any]) -> dict[str, Any]:
    """``profile``: of `profile.Profile.to_json` the nodes nearest to the ends of half's range, and the guards."""
    largest = 65504.0 if profile["half"] == "float16" else 3.3895313892515355e38
    rows = sorted(profile["nodes"], key=lambda node: -_danger(node["range"], largest))
    shown = [
        {
            "node": node["node"],
            "op": node["op"],
            "largest": node["range"]["largest"],
            "smallest": node["range"]["smallest"],
            "of_range": node["range"]["largest"] / largest,
            "vanish": node["range"]["shares"]["under_smallest"],
            "denormal": node["range"]["shares"]["under_normal"],
            "over": node["range"]["shares"]["over"],
            "sentinels": node["range"]["sentinels"],
        }
        for node in rows[:MAX_ROWS]
    ]
    vanishing = [dict(guard) for guard in profile.get("guards", ()) if guard.get("vanishes")]
    return {
        "nodes": len(rows),
        "batches": profile["batches"],
        "rows": shown,
        "guards": vanishing[:MAX_ROWS],
    }


def _danger(held: Mapping[str, Any], largest: float) -> float:
    shares = held["shares"]
    beyond = 2.0 if held["largest"] > largest else held["largest"] / largest
    return beyond + shares["over"] + shares["under_smallest"]


def _read_in(row: Mapping[str, Any]) -> str:
    return "FP32" if row["fp32"] else "half"
