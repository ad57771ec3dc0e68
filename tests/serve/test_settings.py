"""Variables that are no settings are named: what was meant is not done."""

import re
from pathlib import Path

import halfeven
import pytest
from halfeven.models.errors import BadSetting
from halfeven.serve.cli.main import app
from halfeven.serve.settings import OF_CONVERSIONS, Settings, read_settings, unknown_variables
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("HALFEVEN_IDEL_SECONDS", "HALFEVEN_IDLE_SECONDS"),
        ("HALFEVEN_LOGFORMAT", "HALFEVEN_LOG_FORMAT"),
        ("HALFEVEN_KEYFILE", "HALFEVEN_KEY_FILE"),
        ("halfeven_prot", "HALFEVEN_PORT"),
        ("HALFEVENPORT", "HALFEVEN_PORT"),
        ("HALFEVN_PORT", "HALFEVEN_PORT"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_nearest_setting(sent: str, meant: str) -> None:
    (sentence,) = unknown_variables({sent: "1", "PATH": "x"})
    assert sent in sentence and sentence.endswith(meant)


def test_settings_and_what_the_tests_use_are_not_named() -> None:
    known = {f"HALFEVEN_{name.upper()}": "" for name in Settings.model_fields}
    assert (
        unknown_variables({**known, "HALFEVEN_API_KEY": "x", "HALFEVEN_TEST_SEED": "1", "halfeven_port": "1"})
        == []
    )


def test_a_value_that_does_not_fit_is_refused_by_the_name_that_gave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BadSetting, match=r"^--port = 99999: "):
        read_settings(port=99999)
    with pytest.raises(BadSetting, match=r"^--prot is no setting: the nearest one is --port$"):
        read_settings(prot=1)
    monkeypatch.setenv("HALFEVEN_PORT", "eight")
    with pytest.raises(BadSetting, match=r"^HALFEVEN_PORT = 'eight': "):
        read_settings()


def test_an_argument_that_only_the_environment_can_give_is_refused_with_its_variable() -> None:
    with pytest.raises(
        BadSetting, match=r"^convert_memory_mib = 4096: .* set HALFEVEN_CONVERT_MEMORY_MIB there$"
    ):
        read_settings(convert_memory_mib=4096)


def test_a_home_folder_that_no_shell_expanded_is_found_in_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server must look for its keys where `halfeven keys add` wrote them: without a key file it answers
    everybody."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, field in Settings.model_fields.items():
        if "Path" in str(field.annotation):
            assert getattr(read_settings(**{name: f"~/{name}"}), name) == tmp_path / name
    assert read_settings(endpoints="~/a.py:A").endpoint_places == [f"{tmp_path}/a.py:A"]
    assert CliRunner().invoke(app, ["keys", "add", "ci", "--store=~/models"]).exit_code == 0
    monkeypatch.setenv("HALFEVEN_STORE", "~/models")
    assert read_settings().access.needed
    assert f"{tmp_path}/none" in CliRunner().invoke(app, ["status", "--key-file=~/none"]).output.replace(
        "\n", ""
    )
    with pytest.raises(BadSetting, match="~nobody-here is no user here"):
        read_settings(store="~nobody-here/models")


@pytest.mark.slow
def test_every_setting_that_is_an_argument_is_read_somewhere() -> None:
    serve = Path(halfeven.__file__).parent / "serve"
    text = "".join(file.read_text() for file in serve.rglob("*.py"))
    text += (serve / "settings.py").read_text().replace("self.", "settings.")
    assert {name for name in Settings.model_fields if not re.search(rf"\bsettings\.{name}\b", text)} == set(
        OF_CONVERSIONS
    )
