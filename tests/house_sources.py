"""The files of the package by their names as modules, and what stands in them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("models", "exporters", "serve")  # each may import itself and those before it
Name = tuple[str, ...]  # a module's place in the package: ("models", "spec"); the root door is ()


def sources(root: Path) -> dict[Name, Path]:
    """Every module of the three rooms and the root door; a package's door has the package's name."""
    files = [root / "__init__.py", *(file for room in ROOMS for file in sorted((root / room).rglob("*.py")))]
    return {_name(file.relative_to(root)): file for file in files}


def _name(file: Path) -> Name:
    return file.parent.parts if file.name == "__init__.py" else (*file.parent.parts, file.stem)


def nodes_with(*words: str) -> Iterator[tuple[Path, ast.AST]]:
    """Every node of the product's files that have one of the words. The others are not parsed: all take seconds."""
    for file in sources(ROOT).values():
        text = file.read_text()
        if any(word in text for word in words):
            yield from ((file, node) for node in ast.walk(ast.parse(text)))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a file or a block and all inside them: a tenth of its nodes."""
    for one in body:
        yield one
        for inside in ("body", "orelse", "finalbody"):
            yield from statements(getattr(one, inside, []))
        for block in (*getattr(one, "handlers", ()), *getattr(one, "cases", ())):
            yield from statements(block.body)
