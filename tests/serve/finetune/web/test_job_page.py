"""The page of a fine-tuning job: what it says first, what it draws, and that nothing breaks or escapes it."""

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from halfeven.serve.finetune.web.job_page import (
    HEIGHT,
    WIDTH,
    gate_checks,
    loss_curve,
    norm_curve,
    render_job,
    scale_curve,
    x_ticks,
)

from tests.serve.finetune.web.shown_job import a_job, the_gate, the_steps

HOSTILE = "<script>alert('ü')</script>\"'&"


def failed(code: str, message: str, **ours: Any) -> dict[str, Any]:
    return {**a_job("failed", **ours), "error": {"code": code, "message": message, "param": None}}


class Tags(HTMLParser):
    """Every tag with its attributes, and the text that a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def marked(self, kind: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if kind in (attributes.get("class") or "").split()]


def refreshes(page: str) -> bool:
    return any(tag == "meta" and more.get("http-equiv") == "refresh" for tag, more in Tags(page).tags)


@pytest.mark.parametrize("status", ["queued", "running"])
def test_a_page_of_a_job_that_has_not_ended_asks_for_itself_again(status: str) -> None:
    assert refreshes(render_job(a_job(status), [], []))


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled"])
def test_a_page_of_an_ended_job_stays_as_it_is(status: str) -> None:
    assert not refreshes(render_job(a_job(status), [], []))


def test_state_and_reason_come_before_every_number() -> None:
    sentence = "the onnx form has accuracy 0.4 on 216 of the parent's own judging samples"
    page = Tags(
        render_job(failed("METRIC_REGRESSED", sentence, gate=the_gate(0.9, 0.4)), the_steps(9), [])
    ).text
    assert (
        page.index("Refused") < page.index("METRIC_REGRESSED") < page.index(sentence) < page.index("skipped")
    )
    assert "Succeeded" not in page


def test_a_version_that_is_held_is_called_so_with_its_reason() -> None:
    promotion = {
        "state": "held",
        "code": "NO_JUDGING_SET",
        "message": "nothing judges it: halfeven promote net@2",
    }
    page = render_job(a_job(promotion=promotion), [], [])
    assert "<strong>Held</strong>" in page and "NO_JUDGING_SET" in page
    assert "halfeven promote net@2" in page and "is active." not in page


def test_a_version_that_learnt_nothing_is_called_not_promoted() -> None:
    promotion = {"state": "not promoted", "code": "NOTHING_LEARNT", "message": "no better on 36 rows"}
    page = render_job(a_job(promotion=promotion), [], [])
    assert "<strong>Not promoted</strong>" in page and "no better on 36 rows" in page


def test_a_failure_that_is_no_refusal_is_called_failed() -> None:
    page = Tags(render_job(failed("SCALE_COLLAPSE", "the loss scale stood at its floor"), [], [])).text
    assert "Failed" in page and "SCALE_COLLAPSE" in page and "Refused" not in page


def test_every_skipped_step_is_marked_at_its_place_in_the_colour_of_its_cause() -> None:
    causes = {3: "gradient overflow", 7: "gradient overflow", 11: "non-finite loss", 15: "sunspots"}
    page = Tags(render_job(a_job(), the_steps(20, causes), []))
    places = {
        kind: [mark["cx"] for mark in page.marked(kind) if "cx" in mark]
        for kind in ("overflow", "nonfinite", "other")
    }
    expected = {"overflow": (3, 7), "nonfinite": (11,), "other": (15,)}
    assert places == {kind: [f"{WIDTH * at / 20:.1f}" for at in steps] for kind, steps in expected.items()}
    assert "2 skipped: gradient overflow" in page.text
    assert "1 skipped: sunspots" in page.text


def test_the_scale_is_drawn_on_a_log2_axis_down_to_its_floor() -> None:
    scales = [2.0**power for power in (8, 4, 0)]
    curve = scale_curve([{"step": i, "scale": scale} for i, scale in enumerate(scales)], 2, 1.0)
    assert curve is not None and curve.limit_y is not None
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", curve.path)]
    first, middle, last = heights[0], heights[2], heights[4]
    assert middle - first == pytest.approx(last - middle, abs=0.11), "four halvings are as far as four others"
    assert last == pytest.approx(curve.limit_y, abs=0.06)
    assert "2⁸" in [label for _, label in curve.ticks] and first < middle < last


def test_a_line_breaks_where_a_number_is_not_finite_and_is_never_drawn_there() -> None:
    losses = [1.0, 0.9, None, math.nan, math.inf, 0.5, 0.4]
    curve = loss_curve([{"step": i, "loss": loss} for i, loss in enumerate(losses)], 6)
    assert curve is not None
    assert curve.path.count("M") == 2 and curve.path.count("L") == 2
    assert len(curve.missing) == 3
    assert "nan" not in curve.path and "inf" not in curve.path


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, -math.inf, 0.0, 5e-324, -1.0, 1e308, 10**400, "0.5", True]
)
def test_no_value_of_any_field_breaks_the_page(value: Any) -> None:
    step = {
        "step": 1,
        "epoch": 1,
        "loss": value,
        "scale": value,
        "grad_norm": value,
        "skipped": True,
        "cause": value,
    }
    progress = dict.fromkeys(("step", "total_steps", "loss", "scale", "skipped", "eta_seconds"), value)
    gate = the_gate()
    gate["active"]["held_out"]["logits"]["metrics"]["accuracy"] = gate["tolerance"] = value
    gate["forms"]["onnx"]["held_out"]["logits"]["comparison"] = dict.fromkeys(("at_most", "allowed"), value)
    job = a_job("running", progress=progress, gate=gate, summary={"last_loss": value, "seconds": value})
    job["hyperparameters"] = {"scale_floor": value, "clip_norm": value, "n_epochs": value}
    for steps in ([step], [step, {**step, "step": 2}], [{**step, "step": value}], [{}]):
        page = render_job(job, steps, [{"created_at": value, "level": value, "message": value}])
        assert page.rstrip().endswith("</html>")
        assert not re.search(r'(?:d|x1|y1|cx|cy|width)="[^"]*(?:nan|inf)', page)


def test_while_learning_rates_are_tried_the_page_says_how_many_are_done() -> None:
    page = Tags(render_job(a_job("running", progress={"rates_tried": 3, "rates": 7}), [], []))
    assert "each of 7 rates, 3 of them done" in page.text
    progress = {"rates_tried": 6, "rates": 7, "step": 1, "total_steps": 9}
    assert "of them done" not in Tags(render_job(a_job("running", progress=progress), [], [])).text


def test_a_job_that_has_only_begun_has_a_page_without_plots() -> None:
    job = {"id": "ftjob-1", "model": "digits", "status": "queued", "halfeven": None, "error": None}
    page = Tags(render_job(job, [], []))
    assert "Queued" in page.text and "(--jobs)" in page.text and not page.marked("line")


def test_hostile_text_is_shown_and_never_obeyed() -> None:
    event = {"created_at": 0, "level": HOSTILE, "message": HOSTILE}
    job = failed(HOSTILE, HOSTILE, gate=the_gate(), version=HOSTILE, summary={HOSTILE: HOSTILE})
    job |= {
        "model": f"{HOSTILE}@1",
        "hyperparameters": {HOSTILE: HOSTILE},
        "training_file": HOSTILE,
        "id": HOSTILE,
    }
    page = Tags(render_job(job, the_steps(3, {2: HOSTILE}), [event]))
    assert "script" not in [tag for tag, _ in page.tags]
    assert page.text.count(HOSTILE) >= 8
    known = (
        "class",
        "style",
        "title",
        "href",
        "id",
        "role",
        "lang",
        "name",
        "content",
        "charset",
        "http-equiv",
    )
    handlers = [name for _, more in page.tags for name in more if name.startswith("on") and name not in known]
    assert handlers == []


def test_the_page_asks_nobody_else_for_anything() -> None:
    page = Tags(render_job(a_job(gate=the_gate()), the_steps(30), []))
    asked = [
        more.get(name) for _, more in page.tags for name in ("src", "href", "xlink:href") if more.get(name)
    ]
    assert asked.count("data:,") == 1  # no icon
    assert all(str(path).startswith("../../../../") for path in asked if path != "data:,")


def test_a_version_that_was_made_is_linked_with_its_report_and_its_parent() -> None:
    links = {more.get("href") for tag, more in Tags(render_job(a_job(), [], [])).tags if tag == "a"}
    here, pages = "../../../../v1/models/digits/versions", {"", "jobs", "events", "docs"}
    links -= {f"../../../../{page}" for page in pages}
    assert links == {f"{here}/2", f"{here}/2/report", f"{here}/2/lineage", f"{here}/1"}
    refused = render_job(failed("METRIC_REGRESSED", "worse", version=5), [], [])
    assert f'href="{here}/5/report"' in refused


def test_the_gate_card_gives_each_set_its_own_verdict() -> None:
    forgetting = the_gate(0.975, 0.60)
    assert [(row["set"], row["metric"], row["passed"]) for row in gate_checks(forgetting)] == [
        ("held_out", "accuracy", True),
        ("held_out", "auroc", None),
        ("judging", "accuracy", False),
        ("judging", "auroc", None),
    ]
    page = Tags(render_job(failed("METRIC_REGRESSED", "forgot", gate=forgetting), [], []))
    assert "11.20 %" in page.text and "97.50 %" in page.text and "60.00 %" in page.text
    assert len(page.marked("bad")) >= 2


def test_the_clip_is_drawn_only_where_it_is_near_the_norms() -> None:
    steps = [{"step": i, "grad_norm": norm} for i, norm in enumerate((0.5, 0.8, 1.2))]
    near, far = norm_curve(steps, 2, 1.0), norm_curve(steps, 2, 1e6)
    assert near is not None and near.limit_y is not None and 0 < near.limit_y < HEIGHT
    assert far is not None and far.limit_y is None


def test_while_it_runs_the_axis_reaches_to_the_planned_last_step() -> None:
    job = a_job("running", progress={"step": 30, "total_steps": 120})
    page = render_job(job, the_steps(30), [])
    (path, *_) = re.findall(r'<path class="line" d="([^"]+)"', page)
    furthest = max(float(x) for x in re.findall(r"[ML]([\d.]+) ", path))
    assert furthest == pytest.approx(WIDTH * 30 / 120, abs=0.1)
    assert [label for _, label in x_ticks(120)][-1] == "120"


def test_a_thinned_series_says_so_and_gives_the_count_of_all_skipped_steps() -> None:
    sentence = "Not every step is drawn; 2 were skipped in all."
    assert sentence in Tags(render_job(a_job(), the_steps(120)[::3], [])).text
    assert sentence not in Tags(render_job(a_job(), the_steps(120), [])).text
