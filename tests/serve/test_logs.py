"""The log says what happened to whom, for people and for machines."""

import json
import logging
from collections.abc import Callable

import pytest
from halfeven.serve import logs


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """The text that was logged to stderr."""
    return lambda: capsys.readouterr().err


def test_a_json_line_has_the_sentence_the_fields_and_the_traceback(log: Callable[[], str]) -> None:
    logs.set_up("info", "json")
    try:
        raise ValueError("no such luck")
    except ValueError:
        logging.getLogger("halfeven.x").exception(
            "it %s", "failed", extra={"model": "digits", "request_id": "7\n"}
        )
    (text,) = log().splitlines()
    line = json.loads(text)
    assert (line["level"], line["logger"], line["message"]) == ("error", "halfeven.x", "it failed")
    assert (line["model"], line["request_id"]) == ("digits", "7\n")
    assert "no such luck" in line["exception"] and line["time"].endswith("+00:00")


def test_a_sentence_carries_its_fields_and_cannot_forge_a_line(log: Callable[[], str]) -> None:
    logs.set_up()
    logging.getLogger("halfeven.x").warning("slow", extra={"request_id": "a\nERROR forged"})
    assert log() == "WARNING halfeven.x: slow (request_id='a\\nERROR forged')\n"


@pytest.mark.parametrize("mark", ["\n", "\r", "\x1b[2K", "\u2028", "\x00"], ids=repr)
def test_a_caller_s_words_cannot_forge_a_line(log: Callable[[], str], mark: str) -> None:
    logs.set_up()
    words = f"a{mark}ERROR halfeven.x: forged"
    try:
        raise ValueError(words)
    except ValueError:
        logging.getLogger("halfeven.x").exception("'%s' failed", words)
    lines = log().splitlines()
    assert (
        lines[0].startswith("ERROR halfeven.x: 'a\\")
        and len([x for x in lines if x.startswith("ERROR")]) == 1
    )
    assert all(line.isprintable() for line in lines)


def test_below_the_level_nothing_is_said(log: Callable[[], str]) -> None:
    logs.set_up("error")
    logging.getLogger("halfeven.x").warning("quiet")
    assert log() == ""


@pytest.mark.parametrize("access", [False, True])
def test_requests_are_logged_only_where_it_was_asked_for(log: Callable[[], str], access: bool) -> None:
    logs.set_up("error", "json", access)
    logs.requests.info("answered", extra={"model": "digits"})
    assert ("answered" in log()) is access
