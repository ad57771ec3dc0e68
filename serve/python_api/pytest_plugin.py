"""A plugin of pytest, which finds it where halfeven is installed: the fixtures ``half_equal`` and ``lock_holds``."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def half_equal() -> Callable[..., None]:
    """``halfeven.assert_half_equal``: ``half_equal(fp32, fp16, samples=x)``."""
    from .half_equality import assert_half_equal  # brings what most tests need not

    def judged(*models: Any, **asked: Any) -> None:
        __tracebackhide__ = True  # the test's own line is what failed
        assert_half_equal(*models, **asked)

    return judged


@pytest.fixture
def lock_holds() -> Callable[..., None]:
    """``halfeven check``: ``lock_holds("halfeven.lock", "--strict")``. The test fails with what it says."""

    def checked(lock: str | Path = "halfeven.lock", *options: str) -> None:
        __tracebackhide__ = True
        command = [sys.executable, "-P", "-m", "halfeven", "check", "--lock", str(lock), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.fail(done.stdout + done.stderr)

    return checked
