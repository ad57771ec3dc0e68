"""Claims about the sections that other parts of the road add to a report, and whether half is worth it."""

import json
import math

import torch
from halfeven.exporters.graph.traffic import Cast, Worth
from halfeven.exporters.policy.weights import Entry
from halfeven.exporters.ranges.profile import profile
from halfeven.exporters.report import sections
from halfeven.exporters.search.delta_debugging import Found, Score
from halfeven.exporters.torch.autocast.ledger import Ledger
from halfeven.models.program import runnable
from torch import nn

from tests.programs import original


def json_of(section: dict) -> dict:
    return json.loads(json.dumps(section, allow_nan=False))


def test_the_search_is_told_with_what_each_kept_node_prevents():
    found = Found(
        kept=("pow_1",),
        certificate={"pow_1": Score(False, math.inf, "it overflows")},
        before=Score(False, math.inf, ""),
        after=Score(True, 1.5, ""),
        evaluations=9,
        minimal=True,
        unseen=4096,
    )
    reply = json_of(sections.search_section(found, {"pow_1": "pow"}))
    assert reply["certificate"] == [{"node": "pow_1", "op": "pow", "error_u": None, "reason": "it overflows"}]
    assert (reply["evaluations"], reply["unseen"]) == (9, 4096)
    assert reply["before"] == {"passed": False, "error_u": None} and reply["after"]["error_u"] == 1.5


def test_the_cast_map_is_told_largest_first_and_bounded():
    readers = ("a", "b", "c", "d", "e")
    casts = [Cast(f"n{i}", "float32", "float16", i, readers) for i in range(100)]
    reply = json_of(sections.casts_section(casts, 9999))
    assert (reply["count"], reply["bytes"], reply["bytes_before"]) == (100, 4950, 9999)
    assert len(reply["rows"]) == sections.MAX_ROWS and reply["rows"][0]["source"] == "n99"
    assert reply["rows"][0]["readers"] == ["a", "b", "c", "d"] and reply["rows"][0]["more"] == 1
    assert (reply["rows"][0]["from"], reply["rows"][0]["to"]) == ("float32", "float16")


def test_weights_that_stay_fp32_come_first_then_those_that_lost_most():
    def entry(name: str, error_u: float, saturated: int = 0) -> Entry:
        return Entry(name, 10, 0.1, error_u, 0.0, 0.0, saturated, 1.0)

    ledger = Ledger(
        (entry("small", 0.1), entry("large", 0.3), entry("kept", 0.01, 2), entry("lost", math.inf))
    )
    reply = json_of(sections.weights_section(ledger.to_json()))
    assert {row["weight"] for row in reply["worst"][:2]} == {"kept", "lost"} and reply["tensors"] == 4
    assert [(row["weight"], row["read_in"]) for row in reply["worst"][2:]] == [
        ("large", "half"),
        ("small", "half"),
    ]


def test_the_profile_is_told_nearest_to_the_ends_of_the_range_first():
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 40_000.0) * 2.0 + (x * 1e-9 + x) * 0.5

    found = original(Net(), {"x": torch.rand(8, 5) + 0.5})
    seen = profile(runnable(found.program), [[torch.rand(8, 5) + 0.5]])
    reply = json_of(sections.profile_section(seen.to_json()))
    assert reply["nodes"] == len(seen.nodes) and reply["rows"][0]["of_range"] > 1
    assert any(row["vanish"] == 1.0 for row in reply["rows"][:4])


def test_half_that_buys_nothing_is_not_recommended():
    pays, does_not = Worth(100, 99, True, "saves"), Worth(100, 100, False, "half buys nothing")
    assert sections.recommendation_section(pays) is None
    assert sections.recommendation_section(does_not) == {"convert": False, "message": "half buys nothing"}
