"""The house holds: layers, doors, sizes and package list, and nothing of ours at anybody's top level.

Imports go serve → exporters → models. They are read from the source with ``ast``, so those inside
functions and under ``TYPE_CHECKING`` count like all others.
"""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("models", "exporters", "serve")  # each may import itself and those before it
LONGEST_FILE, LONGEST_FUNCTION = 400, 60  # lines

Name = tuple[str, ...]  # a module's place in the package: ("models", "spec"); the root door is ()


def sources(root: Path) -> dict[Name, Path]:
    """Every module of the three rooms and the root door; a package's door has the package's name."""
    files = [root / "__init__.py", *(file for room in ROOMS for file in sorted((root / room).rglob("*.py")))]
    return {_name(file.relative_to(root)): file for file in files}


def _name(file: Path) -> Name:
    return file.parent.parts if file.name == "__init__.py" else (*file.parent.parts, file.stem)


def _written(file: Path, package: Name) -> Iterator[tuple[Name, list[str]]]:
    """Each import of ours in a file: the module named and the names taken from it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            ours = [
                alias.name.split(".")[1:] for alias in node.names if alias.name.split(".")[0] == "halfeven"
            ]
            yield from ((tuple(parts), []) for parts in ours)
        elif isinstance(node, ast.ImportFrom):
            parts = tuple(node.module.split(".")) if node.module else ()
            names = [alias.name for alias in node.names]
            if node.level:
                yield (*package[: len(package) - node.level + 1], *parts), names
            elif parts[:1] == ("halfeven",):
                yield parts[1:], names


def imports(modules: dict[Name, Path]) -> dict[Name, set[Name]]:
    """Who imports whom. ``from .a import b`` means the file ``a/b.py`` where there is one, else ``a``."""
    edges: dict[Name, set[Name]] = {}
    for name, file in modules.items():
        package = name if file.name == "__init__.py" else name[:-1]
        edges[name] = set()
        for target, taken in _written(file, package):
            files = {(*target, item) for item in taken if (*target, item) in modules}
            edges[name] |= files | ({target} if len(files) < max(len(taken), 1) else set())
    return edges


def layer_faults(root: Path) -> list[str]:
    """Every import that goes the wrong way, uses its own door or closes a circle; none in a good house."""
    modules = sources(root)
    edges = imports(modules)
    faults = []
    for name, targets in edges.items():
        for target in targets:
            arrow = f"{'.'.join(name) or 'halfeven'} imports {'.'.join(target) or 'halfeven'}"
            if name and target and ROOMS.index(target[0]) > ROOMS.index(name[0]):
                faults.append(f"{arrow}: imports go serve → exporters → models")
            if modules[name].name != "__init__.py" and target == name[: len(target)]:
                faults.append(f"{arrow}: files import files, never their own package's door")
    return sorted(faults) + [f"a circle of imports: {' → '.join(circle)}" for circle in _circles(edges)]


def _circles(edges: dict[Name, set[Name]]) -> list[list[str]]:
    """One circle for every import that leads back to a module still being read; depth first."""
    found: list[list[str]] = []
    finished: set[Name] = set()

    def visit(name: Name, path: list[Name]) -> None:
        if name in path:
            found.append([".".join(item) for item in [*path[path.index(name) :], name]])
        elif name not in finished:
            for target in sorted(edges.get(name, ())):
                visit(target, [*path, name])
            finished.add(name)

    for name in sorted(edges):
        visit(name, [])
    return found


def test_imports_go_from_serve_to_exporters_to_models_and_never_back() -> None:
    assert layer_faults(ROOT) == []


PLANTED = {
    "models/planted.py": ("from ..serve import protocol\n", "serve → exporters → models"),
    "models/engines/planted.py": (
        "def late() -> None:\n    import halfeven.exporters.x\n",
        "serve → exporters → models",
    ),
    "exporters/planted.py": (
        "from halfeven.serve.http.routes.app import create\n",
        "serve → exporters → models",
    ),
    "models/zoo/planted.py": ("from ..spec import Dim\nfrom .. import TensorSpec\n", "own package's door"),
    "serve/batching/planted.py": ("from ... import __version__\n", "own package's door"),
    "exporters/circle.py": ("from .circle_back import x\n", "a circle of imports"),
}


@pytest.mark.parametrize("file", PLANTED)
def test_an_import_planted_the_wrong_way_is_found(file: str, tmp_path: Path) -> None:
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", tmp_path)
    text, fault = PLANTED[file]
    (tmp_path / file).write_text(text)
    (tmp_path / "exporters/circle_back.py").write_text(
        "def late() -> None:\n    from . import circle\n" if "circle" in file else ""
    )
    found = layer_faults(tmp_path)
    assert len(found) == 1 and fault in found[0], found


def test_every_folder_with_code_is_a_package_and_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent.relative_to(ROOT) for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)
    names = {".".join(("halfeven", *folder.parts)) for folder in folders}
    assert sorted(settings["packages"]) == sorted(names | {"halfeven"})


def test_no_file_and_no_function_is_too_long_to_be_read_at_once() -> None:
    too_long = []
    for file in sources(ROOT).values():
        text = file.read_text()
        if (lines := len(text.splitlines())) > LONGEST_FILE:
            too_long.append(f"{file.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    too_long.append(f"{file.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert too_long == []


def test_the_wheel_holds_every_file_of_the_rooms_and_nothing_outside_halfeven(built_wheel: Path) -> None:
    with zipfile.ZipFile(built_wheel) as archive:
        inside = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    files = {file for room in ROOMS for file in (ROOT / room).rglob("*") if file.is_file()}
    expected = {file.relative_to(ROOT).as_posix() for file in files if "__pycache__" not in file.parts}
    assert inside == {f"halfeven/{name}" for name in expected | {"__init__.py", "py.typed"}}


@pytest.mark.parametrize("door", ["with its own door", "without a door"])
def test_a_repository_with_its_own_models_package_keeps_it_beside_us(
    door: str, unpacked_wheel: Path, tmp_path: Path
) -> None:
    models = tmp_path / "repository" / "models"
    models.mkdir(parents=True)
    (models / "net.py").write_text("WIDTH = 3\n")
    if door == "with its own door":
        (models / "__init__.py").write_text("")
    script = tmp_path / "repository" / "train.py"
    script.write_text(
        "import halfeven.models.zoo, models.net\nprint(halfeven.__file__, models.net.__file__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked_wheel)}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(unpacked_wheel / "halfeven/__init__.py"), str(models / "net.py")]


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_of_ours_is_importable_at_the_top_level(room: str, tmp_path: Path) -> None:
    question = f"import halfeven, importlib.util as u; print(u.find_spec({room!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", question],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"
