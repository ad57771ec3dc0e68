"""Jobs through the API whose trainer, server or conversion is killed, or that are paused: they end bit for bit as one
that is left alone, callers are answered meanwhile, and nothing stays behind."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from halfeven.models.store.store import Store
from halfeven.serve.bench.callers import Caller
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from safetensors.numpy import load_file, save_file

from tests.patience import until
from tests.serve.finetune.jobs.hard_job import EVERY, STEPS, Outcome, create, outcome, store_of
from tests.serve.finetune.jobs.job_server import ended, processes, served_to_client
from tests.slow import KILLS

# Jobs with their processes, and one server for those that are paused.
pytestmark = [pytest.mark.slow(seconds=20), pytest.mark.together("an undisturbed job")]

CONVERSION = b"weights_to_version"


def left_behind(store: Store) -> list[str]:
    """The files that no death may leave: folders of jobs, drafts, checkpoints, tables that were being read."""
    return [
        str(path)
        for name in ("jobs/*", "models/*/.draft-*", "files/.upload-*")
        for path in store.root.glob(name)
    ]


def progress(client: openai.OpenAI, id: str) -> int:
    return ours(client, id)["progress"].get("step", 0)


def ours(client: openai.OpenAI, id: str) -> dict[str, Any]:
    found: Any = client.fine_tuning.jobs.retrieve(id).to_dict()["halfeven"]
    return found


def messages(client: openai.OpenAI, id: str) -> list[str]:
    return [event.message for event in client.fine_tuning.jobs.list_events(id, limit=1000)][::-1]


@contextmanager
def answering(port: int) -> Iterator[Callable[[], int]]:
    """A caller asks all the time: every answer must come whole. Gives the count of the answers so far."""
    stop, count, faults = threading.Event(), [0], list[BaseException]()

    def ask() -> None:
        caller = Caller(port, "net")
        while not stop.is_set():
            try:
                caller.infer({"x": np.ones((2, 4), np.float32)})
                count[0] += 1
            except BaseException as error:
                faults.append(error)
                return
            time.sleep(0.005)
        caller.close()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        stop.set()
        thread.join()
    assert not faults and count[0]


def kill(store: Store, words: bytes = b"training.trainer") -> None:
    pid = until(lambda: processes(store, words))[0]
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in processes(store, words))


def test_killed_in_turn_trainer_server_and_conversion_are_made_good(
    begun: Path, left_alone: Outcome, tmp_path: Path
) -> None:
    store = store_of(begun, tmp_path)
    with served_to_client(store, "net") as (process, port, client):
        job = create(client, begun)
        # So few steps may lose accuracy, which the gate would refuse.
        waiting = create(client, begun, n_epochs=1, precision="fp32", forgetting_tolerance=1.0)
        with answering(port):
            until(lambda: progress(client, job.id) > 2 * EVERY)
            kill(store)
            until(lambda: any("goes on behind" in one for one in messages(client, job.id)))
        process.kill()
        process.wait()
        until(lambda: not processes(store), 10.0)
    job_store = JobStore(store.root / "halfeven.db")
    states = {id: job_store.job(id).status for id in job_store.unfinished()}
    job_store.close()
    assert states == {job.id: "running", waiting.id: "queued"}
    with served_to_client(store, "net") as (_, port, client):
        with answering(port):
            until(lambda: ours(client, job.id)["stage"] in ("proving", "judging"))
            kill(store, CONVERSION)
            done = ended(client, job.id)
        assert outcome(store, client, port, done) == left_alone
        events = messages(client, job.id)
        assert ended(client, waiting.id).status == "succeeded"
        until(lambda: not left_behind(store))
    killed = next(
        number for number, one in enumerate(events) if "the conversion ended without a result" in one
    )
    assert not any("training" in one for one in events[killed:]), "it is not trained again"
    assert sum("goes on behind" in one for one in events) == 2
    assert any("no process runs this job any more" in one for one in events)
    assert store.numbers("net") == [1, 2, 3], "each is published once"


Served = tuple[Store, int, openai.OpenAI]


@pytest.fixture(scope="module")
def served(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that was started where dead processes had left folders and a living one wrote a draft: what the dead
    ones left is gone, and the draft stayed."""
    store = store_of(begun, tmp_path_factory.mktemp("served"))
    for place in ("jobs/ftjob-gone/pass-1/checkpoints", "models/net/.draft-dead", "files/.upload-table-dead"):
        (store.root / place).mkdir(parents=True)
        (store.root / place / "half.safetensors").write_bytes(b"half")
    with ExitStack() as stack:
        with store.draft("net") as draft:
            _, port, client = stack.enter_context(served_to_client(store, "net"))
            until(lambda: left_behind(store) == [str(draft.folder)])
            assert draft.folder.is_dir(), "the one that is being written stays"
        yield store, port, client


def paused(served: Served, begun: Path, behind: int) -> str:
    store, _, client = served
    id = create(client, begun).id
    until(lambda: progress(client, id) > behind)
    client.fine_tuning.jobs.pause(id)
    until(lambda: client.fine_tuning.jobs.retrieve(id).status == "paused")
    left = {path.name for path in (store.root / "jobs" / id / "pass-1").iterdir()}
    assert "checkpoints" in left and not left & {"data.safetensors", "parent.safetensors", "original.pt2"}
    return id


def test_paused_and_resumed_by_the_client_it_is_as_if_it_had_not_been(
    begun: Path, left_alone: Outcome, served: Served
) -> None:
    (store, port, client), job = served, paused(served, begun, EVERY)
    jobs, reached = client.fine_tuning.jobs, progress(client, job)
    assert EVERY < reached < STEPS and not processes(store)
    assert jobs.resume(job).status == "queued"
    until(lambda: ours(client, job)["stage"] in ("proving", "judging"))
    jobs.pause(job)
    until(lambda: jobs.retrieve(job).status == "paused")
    assert not processes(store, CONVERSION)
    jobs.resume(job)
    assert outcome(store, client, port, ended(client, job)) == left_alone
    assert f"the training goes on behind its step {reached}" in messages(client, job), "no step was lost"
    until(lambda: not left_behind(store))


def test_a_paused_job_that_is_cancelled_leaves_nothing(begun: Path, served: Served) -> None:
    assert served[2].fine_tuning.jobs.cancel(paused(served, begun, 0)).status == "cancelled"
    until(lambda: not left_behind(served[0]))


def test_resumed_with_other_rows_it_fails_with_its_reason(begun: Path, served: Served) -> None:
    (store, _, client), job = served, paused(served, begun, EVERY)
    numbers = store.numbers("net")
    file = store.root / "files" / hashlib.sha256((begun / "train.safetensors").read_bytes()).hexdigest()
    changed = load_file(file)
    changed["x"][0] += 1
    save_file(changed, file)
    client.fine_tuning.jobs.resume(job)
    done = ended(client, job)
    assert (done.status, done.error.code) == ("failed", "OTHER_DATA")
    assert "create a new job" in done.error.message
    until(lambda: not left_behind(store))
    assert store.numbers("net") == numbers


@pytest.mark.skipif(not KILLS, reason="asked for by name: HALFEVEN_KILLS=20")
@pytest.mark.parametrize("victim", ["trainer", "server", "conversion"])
def test_killed_at_random_moments_every_job_ends_with_the_same_bits(
    victim: str, begun: Path, left_alone: Outcome, tmp_path: Path
) -> None:
    """Two deaths a job: a third without progress would end it."""
    draw, kills = np.random.default_rng(), 0
    for job in count():
        store = store_of(begun, tmp_path / str(job))
        kills += _killed_twice(victim, store, begun, left_alone, draw)
        if kills >= KILLS:
            return


def _killed_twice(
    victim: str, store: Store, begun: Path, left_alone: Outcome, draw: np.random.Generator
) -> int:
    """The deaths that came before the job's end."""
    kills, id = 0, ""
    for life in range(3):
        with served_to_client(store, "net") as (process, port, client):
            id = id or create(client, begun).id
            with answering(port) if victim != "server" else served_quietly():
                while kills < 2:
                    time.sleep(draw.uniform(0.05, 12.0 if victim == "server" else 5.0))
                    if client.fine_tuning.jobs.retrieve(id).finished_at is not None:
                        break
                    if victim == "server":
                        break
                    words = b"training.trainer" if victim == "trainer" else CONVERSION
                    for pid in processes(store, words):
                        os.kill(pid, signal.SIGKILL)
                        kills += 1
            if victim == "server" and life < 2:
                process.kill()
                process.wait()
                kills += 1
                continue
            assert outcome(store, client, port, ended(client, id)) == left_alone
            until(lambda: not left_behind(store))
            assert store.numbers("net") == [1, 2]
            return kills
    return kills


@contextmanager
def served_quietly() -> Iterator[None]:
    yield
