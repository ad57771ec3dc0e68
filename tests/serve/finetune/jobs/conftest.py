"""One store and one undisturbed job for every test of this folder that compares with it; a runner without processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from halfeven.models.store.store import Store

from tests.kept import kept_store
from tests.serve.finetune.jobs import hard_job
from tests.serve.finetune.jobs.hard_job import EVERY, STEPS, Outcome, begin, create, outcome, store_of
from tests.serve.finetune.jobs.job_server import ended, served_to_client
from tests.serve.finetune.jobs.runner_stage import Runner


def pytest_itemcollected(item: pytest.Item) -> None:
    """One process runs the tests that compare with the undisturbed job: it takes as long as most of them."""
    if "left_alone" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.together("an undisturbed job"))


@pytest.fixture(scope="session")
def begun() -> Path:
    """A folder with a store in which ``net@1`` is active, and the rows to learn from. Not to be changed."""
    return kept_store(hard_job.__file__, begin)


@pytest.fixture(scope="session")
def left_alone(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    store = store_of(begun, tmp_path_factory.mktemp("alone"))
    with served_to_client(store, "net") as (_, port, client):
        job = create(client, begun)
        found = outcome(store, client, port, ended(client, job.id))
    skipped = [step for step in found.steps if step["cause"] == "gradient overflow"]
    assert len(skipped) > 5 and len(found.steps) == STEPS
    assert len(found.evaluations) == STEPS // EVERY
    return found


@pytest.fixture(scope="session")
def trained(left_alone: Outcome) -> Store:
    """The store of the undisturbed job: ``net@2`` is what it made, from ``net@1``. Not to be changed."""
    return left_alone.store


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path / "store")
    yield made
    made.job_store.close()
