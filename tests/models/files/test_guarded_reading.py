"""The guard around readers of strangers' bytes: a refusal that names the file, and a traceback for the log alone."""

import logging
from pathlib import Path

import pytest
from halfeven.models.errors import BadFolder, BadSetting, Unforeseen
from halfeven.models.files.guarded_reading import guarded, reading


@guarded("a cake")
def read(path: Path, error: BaseException | None = None) -> str:
    if error is not None:
        raise error
    return path.name


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("by zero"),
        RecursionError("deep"),
        MemoryError(),
        KeyError("x"),
        OSError("Invalid data stream"),
    ],
)
def test_what_a_reader_did_not_foresee_refuses_the_file_by_name_and_is_logged(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Unforeseen, match=r"net/cake\.bin cannot be read as a cake") as refused:
        read(Path("net/cake.bin"), error)
    assert type(error).__name__ in str(refused.value) and "Traceback" in caplog.text
    assert refused.value.__cause__ is error


def test_own_words_the_system_s_errors_and_interrupts_pass(tmp_path: Path) -> None:
    for error in (BadFolder("own words"), FileNotFoundError(2, "No such file"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised:
            read(tmp_path, error)
        assert raised.value is error
    assert read(tmp_path / "x") == "x"


def test_a_command_prints_no_traceback_unless_it_was_asked_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        with pytest.raises(Unforeseen), reading("file", "a cake"):
            raise ZeroDivisionError
        return capsys.readouterr().err

    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # nobody has set logging up
    monkeypatch.delenv("HALFEVEN_LOG_LEVEL", raising=False)
    assert "Traceback" not in said()
    monkeypatch.setenv("HALFEVEN_LOG_LEVEL", "debug")
    assert "Traceback" in said()


def test_a_file_is_not_at_fault_for_a_package_that_is_not_installed() -> None:
    with pytest.raises(BadSetting, match=r"needs the package 'torch'.*pip install"):
        read(Path("net.pt2"), ModuleNotFoundError("No module named 'torch'", name="torch"))
