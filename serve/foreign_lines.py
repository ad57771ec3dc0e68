"""A process of its own: makes a JSON object of each line on stdin that is none, and writes all to stdout.

`logs.py` starts it by file path (it imports nothing of ours) with stderr's other end as its stdin: libraries in C and
C++ write to stderr themselves (gRPC, ONNX Runtime, torch), and so do children. It is a process so that the last words
of one that crashes are not lost; it ends when nobody can write to the pipe any more.
"""

import json
import re
import sys
from datetime import UTC, datetime

# The level as glog (gRPC: W0000 00:00:00.000000) and ONNX Runtime ([W:onnxruntime:, …]) write it, colours aside.
_LEVEL = re.compile(r"(?:\x1b\[[\d;]*m|[\d\-:. ]|\[)*(?P<letter>[DVIWEF])(?:\d{4} |:onnxruntime)")
_WORDS = re.compile(r"\b(?P<word>ERROR|WARNING|Error|Warning|error(?=: ))\b")
_LEVELS = {"V": "debug", "D": "debug", "I": "info", "W": "warning", "E": "error", "F": "critical"}
_LONGEST = 65536  # characters of a line; what is longer goes on in the next object


def json_line(text: str) -> str:
    """The line as one JSON object: as it is, where it is one."""
    if text.startswith("{"):
        try:
            if isinstance(json.loads(text), dict):
                return text
        except ValueError:
            pass
    found, word = _LEVEL.match(text), _WORDS.search(text[:200])
    level = _LEVELS[found["letter"]] if found else word["word"].lower() if word else "info"
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "logger": "stderr", "message": text})


def main() -> None:
    lines = open(0, encoding="utf-8", errors="replace", newline=None)  # noqa: SIM115 (until the process ends)
    while line := lines.readline(_LONGEST):
        if text := line.rstrip("\n"):
            sys.stdout.write(json_line(text) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
