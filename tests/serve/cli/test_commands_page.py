"""docs/commands.md: generated from the commands themselves. HALFEVEN_TEST_WRITE=1 writes it anew."""

import os
import re
from pathlib import Path

import typer
from halfeven.models import errors
from halfeven.serve.cli.main import app
from halfeven.serve.http.error_mapping import EXIT_CODES, exit_code_of
from halfeven.serve.settings import Settings
from typer.testing import CliRunner

DOCS = Path(__file__).resolve().parents[3] / "docs"
HEAD = """# The command line

Every command takes `--help`; with `--json` the last line on stdout is one JSON object, while logs and progress go to
stderr. The options of `serve` are settings too, by the variable in brackets; further settings are in
[operation.md](operation.md). This page is generated from the commands:
`HALFEVEN_TEST_WRITE=1 python -m pytest tests/serve/cli/test_commands_page.py`.

| exit code | means |
|---|---|
"""
ROOT = typer.main.get_command(app)


def commands() -> dict[str, tuple[str, object]]:
    """(the group in ``--help``, the command) by its words."""
    found: dict[str, tuple[str, object]] = {}
    for name, command in ROOT.commands.items():  # type: ignore[attr-defined]
        for more, one in getattr(command, "commands", {"": command}).items():
            found[f"{name} {more}".strip()] = (command.rich_help_panel, one)
    return found


def cell(text: object) -> str:
    return " ".join(str(text or "").split()).replace("|", "\\|").replace("<", "&lt;")


def rows(command: object) -> list[str]:
    lines = []
    for param in command.params:  # type: ignore[attr-defined]
        if getattr(param, "hidden", False) or param.name in ("as_json", "help"):
            continue
        named = ", ".join(f"`{one}`" for one in (*param.opts, *param.secondary_opts) if one.startswith("-"))
        variable = f" [{param.envvar}]" if getattr(param, "envvar", None) else ""
        shown = (
            param.default not in (None, False, True, ())
            and not callable(param.default)
            and not param.required
        )
        default = f" (default `{param.default}`)" if shown else ""
        lines.append(f"| {named or f'`{param.name.upper()}`'} | {cell(param.help)}{variable}{default} |")
    return lines


def page() -> str:
    lines = [HEAD + "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())]
    group = ""
    for name, (panel, command) in commands().items():
        if panel != group:
            group = panel
            lines.append(f"\n## {panel}")
        lines.append(f"\n### halfeven {name}\n\n{cell(command.help)}\n")  # type: ignore[attr-defined]
        if found := rows(command):
            lines += ["| argument or option | |", "|---|---|", *found]
    return "\n".join(lines) + "\n"


def test_the_page_has_every_command_and_option() -> None:
    if os.environ.get("HALFEVEN_TEST_WRITE"):
        (DOCS / "commands.md").write_text(page())
    assert (DOCS / "commands.md").read_text() == page(), "write the page anew, as its head says"


def test_every_command_and_option_is_explained_and_every_flag_goes_without_a_type() -> None:
    for name, (panel, command) in commands().items():
        assert panel and command.help, name  # type: ignore[attr-defined]
        for param in command.params:  # type: ignore[attr-defined]
            assert getattr(param, "hidden", False) or param.help, (name, param.name)
        done = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"})
        assert done.exit_code == 0 and "<bool>" not in done.output, done.output
        assert max(map(len, done.output.splitlines())) <= 80
    top = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    assert "<bool>" not in top and all(f" {code}: " in top for code in EXIT_CODES)


def test_serve_says_the_default_and_the_variable_of_each_option() -> None:
    found = {param.name: param.help for param in commands()["serve"][1].params}  # type: ignore[attr-defined]
    for name, field in Settings.model_fields.items():
        if name in found and name != "http_workers":
            assert f"[HALFEVEN_{name.upper()}]" in found[name]
            if field.default not in (None, "", False, True):
                value = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
                assert re.search(rf"default:? {re.escape(value)}", found[name]), name


def test_exit_codes_are_one_table_in_code_and_docs() -> None:
    stated = dict(re.findall(r"^\| (\d) \| (.+) \|$", (DOCS / "commands.md").read_text(), re.MULTILINE))
    assert {int(code): meaning for code, meaning in stated.items()} == EXIT_CODES
    kinds = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.HalfevenError)
    ]
    assert {exit_code_of(kind.__new__(kind)) for kind in kinds} | {0} == set(EXIT_CODES)
