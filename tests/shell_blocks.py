"""The shell blocks of the pages, and how a page is run: by bash, in a prepared folder, with a server that ends with it.

A block is marked ``console`` where a test runs it. It is marked ``sh`` where it needs what a test machine lacks: a
container engine, a cluster, a GPU, a package index; the commands of halfeven in it are parsed all the same.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.server_process import free_port
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("console", "sh", "bash", "shell")
RUN = "console"

# The functions in front of a page's commands. The server is asked until it is ready; curl waits between its tries.
BEFORE = """
set -euo pipefail
export HALFEVEN_PORT={port} OMP_NUM_THREADS=1 PATH="{bin}:$PATH"
export HALFEVEN_DRAIN_SECONDS=0 PYTHONHASHSEED=0
asking=" {asking} "
halfeven() {{
  case "$asking" in
    *" $1 "*) command halfeven "$@" --url "$scheme://127.0.0.1:$HALFEVEN_PORT" ;;
    *) command halfeven "$@" ;;
  esac
}}
curl() {{ command curl --fail --silent --show-error --insecure "$@"; }}
server= started= scheme=http
stop() {{ if [ -n "$server" ]; then kill -INT "$server"; wait "$server" || true; server=; fi; }}
trap stop EXIT
start() {{
  if [ -n "$server" ] && [ "$*" = "$started" ]; then return; fi
  stop
  started="$*"
  case "$*" in *--tls-cert*) scheme=https;; *) scheme=http;; esac
  "$@" >> serve.log 2>&1 &
  server=$!
  curl -o ready.json --retry 300 --retry-delay 1 --retry-connrefused 2> waited.txt \\
    "$scheme://127.0.0.1:$HALFEVEN_PORT/v2/health/ready" || {{ cat serve.log; exit 1; }}
}}
"""


@dataclass(frozen=True, slots=True)
class Block:
    kind: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines of the block: without what a here-document holds, continued lines joined, comments taken off."""
        text = re.sub(r"<<'?(\w+)'?(.*?)\n.*?^\1$", r"\2", self.text, flags=re.MULTILINE | re.DOTALL)
        lines = re.sub(r"\\\n\s*", " ", text).splitlines()
        return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def blocks(page: Path) -> list[Block]:
    found = [Block(kind, text) for kind, text in BLOCK.findall(page.read_text())]
    return [one for one in found if one.kind in SHELL or (not one.kind and one.text.startswith("halfeven "))]


def script(pages: Sequence[Path], bins: Path, expected: Mapping[str, int], served: bool = False) -> str:
    """The script that bash runs: every block that is to be run, `halfeven serve` beside the commands behind it.

    ``expected`` are exit codes other than 0 by the beginnings of commands; ``served``: the pages' reader has a server.
    """
    port = free_port()
    lines = [
        BEFORE.format(port=port, bin=bins, asking=" ".join(asking())),
        *(["start command halfeven serve"] if served else []),
    ]
    for page in pages:
        lines.append(f"echo '== {page.name}'")
        for block in blocks(page):
            if block.kind == RUN:
                lines.append(_as_run(block.text, port, expected))
        # A how-to mixes both; other pages have tests of their own for their Python.
        if page.parent.name == "howto":
            for text in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
                lines.append(f"python - <<'PYTHON'\n{_as_run(text, port, {})}PYTHON")
    return "\n".join(lines)


def _as_run(text: str, port: int, expected: Mapping[str, int]) -> str:
    """The text of a block at the server and in the folder of the test."""
    text = re.sub(r"(localhost|127\.0\.0\.1):8000", rf"\1:{port}", text).replace("0.0.0.0", "127.0.0.1")
    text = re.sub(r"(?<![\w.$])/(backups|var/lib|models|shared)/?", r"rooted/\1/", text)
    text = re.sub(
        r"^((?:[A-Z_]+=\S+ (?:\\\n\s*)?)*)(halfeven serve\b)", r"\1start command \2", text, flags=re.MULTILINE
    )
    # A second of load shows what more seconds show: the pages measure for people, and here the command is tested.
    text = re.sub(r"--seconds \d+", "--seconds 1", text)
    for command, code in expected.items():
        text = re.sub(
            rf"^({re.escape(command)}.*?)( +#.*)?$", rf"\1 || [ $? = {code} ]", text, flags=re.MULTILINE
        )
    return text


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script; whatever it started ends with it."""
    command = ["bash", "-c", text]
    started = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = started.communicate(timeout=PATIENCE_S * 4)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, started.returncode, out, errors)


def write_commands(bins: Path) -> None:
    """`halfeven` and `python` of this environment, whatever the PATH has."""
    bins.mkdir()
    here = "import sys; sys.argv[0] = 'halfeven'; from halfeven.serve.cli.main import main; main()"
    for name, words in (("halfeven", f'-c "{here}"'), ("python", "")):
        (bins / name).write_text(f'#!/bin/sh\nexec {sys.executable} -B {words} "$@"\n')
        (bins / name).chmod(0o755)


def asking() -> list[str]:
    """The commands with an option ``--url``: they ask a server."""
    import typer
    from halfeven.serve.cli.main import app

    found = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return [name for name, one in found.items() if any("--url" in param.opts for param in one.params)]
