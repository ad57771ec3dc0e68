"""One short run on a GPU machine: phases in the order of their worth, each in a process of its own and with a limit.

    python3 -m tests.benchmarks.gpu OUT [--seconds 540] [--only tests,selftest] [--device cuda:0] [--tiny]

Run it in the root of the checkout. It needs no make and no installation: what `make gpu-prepare` put into ``.gpu`` is
unpacked first. ``OUT`` gets ``facts.jsonl`` (`facts.py`), ``log.txt`` (what the phases and libraries print) and
``machine.txt``. A phase that crashes, hangs or loses the device costs the others nothing. SIGINT and SIGTERM end the
run, and its facts stay. The exit code is 0 where every phase ended and every claim holds.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tests.benchmarks.gpu.facts import Facts, read

ROOT = Path(__file__).resolve().parents[3]
WHEELS = Path(".gpu", "wheels")  # in the checkout, by the version of Python that they are for
# Seconds at most. A run that is cut after four minutes has everything through training, an original one takes nine.
LIMITS = {
    "machine": 20,
    "correct": 55,
    "speed": 65,
    "compiled": 50,
    "kernels": 15,
    "training": 35,
    "over_http": 70,
    "hazards": 20,
    "tests": 135,
    "selftest": 75,
}
GRACE_S = 5.0  # of a phase's limit: from SIGINT, after which it still writes what it knows, to SIGKILL
LEAST_S = 10.0  # a phase that has less is not begun


@contextmanager
def environment_of(root: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder for what is made, and the environment of the phases: the package by its name, the checkout at ``root``,
    and its wheels with their metadata."""
    with tempfile.TemporaryDirectory() as made:
        scratch, packages = Path(made), Path(made) / "packages"
        (scratch / "links").mkdir()
        (scratch / "links" / "halfeven").symlink_to(root)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        for wheel in sorted((root / WHEELS / version).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
        paths = map(str, (scratch / "links", root, packages))
        yield scratch, {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}


class Run:
    """The phases of one run, one after another, until ``ends`` on the monotonic clock. ``command`` begins the command
    line of each."""

    def __init__(
        self, facts: Facts, ends: float, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.facts, self._ends = facts, ends
        self._command, self._environment = command, environment
        self.states: dict[str, str] = {}

    def go(self, names: Sequence[str], limits: Mapping[str, int], log: IO[bytes]) -> None:
        """Every phase, until the time is over or somebody interrupts."""
        for name in names:
            left = self._ends - time.monotonic()
            if left < LEAST_S:
                self._note(name, "not begun", seconds_left=round(left))
                continue
            began, interrupted = time.monotonic(), False
            child = self._begun(name, min(limits[name], left), log)
            try:
                state = _ended(child, min(limits[name], left) - GRACE_S)
            except KeyboardInterrupt:
                state, interrupted = _stopped(child, "interrupted"), True
            self._note(name, state, took=round(time.monotonic() - began, 1))
            if interrupted:
                return

    def _begun(self, name: str, seconds: float, log: IO[bytes]) -> subprocess.Popen[bytes]:
        facts = self.facts
        given = ["--out", str(facts.out), "--began", str(facts.began), "--seconds", str(seconds - GRACE_S)]
        return subprocess.Popen(
            [*self._command, name, *given], cwd=ROOT, env=self._environment, stderr=log, process_group=0
        )

    def _note(self, name: str, state: str, **values: float) -> None:
        self.states[name] = state
        self.facts.add("phase", name=name, state=state, **values)

    @property
    def left(self) -> list[str]:
        return [name for name, state in self.states.items() if state != "done"]


def _ended(child: subprocess.Popen[bytes], seconds: float) -> str:
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        return _stopped(child, "cut")
    return {0: "done"}.get(code, f"failed: exit code {code}")


def _stopped(child: subprocess.Popen[bytes], state: str) -> str:
    """Interrupt the phase and what it started, and kill what does not end; a second interrupt kills at once."""
    try:
        os.killpg(child.pid, signal.SIGINT)
        child.wait(GRACE_S)
    except ProcessLookupError:
        pass
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that the driver holds does not die
            child.wait(GRACE_S)
        return f"{state}, killed"
    return state


def summary(run: Run) -> int:
    """Print what is left and what is wrong; the exit code."""
    wrong = [fact for fact in read(run.facts.out) if fact.get("holds") is False]
    failed = [fact for fact in read(run.facts.out) if fact["what"] == "failed"]
    run.facts.add("end", left=run.left, wrong=len(wrong), failed=len(failed))
    for fact in (*wrong, *failed):
        print("WRONG" if "holds" in fact else "FAILED", {**fact, "at": ""})
    if run.left:
        print(f"left: python3 -m tests.benchmarks.gpu OUT --seconds 180 --only {','.join(run.left)}")
    return int(bool(wrong or failed or run.left))


def asked_for() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0, help="of the whole run")
    parser.add_argument("--only", default="", help=f"phases, with commas between: {','.join(LIMITS)}")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="times the limit of each phase: for a busy CPU"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="nets and counts for a CPU")
    parser.add_argument("--simulated", action="store_true", help="cuda:0 is tests/simulated_gpu")
    asked = parser.parse_args()
    unknown = set(asked.only.split(",")) - {"", *LIMITS}
    if unknown:
        parser.error(
            f"--only {asked.only}: {', '.join(sorted(unknown))} is no phase; expected {', '.join(LIMITS)}"
        )
    return asked


def main() -> int:
    asked = asked_for()
    ends, facts = time.monotonic() + asked.seconds, Facts(asked.out.resolve(), "run", time.time())
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores the first
        signal.signal(number, signal.default_int_handler)
    asked.out.mkdir(parents=True, exist_ok=True)
    with environment_of(ROOT) as (scratch, environment), (asked.out / "log.txt").open("ab") as log:
        options = [f"--{name}" for name in ("tiny", "simulated") if getattr(asked, name)]
        begins = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.gpu.phase", *options]
        begins += ["--device", asked.device, "--scratch", str(scratch)]
        facts.add("packages unpacked")
        run = Run(facts, ends, begins, environment)
        limits = {name: round(limit * asked.slower) for name, limit in LIMITS.items()}
        run.go([name for name in LIMITS if name in (asked.only or ",".join(LIMITS)).split(",")], limits, log)
        return summary(run)


if __name__ == "__main__":
    sys.exit(main())
