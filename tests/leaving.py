"""The requests that leave this machine, and the files that are written outside of the folders that were named: seen for
every process of a command and its children, whatever language a library is written in.

`leaving.c` is preloaded: it notes and refuses each connection, datagram and name beyond loopback. The home folder, the
folder for temporary files and the working directory are empty at the beginning, and are looked at afterwards.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from halfeven.models.telemetry import OFF

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
_OTHERS_SAY = {"0": "1", "1": "0"}


@dataclass(frozen=True)
class Watch:
    """``environment`` is that of the processes to be watched."""

    place: Path
    environment: Mapping[str, str]

    @property
    def home(self) -> Path:
        return self.place / "home"

    def asked_for(self) -> list[str]:
        """Each address or name beyond this machine that a process asked for."""
        log = self.place / "leaving.log"
        return log.read_text().splitlines() if log.exists() else []

    def written(self) -> list[str]:
        """Each file and folder in the home folder, the working directory and, but for ``halfeven…`` (the stores and
        folders of the commands themselves), the folder for temporary files."""
        left = [one for name in ("home", "work") for one in (self.place / name).rglob("*")]
        left += [one for one in (self.place / "tmp").rglob("*") if not _of_ours(one, self.place / "tmp")]
        return sorted(str(one.relative_to(self.place)) for one in left)

    def run(self, *command: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=dict(self.environment),
            cwd=self.place / "work",
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    @contextmanager
    def serving(self, *options: str) -> Iterator[str]:
        """``halfeven serve`` on a free port: its address, once a model is active. It ends with the block."""
        command = (sys.executable, "-m", "halfeven", "serve", "--port", "0", "--device", "cpu", *options)
        server = subprocess.Popen(
            command, env=dict(self.environment), cwd=self.place / "work", stderr=subprocess.PIPE, text=True
        )
        with server:
            assert server.stderr is not None
            try:
                url = next(line for line in server.stderr if "listens on http" in line).split()[-1]
                next(line for line in server.stderr if " is active: " in line)
                yield url
            finally:
                server.terminate()
                server.stderr.read()


def watch(place: Path) -> Watch:
    """A watch whose environment asks for every telemetry that we know."""
    library = place / "leaving.so"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    for name in ("home", "tmp", "work"):
        (place / name).mkdir()
    proxies = {name for name in os.environ if name.lower().endswith("_proxy")}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in proxies and not name.startswith(("XDG_", "HALFEVEN_"))
    }
    wanted = {name: _OTHERS_SAY[value] for name, value in OFF.items()}
    ours = {"HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), "LD_PRELOAD": str(library)}
    more = {"LEAVING_LOG": str(place / "leaving.log"), "OMP_NUM_THREADS": "1", "HALFEVEN_DRAIN_SECONDS": "0"}
    return Watch(place, {**kept, **wanted, **ours, **more})


def _of_ours(path: Path, folder: Path) -> bool:
    """torch makes an empty folder for its compiler's cache; what it would hold is looked for."""
    top = path.relative_to(folder).parts[0]
    return top.startswith("halfeven") or (top.startswith("torchinductor_") and path.is_dir())
