"""The packages that ``make gpu`` needs and this interpreter lacks, one requirement a line; torch is taken as it is.

python tests/benchmarks/gpu_packages.py
"""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
FOR_TESTS = ("pytest", "hypothesis", "httpx")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def wanted(pyproject: Path = PYPROJECT) -> list[str]:
    """The project's requirements without torch, and those of the tests that need a device."""
    project = tomllib.loads(pyproject.read_text())["project"]
    tests = [one for one in project["optional-dependencies"]["dev"] if name_of(one) in FOR_TESTS]
    own = [one for one in project["dependencies"] if name_of(one) != "torch"]
    return [one.partition(";")[0].strip() for one in own + tests]


def missing(requirements: list[str]) -> list[str]:
    """Those whose package is not installed. ONNX Runtime is one package under two names."""
    return [one for one in requirements if not _is_installed(name_of(one))]


def name_of(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found is not None, f"{requirement!r} names no package"
    return found[0]


def _is_installed(name: str) -> bool:
    for one in (name, name.removesuffix("-gpu")):
        try:
            distribution(one)
        except PackageNotFoundError:
            continue
        return True
    return False


if __name__ == "__main__":
    print("\n".join(missing(wanted())))
