"""The packages of a GPU machine: which of them do not suit our floors, and the wheels that are carried there instead.

    python -m tests.benchmarks.gpu.packages .gpu/wheels    fetches the wheels for the machine of machine.txt

A wheel is a package with its metadata, so that whoever asks for a version gets one.
"""

import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
MACHINE = Path(__file__).with_name("machine.txt")
FOR_TESTS = ("pytest", "hypothesis", "httpx")
# xdist runs the tests in processes that do not fork: one that has looked for a device cannot be forked.
BESIDE = "pytest-xdist>=3.8"
AS_IT_IS = ("torch", "pyarrow", "sympy")  # too large to be carried, or torch's own: what is there is taken
MOST_MB = 55  # of what is carried beside the checkout
TARGET = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "extra": "",
}
_TAGS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]


def wanted(pyproject: Path = PYPROJECT) -> list[str]:
    """The project's requirements, and those of the tests that need a device."""
    project = tomllib.loads(pyproject.read_text())["project"]
    tests = [one for one in project["optional-dependencies"]["dev"] if Requirement(one).name in FOR_TESTS]
    return [*project["dependencies"], *tests, BESIDE]


def unsuited(requirements: Iterable[str]) -> list[str]:
    """The requirements that this interpreter's packages do not meet, each with the version that is there."""
    found = []
    for one in map(Requirement, requirements):
        there = [_version(name) for name in _names(one)]
        if _applies(one, {}) and not any(
            has and one.specifier.contains(has, prereleases=True) for has in there
        ):
            found.append(f"{one.name}{one.specifier}: {next(filter(None, there), 'not there')}")
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _names(requirement: Requirement) -> set[str]:
    """ONNX Runtime is one package under two names."""
    name = canonicalize_name(requirement.name)
    return {name, name.removesuffix("-gpu")}


def _applies(requirement: Requirement, environment: Mapping[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": "", **environment})


def machine(file: Path = MACHINE) -> dict[str, str | None]:
    """The packages of the machine with their versions, None where that is not known."""
    lines = [line.strip() for line in file.read_text().splitlines() if line and not line.startswith("#")]
    split = [re.split("==", line, maxsplit=1) for line in lines]
    return {canonicalize_name(name): rest[0] if rest else None for name, *rest in split}


def lacked(requirements: Iterable[str], there: Mapping[str, str | None]) -> list[str]:
    """The requirements that the machine's packages do not meet, or may not meet because a version is asked for and none
    is known."""
    return [
        str(one) for one in map(Requirement, requirements) if _applies(one, TARGET) and not _met(one, there)
    ]


def _met(one: Requirement, there: Mapping[str, str | None]) -> bool:
    present = [name for name in _names(one) if name in there]
    if set(present) & set(AS_IT_IS):
        return True
    return any(
        not one.specifier if (has := there[name]) is None else one.specifier.contains(has, prereleases=True)
        for name in present
    )


def carry(folder: Path, requirements: Iterable[str], there: Mapping[str, str | None]) -> list[str]:
    """Fetch the wheels that the machine lacks, and those that they need; their names."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    carried: set[str] = set()
    asked = lacked(requirements, there)
    while asked:
        _fetch(folder, asked)
        carried |= {canonicalize_name(Requirement(one).name) for one in asked}
        needs = [need for wheel in folder.glob("*.whl") for need in _needs_of(wheel)]
        asked = [
            one for one in lacked(needs, there) if canonicalize_name(Requirement(one).name) not in carried
        ]
    return sorted(wheel.name for wheel in folder.glob("*.whl"))


def _fetch(folder: Path, requirements: list[str]) -> None:
    """Download the packages, with one requirement for each package: all its requirements have to be met together."""
    together: dict[str, list[str]] = {}
    for one in map(Requirement, requirements):
        together.setdefault(canonicalize_name(one.name), []).append(str(one.specifier))
    lines = [name + ",".join(filter(None, specifiers)) for name, specifiers in together.items()]
    tags = [part for tag in _TAGS for part in ("--platform", tag)]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--python-version", TARGET["python_version"], "--implementation", "cp", *tags,
            "--constraint", str(PYPROJECT.with_name("constraints.txt")), "--dest", str(folder), *lines,
        ],
        check=True,
    )  # fmt: skip


def _needs_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def main() -> None:
    folder = Path(sys.argv[1])
    wheels = carry(folder / TARGET["python_version"], wanted(), machine())
    size = sum(file.stat().st_size for file in folder.rglob("*.whl")) / 1e6
    print("\n".join(wheels))
    print(
        f"{folder}: {size:.1f} MB for Python {TARGET['python_version']}, made with {platform.python_version()}"
    )
    if size > MOST_MB:
        sys.exit(f"{folder} has {size:.1f} MB, and at most {MOST_MB} can be carried")


if __name__ == "__main__":
    main()
