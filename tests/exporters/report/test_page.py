"""Claims about what a reader of a conversion is told."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from halfeven.exporters.gate.diagnosis import diagnosed
from halfeven.exporters.gate.parity import judge, noise_of
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.report import plots
from halfeven.exporters.report.gate_rows import gate_rows
from halfeven.exporters.report.page import number_text, render_html, render_terminal, size_text
from halfeven.models.spec.spec import Dim, TensorSpec
from rich.console import Console

from tests.exporters.report.page_facts import FINDINGS, KEPT, SPEC, facts, report


def terminal(reply: dict, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(render_terminal(reply))
        return console.export_text()


class Elements(HTMLParser):
    """Every element with its attributes, and every text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str, kind: str) -> list[dict[str, str | None]]:
        return [
            found
            for name, found in self.elements
            if name == tag and kind in (found.get("class") or "").split()
        ]


def test_a_passed_conversion_is_told_whole(random):
    parity = report(random, 1e-7)
    page = Elements(render_html(facts(parity)))
    assert parity["passed"] and f"Equal on {parity['samples']} of your samples: " in page.text
    for reply in (
        "digits",
        "4f6b2e0c",
        "conv2d_3",
        "its output overflows half",
        "absmax 81204",
        "126.0 KB of 252.0 KB",
        "21 of 24",
        "halfeven parity digits@3",
        "2.13.0",
        "max_error_u = 3.5",
        "longest",
        "1, 2, 3, 64",
        f"{parity['max_error_u']:.3g}",
    ):
        assert reply in page.text, reply


def test_a_refusal_says_every_sentence_on_the_page_and_in_the_terminal(random):
    parity = report(random, 0.5)
    reply = facts(parity)
    page, table = Elements(render_html(reply)), terminal(reply)
    assert not parity["passed"] and "Refused" in page.text and "Equal on" not in page.text
    assert len(parity["failures"]) >= 4
    for failure in parity["failures"]:
        assert failure["message"] in page.text
        assert failure["message"] in table.replace("\n", " ").replace("  ", " ")


def test_the_terminal_prints_every_note(random):
    assert "  the batch stays 1 [y]" in terminal(facts(report(random, 0.0), notes=["the batch stays 1 [y]"]))


def test_every_sample_is_a_dot_and_every_slice_a_column_red_where_it_fails(random):
    parity = report(random, 3e-3)
    (output,) = parity["outputs"]
    page = Elements(render_html(facts(parity)))
    assert len(page.of("circle", "dot")) == 40
    over = sum(error > output["limit_u"] for error in output["per_sample_error_u"])
    assert len(page.of("circle", "over")) == over > 0
    assert len(page.of("rect", "column")) == 10 and len(page.of("div", "over")) == 2


def test_every_changed_first_choice_is_listed(random):
    parity = report(random, 0.5)
    flips = parity["outputs"][0]["decisions"]["flips"]
    rows = re.findall(r"<tr><td>(\d+)</td><td>–</td><td>(\d)</td><td>(\d)</td>", render_html(facts(parity)))
    assert flips and [(str(f["sample"]), str(f["original"]), str(f["half"])) for f in flips] == rows


def test_what_a_model_is_called_cannot_become_markup(random):
    evil = "<script>alert(1)</script>[red]"
    reply = facts(report(random, 1e-7), model=evil, reason=evil, environment={evil: evil})
    reply["forms"]["torch"]["kept"] = [dict.fromkeys(KEPT, evil)]
    page = Elements(render_html(reply))
    assert not [tag for tag, _ in page.elements if tag == "script"] and page.text.count(evil) >= 8
    assert evil in terminal(reply)


def test_the_page_needs_nothing_from_elsewhere(random):
    page = render_html(facts(report(random, 1e-7)))
    assert not re.search(r"https?:|url\(|@import|src=", page)
    assert not [tag for tag, _ in Elements(page).elements if tag in ("script", "link", "img", "iframe")]


def test_a_form_that_could_not_be_made_is_told_with_its_error(random):
    reply = facts(report(random, 1e-7))
    reply["forms"]["onnx"] = {"passed": False, "error": "aten.foo has no ONNX counterpart"}
    assert "aten.foo has no ONNX counterpart" in Elements(render_html(reply)).text
    assert "aten.foo has no ONNX counterpart" in terminal(reply)


def test_generated_samples_are_called_what_they_are(random):
    samples = {"source": "generated", "planning": 0, "judging": 1, "batch_sizes": [1]}
    page = Elements(render_html(facts(report(random, 1e-7), samples=samples)))
    assert "generated from the spec" in page.text and "none was left to choose the plan with" in page.text
    assert "generated samples: " in page.text and page.of("span", "amber")


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "too few to say"), (4, "too few to say"), (5, "fewer than 1 in 2 "), (8, "fewer than 1 in 3 "),
        (32, "fewer than 1 in 11 "), (300, "fewer than 1 in 100 "),
    ],
)  # fmt: skip
def test_the_headline_says_what_the_number_of_samples_allows(count: int, words: str) -> None:
    """The confidence is 95 %: a larger share of bad inputs would have shown itself in 19 of 20 draws of so many."""
    form = {"passed": True, "parity": {"samples": count, "outputs": []}}
    few = {"model": "m", "status": "live", "forms": {"torch": form}}
    for source, whose in (("given", "of your samples"), ("generated", "generated samples")):
        reply = few | {"samples": {"source": source}}
        for text in (Elements(render_html(reply)).text, terminal(reply)):
            assert f"Equal on {count} {whose}: {words}" in text
        assert ("judged on generated samples" in terminal(reply)) == (source == "generated")
    one_in = [int(word) for word in words.split() if word.isdigit()][-1:]
    assert all((1 - 1 / (k + 1)) ** count >= 0.05 >= (1 - 1 / k) ** count for k in one_in)


def test_perturbed_samples_are_counted_apart_and_more_are_asked_for_by_name() -> None:
    form = {
        "passed": True,
        "parity": {"samples": 8, "outputs": [], "perturbed": {"samples": 24, "max_error_u": 2.5}},
    }
    few = {
        "model": "m",
        "status": "live",
        "forms": {"torch": form},
        "samples": {"source": "given", "judging": 8},
    }
    for text in (Elements(render_html(few)).text, terminal(few)):
        assert "Equal on 8 of your samples and 24 perturbed ones: fewer than 1 in 3 " in text
        assert "--samples FILE" in text
    assert "24 perturbed copies, largest error2.5u" in Elements(render_html(few)).text
    form["parity"]["perturbed"] = None
    assert "perturbed" not in terminal(few) and "--samples" not in terminal(few)


def test_the_few_facts_of_a_failed_conversion_are_enough():
    reply = {"model": "m", "status": "refused", "forms": {"torch": {"passed": False, "error": "it raised"}}}
    assert "it raised" in Elements(render_html(reply)).text and "it raised" in terminal(reply)


def test_an_exact_answer_is_called_exact(random):
    assert "exact" in Elements(render_html(facts(report(random, 0.0)))).text
    assert "exact" in terminal(facts(report(random, 0.0)))


SHOWN = {
    "recommendation": ["not recommended", "half buys nothing here"],
    "curve": ["first astray", "pow_1", "errs by 70u", "3 nodes"],
    "search": [
        "37 trials",
        "tried on 4096 unseen ones",
        "errs by ∞u",
        "812",
        "it overflows",
        "No single node",
    ],
    "repairs": ["matmul_1", "scaled by a power of two", "214,003"],
    "profile": ["exp_1", "81204", "1.24×", "12.00 %", "add_3"],
    "weights": ["head.weight", "0.25", "kept", "of 7 tensors"],
    "casts": ["40 tensors are cast", "4.0 KB", "8.0 KB", "relu_1, cat_2", "and 3 more", "1.5 KB"],
    "worst": ["Sample 17", "row 34", "1.25u", "8×8", "-1.5", "0.125"],
}


@pytest.mark.parametrize("section", FINDINGS)
def test_every_finding_is_told_where_it_is_and_left_out_where_it_is_not(random, section):
    plain = facts(report(random, 1e-7))
    page = Elements(render_html(plain | {section: FINDINGS[section]})).text
    without = Elements(render_html(plain)).text
    assert all(reply in page for reply in SHOWN[section]), SHOWN[section]
    assert not all(reply in without for reply in SHOWN[section])


def test_nothing_that_was_found_can_become_markup(random):
    evil = "<script>alert(1)</script>"

    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poisoned(item) for key, item in value.items()}
        return [poisoned(item) for item in value] if isinstance(value, list) else _evil(value)

    def _evil(value):
        return evil if isinstance(value, str) else value

    page = Elements(render_html(facts(report(random, 1e-7)) | poisoned(FINDINGS)))
    assert not [tag for tag, _ in page.elements if tag == "script"] and page.text.count(evil) >= 20


def test_the_curve_has_a_dot_for_every_point_and_a_mark_where_it_goes_astray(random):
    plain = facts(report(random, 1e-7))
    page = Elements(render_html(plain | {"curve": FINDINGS["curve"]}))
    before = Elements(render_html(plain))
    assert len(page.of("circle", "dot")) - len(before.of("circle", "dot")) == 2
    assert len(page.of("path", "over")) == 1 and len(page.of("line", "first")) == 1


def test_a_curve_rises_with_the_error_and_the_limit_divides_it(random):
    errors = np.sort(random.uniform(0, 300, 40)).tolist()
    points = [{"at": i, "node": "n", "op": "o", "error_u": e, "lost": False} for i, e in enumerate(errors)]
    plot = plots.curve_plot({"nodes": 40, "astray_u": 64.0, "points": points, "first": None})
    heights = [dot.y for dot in plot.dots]
    assert heights == sorted(heights, reverse=True) and all(0 <= y <= plots.HEIGHT for y in heights)
    assert all(
        dot.over == (error > 64) == (dot.y < plot.astray_y)
        for dot, error in zip(plot.dots, errors, strict=True)
    )


def test_the_table_fits_80_columns_and_its_columns_have_a_legend(random):
    parity = report(random, 1e-4)
    for output in parity["outputs"]:
        output["name"] = "last_hidden_state"
    reply = facts(parity)
    for form in reply["forms"].values():
        form |= {"nodes": 1204, "half_nodes": 1180, "casts": 120, "kept": [{}] * 24}
    lines = terminal(reply, width=80).splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    (head,) = [line for line in lines if line.startswith("form")]
    for word in head.replace("u/limit", "u").split()[3:]:
        assert f"{word}: " in " ".join(lines)
    assert "passed" in " ".join(lines) and "1180/1204" in " ".join(lines)


def test_the_floor_and_the_verdict_are_told(random):
    original = random.standard_normal((40, 10)).astype(np.float32)

    def judged(error: float):
        half = original + np.float32(error) * random.standard_normal(original.shape).astype(np.float32)
        return judge(SPEC, "fp16", [Trial(tuple(range(40)), {"logits": original}, {"logits": half})])

    for error, floor, verdict in ((5e-3, 1e-5, "range"), (5e-3, 4e-3, "precision"), (1e-4, 8e-5, "equal")):
        parity = diagnosed(judged(error), judged(floor)).to_json()
        (found,) = parity["diagnoses"]
        page, table = Elements(render_html(facts(parity))), terminal(facts(parity))
        assert found["verdict"] == verdict and f"{found['floor_u']:.3g}u" in page.text
        assert len(page.of("div", "floor")) == 2
        if verdict == "equal":
            assert f"where {found['floor_u']:.3g}u is the best possible for FP16" in table
        else:
            assert found["message"] in page.text and found["message"] in " ".join(table.split())


def test_the_gate_is_a_table_of_what_was_asked_and_what_held(random):
    good, bad = (report(random, error)["outputs"][0] for error in (1e-7, 0.5))
    rules = [row.rule.split(" (")[0] for row in gate_rows(good)]
    assert len(rules) == 8 and all(row.held for row in gate_rows(good))
    assert [row.rule.split(" (")[0] for row in gate_rows(bad)] == rules
    broken = {failure["rule"] for failure in bad["failures"]}
    assert sum(not row.held for row in gate_rows(bad)) == len(broken) >= 4


def test_after_a_mask_has_failed_nothing_more_is_asked(random):
    original = random.standard_normal((4, 10)).astype(np.float32)
    half = original.copy()
    half[1, 1] = np.nan
    found = judge(SPEC, "fp16", [Trial((0, 1, 2, 3), {"logits": original}, {"logits": half})]).to_json()
    assert [row.held for row in gate_rows(found["outputs"][0])] == [True, False]


def test_a_table_of_integers_counts_what_differs_and_what_ties():
    output = {"datatype": "INT64", "different": 2, "tied": 3, "failures": [{"rule": "equal"}]}
    row = gate_rows(output)[-1]
    assert row.found == "2 differ, 3 tie" and not row.held


def test_an_error_without_bound_is_drawn_at_the_top_and_called_so():
    bar, plot = plots.error_bar(None, 4.0), plots.error_plot([1.0, None, 2.0], 4.0)
    assert bar.over and bar.value == 100.0
    assert [dot.endless for dot in plot.dots] == [False, True, False]
    assert plot.dots[1].y < min(plot.dots[0].y, plot.dots[2].y) and number_text(None) == "∞"


def test_higher_errors_are_drawn_higher_and_the_limit_divides_them(random):
    for most in (5.0, 5000.0):
        errors = np.sort(random.uniform(0, most, 50)).tolist()
        plot = plots.error_plot(errors, 4.0)
        heights = [dot.y for dot in plot.dots]
        assert heights == sorted(heights, reverse=True)
        assert all(dot.over == (error > 4.0) for dot, error in zip(plot.dots, errors, strict=True))
        assert all(dot.over == (dot.y < plot.limit_y) for dot in plot.dots)
        assert all(0 <= dot.y <= plots.HEIGHT for dot in plot.dots) and plot.logarithmic == (most > 12)


def test_a_limit_of_zero_and_no_samples_can_be_drawn():
    assert plots.error_plot([], 0.0).dots == () and plots.error_bar(0.0, 0.0).over is False
    assert plots.error_plot([0.0, 1.0], 0.0).dots[1].over


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KB"), (3 << 30, "3.0 GB"), (None, "–")],
)
def test_sizes_are_told_in_powers_of_1024(count, text):
    assert size_text(count) == text


def test_a_ranking_is_told_in_the_terminal_and_in_the_page(random: np.random.Generator) -> None:
    spec = replace(SPEC, outputs=(TensorSpec("match", "FP32", (Dim(), Dim(1, 1)), "score"),))
    original = (1.0 / (1.0 + np.exp(-random.uniform(6, 13, (40, 1))))).astype(np.float32)
    half = original.astype(np.float16).astype(np.float32)
    parity = judge(spec, "fp16", [Trial(tuple(range(40)), {"match": original}, {"match": half})]).to_json()
    order = parity["outputs"][0]["order"]
    reply = terminal(facts(parity))
    assert f"'match' ranks 40 samples: {order['tied']} of {order['pairs']} pairs tie, 0 swap beyond" in reply
    assert "gives the same number to" in reply
    page = render_html(facts(parity))
    assert "pairs distinct in FP32 that tie" in page and "ten best kept" in page


def test_a_limit_that_fp32_itself_widened_is_named_on_the_page_and_in_the_terminal(
    random: np.random.Generator,
) -> None:
    original = random.standard_normal((40, 10)).astype(np.float32)
    again = original.copy()
    again[3] = original[3, ::-1]  # another order of what ties: as large as the values themselves

    def judged(itself: np.ndarray) -> dict:
        rows = tuple(range(40))
        noise = noise_of(SPEC, [Trial(rows, {"logits": original}, {"logits": itself})])
        return judge(
            SPEC, "fp16", [Trial(rows, {"logits": original}, {"logits": original})], noise=noise
        ).to_json()

    for itself, expected in ((again, True), (original, False)):
        reply = facts(judged(itself))
        for page in (render_html(reply), terminal(reply)):
            assert ("the FP32 model itself differs" in " ".join(page.split())) == expected
