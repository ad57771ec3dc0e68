"""Every line on stderr is one JSON object with ``--log-format json``, whoever wrote it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from halfeven.serve.cli.main import _log_format
from halfeven.serve.foreign_lines import json_line

BEGIN = "import os, subprocess, sys, threading, warnings\n"
BEGIN += "from halfeven.serve.logs import announce, make_all_stderr_json, set_up\n"
WAYS = [  # what is written, and the messages of its objects
    {
        "print('two\\nlines', file=sys.stderr)": ["two", "lines"],
        "os.write(2, b'from C\\n')": ["from C"],
        "os.write(2, b'\\xff\\n')": ["\ufffd"],
        "os.write(2, b'1%\\r2%\\r\\n')": ["1%", "2%"],  # a progress bar
        "subprocess.run(['sh', '-c', 'echo child >&2'])": ["child"],
        "subprocess.run(['sh', '-c', 'echo \\'{\"message\": \"own\"}\\' >&2'])": ["own"],
        "announce('listens')": ["listens"],
    },
    {"os.write(2, b'cut off')": ["cut off"]},
    {"os.write(2, b'last words\\n'); os.abort()": ["last words"]},
]
LOGGED = {
    "a warning": "warnings.warn('careful')",
    "an unforeseen error": "raise ValueError('no such luck')",
    "an unforeseen error of a thread": "threading.Thread(target=lambda: 1 / 0).start()",
}


def lines_of(script: str) -> list[dict[str, Any]]:
    program = f"{BEGIN}make_all_stderr_json()\nset_up('warning', 'json')\n{script}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(isinstance(one, dict) for one in found)
    return found


@pytest.mark.parametrize("ways", WAYS, ids=["in turn", "no end of line", "a crash"])
def test_a_line_of_others_is_an_object(ways: dict[str, list[str]]) -> None:
    said = [message for messages in ways.values() for message in messages]
    assert sorted(one["message"] for one in lines_of("\n".join(ways))) == sorted(said)


@pytest.mark.parametrize("way", LOGGED)
def test_what_python_would_print_is_logged(way: str) -> None:
    (line,) = lines_of(LOGGED[way])
    assert line["level"] in ("warning", "critical") and {"time", "logger", "message"} <= set(line)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("E0000 00:00:1732.5 12 server.cc:1] no port", "error"),
        ("2026-11-26 20:00:00.1 [W:onnxruntime:, execution.cc:2 run] slow", "warning"),
        ("\x1b[1;31m2026-11-26 20:00:00.1 [E:onnxruntime:Default, a.cc:2 run] bad\x1b[m", "error"),
        ("[W1126 20:00:00.1 init.cpp:3] Warning: torch", "warning"),
        ("UserWarning: careful", "info"),
        ("error: no port", "error"),
        ("plain", "info"),
    ],
)
def test_the_level_is_that_of_the_library(line: str, level: str) -> None:
    found = json.loads(json_line(line))
    assert (found["level"], found["message"]) == (level, line)


@pytest.mark.slow
def test_a_server_writes_nothing_but_objects(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halfeven", "serve", "--store", str(tmp_path), "--port", "0"]
    command += ["--grpc-port", "0"]
    process = subprocess.Popen(
        [*command, "--log-format", "json", "--drain-seconds", "0"], stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr is not None
        lines = [next(line for line in process.stderr if "has no model yet" in line)]
        process.terminate()
        lines += process.stderr.readlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", ["--port 70000 --log-format json", "--port x --log-format=json", "--no-such-option"]
)
def test_a_start_that_is_refused_says_so_in_objects(tmp_path: Path, wrong: str) -> None:
    """The last one asks for objects by the environment."""
    command = [sys.executable, "-m", "halfeven", "serve", "--store", str(tmp_path), *wrong.split()]
    environment = os.environ | ({} if "json" in wrong else {"HALFEVEN_LOG_FORMAT": "json"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    levels = [json.loads(line)["level"] for line in done.stderr.splitlines()]
    assert done.returncode == 2 and "error" in levels


def test_the_last_of_several_forms_counts_however_each_is_written() -> None:
    text, objects = "--log-format=text", ["--log-format", "json"]
    assert _log_format(["serve", *objects, text], {}) == "text"
    assert _log_format(["serve", text, *objects], {"HALFEVEN_LOG_FORMAT": "text"}) == "json"
    assert _log_format(["serve"], {"halfeven_log_format": "json"}) == "json"
