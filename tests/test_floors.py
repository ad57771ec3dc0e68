"""The versions that are taken: above known flaws, without those that round otherwise or were not tried, and with those
that CI installs."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
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

# Versions that are not taken, with a word of the reason in pyproject.toml: halves are proven with these libraries, so
# one that rounds otherwise makes other verdicts.
LEFT_OUT = {
    "torch": (("2.14.0", "2.14.1", "2.15.0"), "autocasts other operations"),
    "onnxruntime": (("1.29.0", "1.33.0"), "sums in FP16"),
    "onnxruntime-gpu": (("1.29.0", "1.33.0"), "sums in FP16"),
}


def requirements() -> dict[str, Requirement]:
    extras = (text for texts in PROJECT["optional-dependencies"].values() for text in texts)
    return {canonicalize_name(one.name): one for one in map(Requirement, (*PROJECT["dependencies"], *extras))}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_no_version_with_a_known_flaw_is_taken_and_the_reason_stands_beside() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r"CVE-\d+-\d+|GHSA(?:-\w{4}){3}", text)) >= {flaw for _, flaw in MENDED.values()}
    wanted = requirements()
    for name, (version, _) in MENDED.items():
        floor = min(Version(one.version) for one in wanted[name].specifier if one.operator == ">=")
        assert floor >= Version(version), name


def test_every_pin_of_the_constraints_is_a_version_that_is_taken() -> None:
    refused = {
        name: pins()[name]
        for name, one in requirements().items()
        if name in pins() and not one.specifier.contains(pins()[name])
    }
    assert refused == {} and set(MENDED) <= set(pins())


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_version_that_was_found_wrong_or_was_not_tried_is_not_taken(name: str) -> None:
    versions, reason = LEFT_OUT[name]
    assert [version for version in versions if requirements()[name].specifier.contains(version)] == []
    assert reason in (ROOT / "pyproject.toml").read_text()


def test_what_may_be_newer_than_any_version_known_today_is_pinned_where_it_is_tested() -> None:
    """A newcomer's ``pip install .`` takes the newest; what `make` installs and tests is the pin."""
    open_ended = {
        name for name, one in requirements().items() if one.specifier.contains("9999") and name != "halfeven"
    }
    assert len(open_ended) > 20 and open_ended - set(pins()) == set()
    assert not open_ended & set(LEFT_OUT)
