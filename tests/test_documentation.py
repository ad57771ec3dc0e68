"""The pages: links and anchors lead somewhere, every page is in the navigation, paragraphs are short, the site builds.

HALFEVEN_TEST_WRITE=1 writes docs/llms.txt anew. tests/test_shell_blocks.py runs the commands of the pages.
"""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from halfeven.exporters.gate.limits import min_sqnr_db
from halfeven.models.spec.spec import UNIT_ROUNDOFF, ParityLimits

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), ROOT / "models/zoo/README.md"]
NAVIGATION = re.findall(r"^ +- (?:[\w ]+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
GENERATED = "reference"  # the hook of the site adds these pages to the navigation
MOST_WORDS = 120
NO_NUMBERS = ("unstable", "overridden", "min_recall")  # fields that are no number of the gate's table
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    return FENCE.sub("\n", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the repository's pages and the site both make them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\]\([^)]*\)|[^\w\- ]", "", title).lower() for title in titles)
    return {title.strip().replace(" ", "-") for title in plain}


def faults(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(re.sub(r"`[^`\n]+`", "", prose(page))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert faults(page) == []


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One `word`\n")
    page = tmp_path / "a.md"
    page.write_text("[a](b.md#one-word) [b](b.md#two) [c](c.md) [d](#e)\n```\n[f](g.md)\n```\n`[h](i.md)`\n")
    assert faults(page) == ["b.md#two: no such heading", "c.md: no such file", "#e: no such heading"]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [page.relative_to(DOCS) for page in sorted(DOCS.rglob("*.md"))]
    assert sorted(NAVIGATION) == [page.as_posix() for page in pages if page.parts[0] != GENERATED]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_paragraph_is_longer_than_a_reader_s_breath(page: Path) -> None:
    parts = re.split(r"\n\s*\n|\n(?= *(?:[-*|]|\d+\.) )", prose(page))
    long = [part.strip() for part in parts if not part.lstrip().startswith("|")]
    assert [part for part in long if len(part.split()) > MOST_WORDS] == []


def test_the_readme_is_short_and_has_its_parts_in_order() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    parts = ["docs/report.webp", "| model |", "## Install", "## Five commands", "## Is it for me", "## More"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    first = text.split("\n\n")[1]
    assert first.startswith("halfeven serves ") and first.count(". ") == 0, "one sentence says what it does"


def test_the_heading_that_a_message_names_has_a_model_folder_to_copy() -> None:
    source = (ROOT / "models/folder/package.py").read_text()
    page, heading = re.findall(r'(docs/\w+\.md), has one to copy under "([^"]+)"', source)[0]
    part = (ROOT / page).read_text().split(f" {heading}\n")[1].split("\n## ")[0]
    assert "model.toml <<" in part and "[[inputs]]" in part


def test_the_limits_of_the_gate_are_those_of_its_table() -> None:
    """`ParityLimits` has their defaults; docs/precision.md tells them, a percentage for a share."""
    part = (DOCS / "precision.md").read_text().split("\n## What the gate holds\n\n")[1].split("\n\n")[0]
    rows = re.findall(
        r"\| (?P<number>[\d.e-]+)(?P<percent> ?%)?[^|]*\| `(?P<key>\w+)` \|$", part, re.MULTILINE
    )
    shown = {key: float(number) / (100 if percent else 1) for number, percent, key in rows}
    limits = {field.name: field.default for field in fields(ParityLimits) if field.name not in NO_NUMBERS}
    limits["min_sqnr_db"] = round(min_sqnr_db(ParityLimits(), UNIT_ROUNDOFF["fp16"]), 1)
    assert shown == pytest.approx(limits)


def tables(page: Path) -> list[tuple[str, list[str]]]:
    """(the raw results that stand in the row or behind its table, the row's figures) of each row with figures."""
    found, rows = [], []
    for line in page.read_text().splitlines():
        link = re.search(r"tests/benchmarks/results/([\w.-]+\.md)", line)
        if line.startswith("|---"):
            rows.pop()  # the heads of the columns
        elif line.startswith("|"):
            figures = re.findall(
                r"(?<![\w.-])\d[\d,]*\d(?:\.\d+)?(?![\w.-])", re.sub(r"\[.*?\]\(.*?\)", "", line)
            )
            rows.append(figures)
        if link:
            found += [(link[1], row) for row in rows if row]
            rows = []
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md", "docs/converters.md"])
def test_every_figure_of_a_table_stands_in_the_raw_results_that_it_links_to(page: str) -> None:
    rows = tables(ROOT / page)
    assert sum(len(figures) for _, figures in rows) >= 9
    for file, figures in rows:
        raw = (ROOT / "tests/benchmarks/results" / file).read_text()
        assert [one for one in figures if not re.search(rf"(?<![\d,.]){one}(?![\d])", raw)] == [], file


def summary(page: Path) -> str:
    """The title of a page and its first sentence."""
    title, _, rest = prose(page).partition("\n")
    body = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", rest)
    part = next((one for one in body.split("\n\n") if re.match(r"\s*[\w`*]", one)), "")
    sentence = re.split(r"(?<=[.:]) ", " ".join(part.split()), maxsplit=1)[0].removesuffix(":")
    return f"{title.removeprefix('# ')}: {sentence}"


def llms_txt() -> str:
    """The file as https://llmstxt.org wants it: a title, a sentence, and a list of links with a line each."""
    head = (ROOT / "README.md").read_text().split("\n\n")[1]
    lines = ["# halfeven", "", f"> {' '.join(head.split())}", ""]
    for page in NAVIGATION:
        lines.append(f"- [{page}]({page}): {summary(DOCS / page)}")
    return "\n".join([*lines, "", "The pages below `reference/` are generated from the code.", ""])


def test_llms_txt_lists_every_page_with_what_it_says() -> None:
    if os.environ.get("HALFEVEN_TEST_WRITE"):
        (DOCS / "llms.txt").write_text(llms_txt())
    assert (DOCS / "llms.txt").read_text() == llms_txt(), "HALFEVEN_TEST_WRITE=1 writes docs/llms.txt anew"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="the site needs halfeven[docs]")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    built = (tmp_path / "site/precision.html").read_text()
    assert "cdn" not in built and "//fonts" not in built, "the site fetches nothing from other hosts"
