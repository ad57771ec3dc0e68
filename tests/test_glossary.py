"""Words that once meant something only here are gone; docs/glossary.md has the words that took their places."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("models", "exporters", "serve", "tests", "docker", "docs")
# Words that stand in no name, comment, message or page.
RETIRED = {
    *(
        "acquit",
        "acquitted",
        "company",
        "condemn",
        "condemned",
        "diary",
        "duty",
        "excuse",
        "excused",
        "journey",
    ),
    *(
        "known_head",
        "lane",
        "lanes",
        "leeway",
        "lesson",
        "lessons",
        "lingering",
        "posting",
        "shaken",
        "tallies",
    ),
    *("tally", "taught", "understudy"),
}
# English words that a sentence needs; as names they had meanings of their own.
NOT_AS_NAMES = {
    *(
        "border",
        "borders",
        "breath",
        "course",
        "duties",
        "exam",
        "exams",
        "neighbour",
        "neighbours",
        "relieve",
    ),
    *("relieved", "say", "says", "tell", "tells", "told", "turns"),
}
FROM_ELSEWHERE = {"tell"}  # io.IOBase.tell


def sources(*endings: str) -> list[Path]:
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in endings]
    return sorted(path for path in found if "results" not in path.parts and path != Path(__file__))


@cache
def is_retired(name: str) -> bool:
    """True if a name in snake_case or CamelCase has a retired word, or is one. The names of tests are sentences."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)} | {name}
    return bool(words & (RETIRED | NOT_AS_NAMES)) and name not in FROM_ELSEWHERE and name[:5] != "test_"


def names(tree: ast.AST) -> Iterator[str]:
    """Every name that a file defines or uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def retired_names(text: str) -> set[str]:
    """The retired names in a source file. It is parsed only if its text has such a word: all files take seconds."""
    found = set(filter(is_retired, re.findall(r"\w+", text)))
    return found and found & set(names(ast.parse(text)))


def test_no_name_has_a_retired_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(".py")
        for name in retired_names(path.read_text())
    ]
    assert found == []


def test_no_sentence_has_a_retired_word() -> None:
    pages = [*sources(".py", ".md", ".html", ".toml"), *ROOT.glob("*.md"), ROOT / "pyproject.toml"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in pages
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if set(re.findall(r"[a-z_]+", line.lower())) & RETIRED
    ]
    assert found == []


# A docstring or a comment that begins so does not name its subject.
NO_SUBJECT = re.compile(
    r"(What|Where|Who|How|Whether|Those|Which|When|Why|Both|Of|Such|Tell|It)\b"
    r"|The same(( \w+)? (as|with|without|over|for|of|after|under|in|by)\b|[,.])"
)
IN_A_STRING = re.compile(rf"[\"'][\s\\]*({NO_SUBJECT.pattern})")  # a file without one is not parsed


def without_subject(text: str) -> list[str]:
    """The names of what a source file defines with a docstring that names no subject."""
    return [
        getattr(node, "name", "the file itself")
        for node in (ast.walk(ast.parse(text)) if IN_A_STRING.search(text) else ())
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and NO_SUBJECT.match(ast.get_docstring(node) or "")
    ]


def comments_without_subject(text: str) -> list[str]:
    """The first lines of a file's comments on lines of their own that name no subject."""
    return [line for line in re.findall(r"(?m)^(?!\s*#).*\n\s*# (?=(.*))", text) if NO_SUBJECT.match(line)]


def test_every_docstring_of_the_product_and_the_tests_names_its_subject() -> None:
    files = [path for path in sources(".py") if path.relative_to(ROOT).parts[0] in ROOMS[:4]]
    found = {str(path.relative_to(ROOT)): without_subject(path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_comment_on_a_line_of_its_own_names_its_subject() -> None:
    files = [path for path in sources(".py") if path.relative_to(ROOT).parts[0] in ROOMS[:4]]
    found = {str(path.relative_to(ROOT)): comments_without_subject(path.read_text()) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_docstring_or_a_comment_without_a_subject_is_found() -> None:
    text = 'class A:\n    """Of one run."""\n    def b(self):\n        """True if it ran."""\n'
    assert without_subject(text) == ["A"]
    assert without_subject('"""How it ends."""') == ["the file itself"]
    same = {
        end: without_subject(f'"""The same{end}"""')
        for end in (" with a key.", " net in FP32.", ".", " net.")
    }
    assert [end for end, names in same.items() if not names] == [" net."]
    comments = "a = 1\n# What runs.\n# Of it.\nb = 2\n  # The net.\nc = 3  # It ran.\n    # Of one run.\n"
    assert comments_without_subject(comments) == ["What runs.", "Of one run."]


@pytest.mark.parametrize("name", ["told_of", "KnownLane", "_say", "duties"])
def test_a_retired_word_is_found_inside_a_name(name: str) -> None:
    assert is_retired(name)
