"""Every command is explained, and the exit codes are one table (docs/commands.md: tests/reference/)."""

import re

import pytest
from halfeven.models import errors
from halfeven.serve.cli.main import app
from halfeven.serve.http.error_mapping import EXIT_CODES, exit_code_of
from halfeven.serve.settings import Settings
from typer.testing import CliRunner

from tests.reference.pages import ROOT, commands


@pytest.mark.slow
def test_every_command_and_option_is_explained_and_every_flag_goes_without_a_type() -> None:
    for name, (panel, command) in commands().items():
        assert panel and command.help, name
        for param in command.params:
            assert getattr(param, "hidden", False) or param.help, (name, param.name)
        done = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"})
        assert done.exit_code == 0 and "<bool>" not in done.output, done.output
        assert max(map(len, done.output.splitlines())) <= 80
    top = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    assert "<bool>" not in top and all(f" {code}: " in top for code in EXIT_CODES)


def test_serve_says_the_default_and_the_variable_of_each_option() -> None:
    found = {param.name: param.help for param in commands()["serve"][1].params}
    for name, field in Settings.model_fields.items():
        if name in found:
            assert f"[HALFEVEN_{name.upper()}]" in found[name]
            if field.default not in (None, "", False, True):
                value = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
                assert re.search(rf"default:? {re.escape(value)}", found[name]), name


def test_exit_codes_are_one_table_in_code_and_docs() -> None:
    stated = dict(
        re.findall(r"^\| (\d) \| (.+) \|$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    )
    assert {int(code): meaning for code, meaning in stated.items()} == EXIT_CODES
    kinds = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.HalfevenError)
    ]
    assert {exit_code_of(kind.__new__(kind)) for kind in kinds} | {0} == set(EXIT_CODES)
