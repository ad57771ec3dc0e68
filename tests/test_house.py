"""The house holds: layers, doors, cycles, names and sizes, and nothing of ours at anybody's top level.

Imports go serve → exporters → models. They are read from the source with ``ast``, so those inside
functions and under ``TYPE_CHECKING`` count like all others.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from itertools import combinations, starmap
from pathlib import Path

import networkx
import pytest

from tests.house_sources import ROOMS, ROOT, Name, nodes_with, sources, statements
from tests.patience import PATIENCE_S

LONGEST_FILE, LONGEST_FUNCTION = 400, 60  # lines
NAMED_FILE = re.compile(r"`([a-z0-9_/]+\.py)`")
# Files of others: one that `halfeven diff` writes, a user's own file, and a file of MLflow.
NOT_OURS = {"node.py", "layers.py", "mlflow/store/tracking/file_store.py"}


@cache
def _written(text: str, package: Name) -> list[tuple[Name, list[str]]]:
    """Each import of ours in a file: the module named and the names taken from it."""
    found: list[tuple[Name, list[str]]] = []
    for node in statements(ast.parse(text).body):
        if isinstance(node, ast.Import):
            ours = (alias.name.split(".") for alias in node.names)
            found += [(tuple(parts[1:]), []) for parts in ours if parts[0] == "halfeven"]
        elif isinstance(node, ast.ImportFrom):
            parts = tuple(node.module.split(".")) if node.module else ()
            names = [alias.name for alias in node.names]
            if node.level:
                found.append(((*package[: len(package) - node.level + 1], *parts), names))
            elif parts[:1] == ("halfeven",):
                found.append((parts[1:], names))
    return found


def imports(modules: dict[Name, Path]) -> dict[Name, set[Name]]:
    """The imports of each module. ``from .a import b`` means the file ``a/b.py`` where there is one, else ``a``."""
    edges: dict[Name, set[Name]] = {}
    for name, file in modules.items():
        package = name if file.name == "__init__.py" else name[:-1]
        edges[name] = set()
        for target, taken in _written(file.read_text(), package):
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


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("house")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", folder)
    (folder / "exporters/circle_back.py").write_text("")
    return folder


@pytest.mark.parametrize("file", PLANTED)
def test_an_import_planted_the_wrong_way_is_found(file: str, copied: Path) -> None:
    text, fault = PLANTED[file]
    back = "def late() -> None:\n    from . import circle\n" if "circle" in file else ""
    (copied / "exporters/circle_back.py").write_text(back)
    (copied / file).write_text(text)
    found = layer_faults(copied)
    (copied / file).unlink()
    assert len(found) == 1 and fault in found[0], found


def package_cycles(edges: dict[Name, set[Name]], packages: set[Name]) -> set[frozenset[str]]:
    """The units that import each other, directly or through others. A unit is a package without packages of its own,
    or a file that lies beside packages: ``serve.batching`` and ``serve.settings`` are two units."""
    inner = {package for package in packages if not any(package == other[:-1] for other in packages)}

    def unit(name: Name) -> Name:
        return next((name[:end] for end in range(len(name), 0, -1) if name[:end] in inner), name)

    arrows = {(unit(source), unit(target)) for source in edges for target in edges[source]}
    graph = networkx.DiGraph([(source, target) for source, target in arrows if source != target])
    rings = networkx.strongly_connected_components(graph)
    return {frozenset(".".join(name) for name in ring) for ring in rings if len(ring) > 1}


def packages_of(modules: dict[Name, Path]) -> set[Name]:
    return {name for name, file in modules.items() if file.name == "__init__.py" and name}


def test_packages_and_the_files_beside_them_do_not_import_each_other_in_a_cycle() -> None:
    modules = sources(ROOT)
    assert package_cycles(imports(modules), packages_of(modules)) == set()


def test_a_cycle_of_packages_without_a_cycle_of_files_is_found() -> None:
    """``x.one`` imports ``y.two``, and ``y.three`` imports ``x.four``."""
    edges = {("x", "one"): {("y", "two")}, ("y", "three"): {("x", "four")}, ("z",): {("x", "one")}}
    assert package_cycles(edges, {("x",), ("y",)}) == {frozenset({"x", "y"})}
    assert _circles(edges) == []


def shared_names(modules: dict[Name, Path]) -> set[str]:
    """Base names of several files whose packages do not tell them apart. Two packages of one room do where neither lies
    in the other: ``zoo.bert.model`` and ``zoo.gpt.model`` are the same thing of two models, ``torch.autocast.rewrite``
    and ``onnx.precision.rewrite`` of two back ends. Packages of two rooms do not, and neither does a package tell its
    file from one that lies beside the package."""
    places: dict[str, list[Name]] = {}
    for name, file in modules.items():
        if file.name != "__init__.py":
            places.setdefault(name[-1], []).append(name[:-1])
    return {name for name, found in places.items() if not all(starmap(_apart, combinations(found, 2)))}


def _apart(one: Name, other: Name) -> bool:
    shorter = min(len(one), len(other))
    return one[0] == other[0] and one[:shorter] != other[:shorter]


def test_a_base_name_stands_for_one_file_or_its_packages_tell_the_files_apart() -> None:
    assert shared_names(sources(ROOT)) == set()


def test_packages_of_a_room_tell_files_apart_and_rooms_do_not() -> None:
    file = Path("file.py")
    assert shared_names({("zoo", "a", "model"): file, ("zoo", "b", "model"): file}) == set()
    assert shared_names({("zoo", "a", "b", "model"): file, ("zoo", "c", "d", "model"): file}) == set()
    assert shared_names({("models", "wire"): file, ("exporters", "wire"): file}) == {"wire"}
    assert shared_names({("serve", "metrics"): file, ("serve", "rollout", "metrics"): file}) == {"metrics"}


def test_every_folder_with_code_is_a_package_which_setup_finds() -> None:
    folders = {file.parent for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_no_file_and_no_function_is_too_long_to_be_read_at_once() -> None:
    too_long = []
    for file in sources(ROOT).values():
        text = file.read_text()
        if (lines := len(text.splitlines())) > LONGEST_FILE:
            too_long.append(f"{file.relative_to(ROOT)}: {lines} lines")
        for node in statements(ast.parse(text).body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    too_long.append(f"{file.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert too_long == []


BY_PATH = {"live_source.py", "losses.py", "operator_code.py"}  # which import the operator's own files


TESTS_AS_SUBJECT = {"test_planted_errors.py"}  # it plants an error, and runs the tests that must find it


def imported_tests(text: str) -> list[str]:
    """The test files that a file imports, or imports names of."""
    whole = r"^ *from ((?:tests|\.)[\w.]*\btest_\w+) import"
    names = r"^ *from (?:tests|\.)[\w.]* import (?:\([^)]*|[^#\n(]*)\b(test_\w+)"
    return [one or other for one, other in re.findall(f"{whole}|{names}", text, re.MULTILINE)]


def test_no_test_imports_another_test_file() -> None:
    assert imported_tests("from tests.models.store.test_store import publish") == [
        "tests.models.store.test_store"
    ]
    assert imported_tests("from tests.models import test_store") == ["test_store"]
    assert imported_tests("from ..store.test_store import publish") == ["..store.test_store"]
    assert imported_tests("from .test_store import publish") == [".test_store"]
    assert imported_tests("from . import (\n    stage,\n    test_store,\n)") == ["test_store"]
    assert imported_tests("from .stage import publish\nfrom tests.specs import tensor") == []
    files = [file for file in (ROOT / "tests").rglob("*.py") if file.name not in TESTS_AS_SUBJECT]
    assert {str(file): found for file in files if (found := imported_tests(file.read_text()))} == {}


def test_no_file_of_ours_is_loaded_by_its_path_and_children_are_started_as_modules() -> None:
    """Loaded by its path a file is there twice, with classes that are not each other's. Without ``-P`` a child would
    take modules from the folder that it is started in."""
    faults = []
    for file, node in nodes_with("spec_from_file_location", "sys.executable"):
        if isinstance(node, ast.Name | ast.Attribute) and file.name not in BY_PATH:
            faults += [str(file)] if ast.unparse(node).endswith("spec_from_file_location") else []
        elif isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
            # The process starts itself again.
            first = node.elts[1].value if isinstance(node.elts[1], ast.Constant) else "-P"
            faults += [] if first in ("-P", "-PB", "-IS") else [f"{file}: {ast.unparse(node)}"]
    assert faults == []


def unknown_files(text: str, folder: Path) -> list[str]:
    """The Python files that a text names in backticks, and that are not there from ``folder`` or one around it."""
    around = [folder, *(each for each in folder.parents if each.is_relative_to(ROOT))]
    return [name for name in NAMED_FILE.findall(text) if not any((each / name).is_file() for each in around)]


def test_files_that_comments_name_are_found_from_there() -> None:
    assert unknown_files("as `spec/spec.py` and `capture.py` say", ROOT / "models/capture") == []
    assert unknown_files("as `spec.py` and `capture/gone.py` say", ROOT / "models/capture") == [
        "spec.py",
        "capture/gone.py",
    ]
    found = {file: unknown_files(file.read_text(), file.parent) for file in sources(ROOT).values()}
    assert {str(file): named for file, names in found.items() if (named := set(names) - NOT_OURS)} == {}


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_rooms_and_nothing_outside_halfeven(built_wheel: Path) -> None:
    with zipfile.ZipFile(built_wheel) as archive:
        inside = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    files = {file for room in ROOMS for file in (ROOT / room).rglob("*") if file.is_file()}
    expected = {file.relative_to(ROOT).as_posix() for file in files if "__pycache__" not in file.parts}
    expected |= {"__init__.py", "__main__.py", "drop_in.py", "training.py", "py.typed"}
    assert inside == {f"halfeven/{name}" for name in expected}


@pytest.mark.slow
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
        timeout=PATIENCE_S,
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
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"
