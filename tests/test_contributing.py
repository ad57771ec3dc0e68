"""The rules for those who work on halfeven: paths that exist, one CI, forms that ask for what is needed."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
FORMS = [form for form in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if form.stem != "config"]
PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs/architecture.md",
    *sorted((ROOT / "docs/decisions").glob("*.md")),
]
PLACE = re.compile(r"`((?:models|exporters|serve|tests|docs|docker|\.ci|\.links)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = PLACE.findall(page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_ci_runs_what_everybody_runs() -> None:
    (job,) = yaml.safe_load((GITHUB / "workflows/check.yaml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert "make --no-print-directory check" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_every_form_asks_for_what_the_machine_is(form: Path) -> None:
    fields = yaml.safe_load(form.read_text())["body"]
    (doctor,) = [one for one in fields if one["attributes"].get("label") == "halfeven doctor --json"]
    assert doctor["validations"] == {"required": True}


def test_the_hooks_before_a_commit_fetch_nothing() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local" and all(hook["language"] == "system" for hook in local["hooks"])
    files = re.findall(r"tests/\w+\.py", " ".join(hook["entry"] for hook in local["hooks"]))
    assert files and all((ROOT / file).is_file() for file in files)


def test_the_changelog_is_short_and_begins_with_what_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= 150
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    numbers = [tuple(map(int, one.split("."))) for one in versions[1:]]
    assert numbers == sorted(numbers, reverse=True), "newest first"
