"""The one object of limits, and the table of docs/security.md that says the same."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from halfeven.models.order.one_order import (
    DEFAULT_BOUNDS,
    MEMORY_SETTING,
    RUNS_SETTING,
    SECONDS_SETTING,
    SHARE,
)
from halfeven.serve.http.limits.request_limits import DEFAULTS, RequestLimits
from halfeven.serve.settings import Settings, read_settings

ROOT = Path(__file__).resolve().parents[4]
SECURITY = ROOT / "docs/security.md"
SET = {
    "max_body_mib": ("body_bytes", 3, 3 * 2**20),
    "max_upload_mib": ("upload_bytes", 5, 5 * 2**20),
    "max_files_mib": ("files_bytes", 17, 17 * 2**20),
    "max_in_flight_mib": ("in_flight_bytes", 7, 7 * 2**20),
    "max_connections": ("connections", 11, 11),
    "grpc_ping_seconds": ("ping_seconds", 23, 23),
    "idle_seconds": ("idle_seconds", 19, 19),
    "body_seconds": ("arrival_seconds", 13.5, 13.5),
}


def table() -> dict[str, tuple[str, str]]:
    """Each limit of the page: its default and its setting as they are written."""
    section = SECURITY.read_text().partition("## Limits\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([^|]*) \| ([^|]*)\|", section, re.MULTILINE)
    return {name: (default.strip(), setting.strip(" `")) for name, default, setting in rows}


# The files and folders whose modules read what strangers made: their constants with MAX or MOST in the name are bounds.
READERS = (
    "models/folder/package.py", "models/folder/model_keys.py", "models/folder/tensor_reader.py",
    "models/files/stored_json.py",
    "models/archive", "models/pictures",
    "exporters/onnx/reading", "exporters/importing", "exporters/inputs/samples.py", "serve/finetune/data",
    "serve/access/keys.py", "serve/http/codecs/multipart.py", "serve/http/codecs/numpy_files.py",
)  # fmt: skip


def bounds_of_readers() -> Iterator[tuple[str, str, int]]:
    """The file, the name and the value of each bound."""
    for place in READERS:
        for file in sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]:
            assigned = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign)]
            names = [name.id for node in assigned for name in ast.walk(node) if isinstance(name, ast.Name)]
            path = file.relative_to(ROOT)
            module = import_module(".".join(("halfeven", *path.with_suffix("").parts)))
            for name in (one for one in names if re.match(r"_?(MAX|MOST)_", one)):
                yield path.as_posix(), name, getattr(module, name)


def test_the_table_of_files_has_every_bound_of_what_reads_them() -> None:
    rows = re.findall(r"^\|[^|]*\|[^|]*\| `([^`]+)` `(\w+)` (\d+) \|$", SECURITY.read_text(), re.MULTILINE)
    written = {(file, name, int(most)) for file, name, most in rows}
    assert written == set(bounds_of_readers()) and len(written) == len(rows)


def test_the_bounds_of_an_order_are_written_as_they_are() -> None:
    rows = dict(
        re.findall(
            r"^\| [^|]* \| (\d+)[^|]* \| `(HALFEVEN_CONVERT_\w+)` \|$", SECURITY.read_text(), re.MULTILINE
        )
    )
    assert rows == {"3600": SECONDS_SETTING, "80": MEMORY_SETTING, "2000": RUNS_SETTING}
    assert (DEFAULT_BOUNDS.seconds, SHARE, DEFAULT_BOUNDS.runs) == (3600, 0.8, 2000)


def test_the_table_has_every_limit_with_its_default() -> None:
    written = table()
    assert list(written) == [field.name for field in fields(RequestLimits)]
    for name, (default, _) in written.items():
        value = getattr(DEFAULTS, name)
        assert not default.isdecimal() if value is None else int(default) == value, name


def test_the_table_has_the_setting_of_every_limit_that_has_one() -> None:
    written = {setting: name for name, (_, setting) in table().items() if setting}
    assert written == {f"HALFEVEN_{setting.upper()}": name for setting, (name, _, _) in SET.items()}


@pytest.mark.parametrize("setting", SET)
def test_a_setting_sets_its_limit_alone(setting: str) -> None:
    name, given, expected = SET[setting]
    limits = read_settings(**{setting: given}).limits
    changed = {
        field.name for field in fields(limits) if getattr(limits, field.name) != getattr(DEFAULTS, field.name)
    }
    assert (changed, getattr(limits, name)) == ({name}, expected)


def test_the_server_s_defaults_are_the_object_s() -> None:
    assert Settings().limits == DEFAULTS  # type: ignore[call-arg]
