"""A plugin of pytest, which finds it where halfeven is installed: the fixture ``half_equal``."""

from collections.abc import Callable
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
