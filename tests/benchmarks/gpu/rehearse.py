"""The run of a GPU machine, rehearsed without one: in a copy of what is carried there, tiny, on the CPU.

    .gpu/lookalike/bin/python -m tests.benchmarks.gpu.rehearse FOLDER       (make gpu-rehearse)

It prints what is carried, every import that fails, each phase's time on the CPU and on the simulated device, and what
is left in the files of a run that is interrupted in each phase. Exit code 0: nothing was wrong.
"""

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.__main__ import GRACE_S, LIMITS, ROOT, WHEELS, environment_of
from tests.benchmarks.gpu.facts import HELD, NAME, read
from tests.benchmarks.gpu.packages import MOST_MB

MOST_CARRIED_MIB = 64  # the checkout and the wheels
# The simulated GPU can run these, which have code for CUDA.
ON_SIMULATED = ("machine", "correct", "speed", "training", "hazards")
PATIENCE_S = 300.0
SLOWER = 10.0  # a verdict is not to depend on what else this machine does
# Packages that the machine lacks and no phase needs: those of the extras.
EXTRAS = ("ray", "opentelemetry", "tensorboardX", "grpc_reflection", "fsspec")
IMPORTS = """
import importlib, pkgutil, sys
import halfeven
for module in pkgutil.walk_packages(halfeven.__path__, "halfeven."):
    if ".zoo." in module.name or module.name.endswith("__main__") or module.name == "halfeven.setup":
        continue  # setup.py lies in the checkout's root, which is the package, and is no module of it
    try:
        importlib.import_module(module.name)
    except BaseException as error:
        print(f"{module.name}: {type(error).__name__}: {error}")
"""


class Rehearsal:
    """``wrong`` has a sentence for each thing that would fail on the machine."""

    def __init__(self, folder: Path) -> None:
        self.copy, self.out = folder / "checkout", folder / "out"
        self.wrong: list[str] = []

    def check(self, holds: bool, sentence: str) -> None:
        print(f"{'ok' if holds else 'WRONG'}: {sentence}", flush=True)
        if not holds:
            self.wrong.append(sentence)

    def carried(self) -> None:
        """A copy of what git would carry, with the wheels."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split(
            "\0"
        )
        for name in filter(None, names):
            if (ROOT / name).is_file():
                target = self.copy / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
        checkout, wheels = _bytes_in(self.copy), _bytes_in(ROOT / WHEELS)
        shutil.copytree(ROOT / WHEELS, self.copy / WHEELS)
        self.check(0 < wheels <= MOST_MB * 1e6, f"the wheels have {wheels / 1e6:.1f} MB of at most {MOST_MB}")
        both = (checkout + wheels) / 2**20
        self.check(
            both <= MOST_CARRIED_MIB, f"with the checkout {both:.1f} MiB of at most {MOST_CARRIED_MIB}"
        )

    def imports(self) -> None:
        with environment_of(self.copy) as (_, environment):
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", IMPORTS], cwd=self.copy, env=environment,
                capture_output=True, text=True,
            )  # fmt: skip
        missing = [line for line in done.stdout.splitlines() if not any(f"'{one}" in line for one in EXTRAS)]
        self.check(done.returncode == 0 and not missing, f"every module is imported but for extras {missing}")

    def original(self, name: str, *options: str) -> None:
        """A run to its end: every phase ends, no claim is wrong."""
        out = self.out / name
        done = self._begun(out, *options).wait()
        for fact in read(out):
            if fact["what"] == "phase":
                count = sum(one["phase"] == fact["name"] for one in read(out))
                sentence = f"{name}: {fact['name']} {fact['state']} in {fact.get('took', 0)} s, {count} facts"
                self.check(fact["state"] == "done", sentence)
            elif fact["what"] == "failed" or fact.get("holds") is False:
                self.check(False, f"{name}: {fact}")
        self.check(done == 0, f"{name}: exit code {done}")

    def interrupted(self, phase: str) -> None:
        """SIGINT in the middle of a phase, which waits for it: the run ends, and what was known is in its files."""
        out = self.out / f"interrupted-{phase}"
        count = 1 if phase == "hazards" else 2  # on a CPU it has one fact
        run = self._begun(out, "--device", "cpu", "--only", phase, held=f"{phase}:{count}")
        self._wait(run, lambda: sum(fact["phase"] == phase for fact in read(out)) == count)
        began = time.monotonic()
        run.send_signal(signal.SIGINT)
        code, took = run.wait(), time.monotonic() - began
        facts: list[dict[str, Any]] = list(read(out))
        states = [fact["state"] for fact in facts if fact["what"] == "phase"]
        kept = sum(fact["phase"] == phase for fact in facts)
        original = (out / NAME).read_text().count("\n") == len(facts)
        sentence = (
            f"interrupted in {phase}: {kept} facts kept, {states}, exit code {code}, {took:.1f} s to the end"
        )
        ended = facts[-1]["what"] == "end" and states and states[0].startswith("interrupted")
        self.check(bool(ended and original and kept and code == 1 and took < SLOWER * GRACE_S), sentence)

    def _begun(self, out: Path, *options: str, held: str = "") -> subprocess.Popen[bytes]:
        out.mkdir(parents=True)
        slow = ["--slower", str(SLOWER), "--seconds", str(SLOWER * sum(LIMITS.values()))]
        command = [sys.executable, "-m", "tests.benchmarks.gpu", str(out), "--tiny", *slow, *options]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Threads of a tiny net only wait for each other.
        environment |= {"OMP_NUM_THREADS": "1", HELD: held}
        with (out / "printed.txt").open("wb") as printed:
            return subprocess.Popen(command, cwd=self.copy, env=environment, stdout=printed, stderr=printed)

    @staticmethod
    def _wait(run: subprocess.Popen[bytes], holds: Callable[[], bool]) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not holds() and run.poll() is None and time.monotonic() < ends:
            time.sleep(0.02)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    import torch

    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    rehearsal = Rehearsal(folder)
    rehearsal.carried()
    rehearsal.imports()
    rehearsal.original("on the CPU", "--device", "cpu")
    rehearsal.original("simulated", "--simulated", "--only", ",".join(ON_SIMULATED))
    for phase in LIMITS:
        rehearsal.interrupted(phase)
    print(f"{len(rehearsal.wrong)} wrong")
    return int(bool(rehearsal.wrong))


if __name__ == "__main__":
    sys.exit(main())
