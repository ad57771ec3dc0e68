"""The one object of limits, and the table of docs/security.md that says the same."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from halfeven.serve.http.limits.request_limits import DEFAULTS, RequestLimits
from halfeven.serve.settings import Settings, read_settings

SECURITY = Path(__file__).resolve().parents[4] / "docs/security.md"
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
