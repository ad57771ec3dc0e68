"""A slice of this suite on a server with two HTTP workers: the same tests, imported.

``HALFEVEN_HTTP_WORKERS=2 pytest tests/conformance`` starts every server of the suite so.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import BODY_SECONDS, Serving, served
from tests.conformance.hosted import MODELS
from tests.conformance.test_http import *  # noqa: F403
from tests.conformance.test_limits import (  # noqa: F401
    test_a_declared_length_above_the_limit_is_refused_before_a_byte_is_sent,
    test_callers_who_hang_up_in_the_middle_leave_nothing_behind,
    test_limit_json,
    test_limit_raw_binary,
)

pytestmark = pytest.mark.slow  # every claim is made of one process in every run


@pytest.fixture(scope="module")
def serving(hosted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    store = shutil.copytree(hosted, tmp_path_factory.mktemp("workers") / "store")
    settings = {"max_body_mib": 1, "body_seconds": BODY_SECONDS, "grpc_port": 0, "http_workers": 2}
    with served(store, list(MODELS), **settings) as server:
        assert sorted(server.children()) == ["halfeven-engine", "halfeven-http-1", "halfeven-http-2"]
        yield server
