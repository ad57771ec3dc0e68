"""An environment like that of the GPU machine in machine.txt, without its driver: the same Python, the same torch.

    python -m tests.benchmarks.gpu.lookalike FOLDER

Five gigabytes, two minutes. Where no Python 3.12 is found, this interpreter's is taken and the output says so.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.gpu.packages import MACHINE, TARGET, machine


def python() -> str:
    """An interpreter of the machine's version."""
    wanted = TARGET["python_version"]
    places = sorted(Path.home().glob(f".pyenv/versions/{wanted}.*/bin/python"))
    for one in (f"python{wanted}", *map(str, places)):
        try:
            said = subprocess.run(
                [one, "-c", "import venv, sys; print(sys.version)"], capture_output=True, text=True
            )
        except FileNotFoundError:
            continue
        if said.stdout.startswith(f"{wanted}."):
            return one
    print(f"no Python {wanted} was found: the rehearsal is with {sys.version.split()[0]}")
    return sys.executable


def make(folder: Path) -> None:
    """Make the environment; nothing is done where it is there already and machine.txt is the same."""
    digest = hashlib.sha256(MACHINE.read_bytes()).hexdigest()
    ready = folder / "made-of"
    if ready.exists() and ready.read_text() == digest:
        return
    subprocess.run([python(), "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    lines = [f"{name}=={version}" if version else name for name, version in machine().items()]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "install",
        "--quiet",
        "--no-compile",
    ]
    subprocess.run([*pip, "--disable-pip-version-check", *lines], check=True)
    ready.write_text(digest)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
