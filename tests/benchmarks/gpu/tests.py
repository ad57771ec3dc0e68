"""The tests that need a device, in several processes where pytest-xdist is there; each is a fact when it ends."""

import importlib.util
from pathlib import Path

import pytest

from tests.benchmarks.gpu.phase import Phase

ROOT = Path(__file__).resolve().parents[3]
PROCESSES = 8
# A warning that only a device gives is no failure.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "default")
NOTED_EVERY = 20  # tests


class Notes:
    """A plugin that notes each test as it ends, and what could not be collected."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self.counts[report.outcome] += 1
        if not sum(self.counts.values()) % NOTED_EVERY:
            self._phase.facts.add("tests so far", **self.counts)
        if report.outcome == "failed":
            self._phase.facts.claim("test", False, test=report.nodeid, error=report.longreprtext[-600:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._phase.facts.claim("collected", False, file=report.nodeid, error=report.longreprtext[-600:])


def files() -> list[str]:
    """The test files with tests that are marked ``gpu``: others need packages that a GPU machine lacks."""
    found = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    return [str(file.relative_to(ROOT)) for file in found]


def measure(phase: Phase) -> None:
    notes = Notes(phase)
    options = [*OPTIONS, "-m", "gpu"]
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(2 if phase.tiny else PROCESSES), "--dist", "load"]
    code = pytest.main([*options, *files()], plugins=[notes])
    phase.facts.claim("tests", int(code) == 0, **notes.counts, exit_code=int(code))
