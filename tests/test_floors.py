"""The oldest versions that are taken lie above known flaws, and what CI installs lies above them."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The first version without the flaw, as its advisory says.
MENDED = {
    "torch": ("2.11", "CVE-2026-4538"),
    "onnx": ("1.21", "CVE-2026-34446"),
    "protobuf": ("6.33.5", "CVE-2026-0994"),
    "starlette": ("1.3.1", "CVE-2026-54283"),
    "python-multipart": ("0.0.27", "GHSA-pp6c-gr5w-3c5g"),
    "pillow": ("12.3", "CVE-2026-59199"),
    "orjson": ("3.11.6", "CVE-2025-67221"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "pyarrow": ("23.0.1", "CVE-2026-25087"),
}


def requirements() -> dict[str, Requirement]:
    extras = (text for texts in PROJECT["optional-dependencies"].values() for text in texts)
    return {one.name: one for one in map(Requirement, (*PROJECT["dependencies"], *extras))}


def test_no_version_with_a_known_flaw_is_taken_and_the_reason_stands_beside() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r"CVE-\d+-\d+|GHSA(?:-\w{4}){3}", text)) >= {flaw for _, flaw in MENDED.values()}
    wanted = requirements()
    for name, (version, _) in MENDED.items():
        floor = min(Version(one.version) for one in wanted[name].specifier if one.operator == ">=")
        assert floor >= Version(version), name


def test_every_pin_of_the_constraints_is_a_version_that_is_taken() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    refused = {
        name: pins[name]
        for name, one in requirements().items()
        if name in pins and not one.specifier.contains(pins[name])
    }
    assert refused == {} and set(MENDED) <= set(pins)
