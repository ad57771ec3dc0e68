"""The common parts of many tests: a seed for random numbers, the wheel as a user gets it; no GPU, no GPU tests."""

import gc
import logging
import os
import secrets
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests import preloaded
from tests.few_unseen import asks_few, set_unseen
from tests.patience import PATIENCE_S

pytest_plugins = ["tests.forked_workers", "tests.turns"]
subprocess.Popen = preloaded.Popen
for phase in ("connect", "read", "write", "pool"):  # a request without a limit of its own waits 5 s otherwise
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, PATIENCE_S)

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    ".git",
    ".gpu",
    ".links",
    ".venv",
    "build",
    "dist",
    "tests",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    "halfeven-store",
)


SEED = int(os.environ.setdefault("HALFEVEN_TEST_SEED", str(secrets.randbits(32))))  # workers inherit it


class _Draws:
    """Every run draws fresh numbers, and the same ones again where its seed is given, whatever ran before a test:
    ``np.random.default_rng()`` without a seed and torch's generator follow the session's seed and the test's name."""

    def __init__(self) -> None:
        self._default_rng: Callable[..., np.random.Generator] = np.random.default_rng
        self.begin("collection")
        np.random.default_rng = self.default_rng

    def begin(self, name: str) -> None:
        self._sequence = np.random.SeedSequence([SEED, zlib.crc32(name.encode())])
        torch.manual_seed(int(self._sequence.generate_state(1)[0]))

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Draw by ``name`` inside the block, and go on afterwards as if the block had not been."""
        outside, state = self._sequence, torch.get_rng_state()
        self.begin(name)
        try:
            yield
        finally:
            self._sequence = outside
            torch.set_rng_state(state)

    def default_rng(self, seed: object = None) -> np.random.Generator:
        return self._default_rng(self._sequence.spawn(1)[0] if seed is None else seed)


_draws = _Draws()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting makes millions of objects that stay: going through them again and again is 10 of its 26 s, and much of
    every later collection of garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)  # a conversion makes and keeps millions of objects, too
        gc.enable()


def pytest_report_header() -> str:
    return f"seed: {SEED} (HALFEVEN_TEST_SEED={SEED} draws the same numbers again)"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _draws.begin(item.nodeid)
    set_unseen(few=asks_few(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """A test leaves logging as it was. With the level that a server sets, pytest would keep every record of
    later tests, and the objects in them, and the server's handler writes to a file that pytest has closed."""
    handlers, levels = list(logging.root.handlers), _levels()
    try:
        return (yield)
    finally:
        logging.root.handlers[:] = handlers
        for name, changed in _levels().items():
            if changed != levels.get(name, logging.NOTSET):  # to set one forgets what all loggers remember
                logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))


def _levels() -> dict[str | None, int]:
    """The level of each of our loggers, and of the root (None)."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("halfeven")]
    return {name: logging.getLogger(name).level for name in (None, *names)}


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fixture that many tests share draws by its own name, not by that of the test that asks for it first: which test
    that is changes from run to run."""
    if fixturedef.scope == "function":
        return (yield)
    with _draws.within(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"):
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, and so counted, where there is no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device (make gpu)"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """One process runs the tests of the wheel: else each worker builds one."""
    if "built_wheel" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.together("the wheel"))


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng()


@pytest.fixture(scope="session", autouse=True)
def _what_is_read_fits_the_schema() -> Iterator[None]:
    """Every model.toml that a test's own process reads fits the JSON Schema."""
    import jsonschema_rs
    from halfeven.models.folder import package

    from tests.reference.model_schema import model_schema

    reader, valid = package._Reader, jsonschema_rs.validator_for(model_schema()).validate
    read = reader.read

    def checked(self: Any, data: Any) -> Any:
        found = read(self, data)
        valid(data)
        return found

    reader.read = checked  # type: ignore[method-assign]
    yield
    reader.read = read  # type: ignore[method-assign]


@pytest.fixture
def plain_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain setup for tests that load models and ask for no choice: each model runs on one thread without optional
    passes, and no other setup is measured. A measurement takes seconds of both cores where other tests disturb it."""
    from halfeven.models.engines.cpu.setup import CpuSetup
    from halfeven.serve.versions.loading import kept_setups
    from halfeven.serve.versions.loading.cpu_choice import CpuChoice

    chosen = CpuChoice(CpuSetup(threads=1), ())
    monkeypatch.setattr(kept_setups, "choose_setup", lambda *_: chosen)


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout. Built from a copy: setuptools leaves ``build/`` where it works."""
    folder = tmp_path_factory.mktemp("wheel")
    source = Path(shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE))
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--quiet", "--wheel-dir", str(folder)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"the wheel could not be built:\n{done.stdout}\n{done.stderr}"
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def unpacked_wheel(built_wheel: Path) -> Path:
    """A folder like a site-packages that has nothing but the wheel: put it on ``PYTHONPATH``."""
    folder = built_wheel.parent / "site"
    with zipfile.ZipFile(built_wheel) as archive:
        archive.extractall(folder)
    return folder
