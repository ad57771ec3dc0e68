"""A worker's front and the engine's side of it, on one event loop: the answers are those of the engine's own front."""

import asyncio
import json
import logging
import os
import socket
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import Overloaded
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.key_file import KeyFile
from halfeven.serve.batching.interface import Answer, Terms
from halfeven.serve.http.limits.request_limits import DEFAULTS
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront
from halfeven.serve.workers.channel import RING_BYTES, new_memory
from halfeven.serve.workers.engine_app import Collected, EngineApp
from halfeven.serve.workers.engine_link import AnsweredByEngine, EngineLink
from halfeven.serve.workers.engine_side import EngineSide
from halfeven.serve.workers.shared_bounds import SharedCounts, shared_bounds
from halfeven.serve.workers.worker_front import WorkerFront

from tests.patience import PATIENCE_S
from tests.serve.conftest import HISTORY, FakeRoster, make_roster, tensor

SECONDS = PATIENCE_S
INFER = "/v2/models/double/infer"
SCOPE = {
    "type": "http", "method": "POST", "path": INFER, "raw_path": INFER.encode(), "query_string": b"",
    "http_version": "1.1", "scheme": "http", "root_path": "", "client": ("127.0.0.1", 5), "server": None,
}  # fmt: skip


@dataclass
class Pair:
    roster: FakeRoster
    engine: InferFront
    side: EngineSide
    link: EngineLink
    worker: WorkerFront
    lost: asyncio.Event

    async def ask(
        self, front: InferFront, path: str, body: bytes, method: str = "POST", **headers: str
    ) -> Collected:
        """The whole answer of one of the two fronts."""
        given = {"host": "localhost", "content-length": str(len(body)), **headers}
        collected = Collected(body)
        asked = {"method": method, "path": path, "raw_path": path.encode()}
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
        scope = {**SCOPE, **asked, "headers": named}
        async with asyncio.timeout(SECONDS):
            await front(scope, collected.receive, collected.send)
        return collected

    async def known(self, name: str = "double") -> None:
        async with asyncio.timeout(SECONDS):
            while not self.link.knows(name):
                await asyncio.sleep(0.01)


def paired(test: Callable[[Pair], Awaitable[None]], access: AccessControl | None = None) -> None:
    async def run() -> None:
        roster, tasks, lost = make_roster(), set[asyncio.Task[None]](), asyncio.Event()
        engine = InferFront(build_app(roster, lambda: b"up 1", HISTORY), roster, access=access)
        wires, calls, memory = socket.socketpair(), socket.socketpair(), new_memory()
        link = EngineLink(lost.set)
        link.connect(wires[0], calls[0], os.dup(memory))

        def run_call(call: Any) -> None:
            tasks.add(task := asyncio.get_running_loop().create_task(call))
            task.add_done_callback(tasks.discard)

        side = EngineSide(engine, roster, wires[1], calls[1], memory, lambda: False, run_call, lambda _: None)
        worker = WorkerFront(EngineApp(lambda: link.calls), link, 2**26, 30.0, link.written)
        pair = Pair(roster, engine, side, link, worker, lost)
        await pair.known()
        try:
            await test(pair)
        finally:
            side.close()
            link.close()

    async def in_time() -> None:
        async with asyncio.timeout(SECONDS):
            await run()

    asyncio.run(in_time())


def numbers(rows: int, width: int = 4) -> bytes:
    data = np.arange(rows * width).tolist()
    return json.dumps(
        {"inputs": [{"name": "x", "shape": [rows, width], "datatype": "FP32", "data": data}]}
    ).encode()


def without_times(collected: Collected) -> tuple[int, dict[bytes, bytes], bytes]:
    changing = (b"server-timing", b"content-length")
    return collected.status, {k: v for k, v in collected.headers if k not in changing}, collected.body


ASKED = {
    "good": (INFER, numbers(2)),
    "a version": ("/v2/models/double/versions/3/infer", numbers(1)),
    "an unknown version": ("/v2/models/double/versions/9/infer", numbers(1)),
    "an unknown model": ("/v2/models/nobody/infer", numbers(1)),
    "a model that starts": ("/v2/models/starting/infer", numbers(1)),
    "a bad shape": (INFER, numbers(2, 3)),
    "no JSON": (INFER, b"{"),
    "classes": ("/v2/models/scores/infer", numbers(2, 3)),
    "another route": ("/v1/models/double:predict", b'{"instances": [[1, 2, 3, 4]]}'),
    "no route": ("/v2/nothing", b""),
    "large": (INFER, numbers(300_000)),
}


@pytest.mark.parametrize("which", ASKED)
def test_a_worker_answers_as_the_engine_process_does(which: str) -> None:
    async def same(pair: Pair) -> None:
        path, body = ASKED[which]
        through, direct = await pair.ask(pair.worker, path, body), await pair.ask(pair.engine, path, body)
        assert without_times(through) == without_times(direct)
        assert (b"server-timing" in dict(through.headers)) == (b"server-timing" in dict(direct.headers))

    paired(same)


def test_a_request_for_which_there_is_too_little_memory_ever_is_not_told_to_come_again() -> None:
    async def too_large(pair: Pair) -> None:
        counts, limits = SharedCounts(2), replace(DEFAULTS, in_flight_bytes=2**20)
        pair.engine.bounds, pair.worker.bounds = (shared_bounds(limits, counts, place) for place in (0, 1))
        body = numbers(25_000)
        assert 2**20 // 2 < len(body) < 2**20, "it fits once, and not twice"
        for front in (pair.engine, pair.worker):
            assert (await pair.ask(front, INFER, body)).status == 413

    paired(too_large)


def test_terms_arrive() -> None:
    async def terms(pair: Pair) -> None:
        wishes = {"priority": 1, "timeout": 5_000_000, "deterministic": True}
        body = json.dumps({**json.loads(numbers(1)), "id": "mine", "parameters": wishes}).encode()
        assert (await pair.ask(pair.worker, INFER, body)).status == 200
        found = pair.roster.models["double"].terms[-1]
        expected = Terms(1, 5_000_000_000, True, "mine")
        assert all(getattr(found, one) == getattr(expected, one) for one in Terms.__slots__)

    paired(terms)


def test_a_request_that_cannot_be_written_leaves_nothing_that_waits() -> None:
    async def refused(pair: Pair) -> None:
        model = pair.worker.find(("double", None))
        for _ in range(3):
            with pytest.raises(TypeError):
                model.submit([np.zeros((1, 4), np.float32)], 1, Terms(key="\ud800"))
        assert pair.link.waiting == 0

    paired(refused)


def test_a_spec_that_has_changed_since_answers_nothing_wrongly() -> None:
    """The worker reads with the spec that it knows. The engine process has another one by now."""

    async def changed(pair: Pair) -> None:
        served = pair.roster.models["double"]
        known = served.spec
        served.spec = type(known)("double", (tensor("x", "FP32", -1, 6),), (tensor("y", "FP32", -1, 6),), 8)
        old, new = (
            await pair.ask(pair.worker, INFER, numbers(1)),
            await pair.ask(pair.worker, INFER, numbers(1, 6)),
        )
        assert pair.link.find("double").spec == known, "the worker does not know of it yet"
        assert old.status == 400 and b"[-1,6]" in old.body.replace(b" ", b"")
        assert new.status == 200 and json.loads(new.body)["outputs"][0]["data"] == [0, 2, 4, 6, 8, 10]

    paired(changed)


def test_a_refusal_of_the_queue_comes_with_its_status_and_headers() -> None:
    async def full(pair: Pair) -> None:
        pair.roster.models["double"].refusal = Overloaded("the queue is full", 7.0)
        refused = await pair.ask(pair.worker, INFER, numbers(1))
        assert (refused.status, dict(refused.headers)[b"retry-after"]) == (503, b"7")

    paired(full)


REFUSED = {
    "by the queue": (numbers(1), 503),
    "for its body": (b"{", 400),
    "by nobody": (numbers(1), 200),
    "by nobody, with a spec that has changed": (numbers(1, 6), 200),
}


@pytest.mark.parametrize("which", REFUSED)
def test_a_request_has_one_record_in_the_access_log_with_its_id(
    which: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def logged(pair: Pair) -> None:
        served, (body, status) = pair.roster.models["double"], REFUSED[which]
        if which == "by the queue":
            served.refusal = Overloaded("the queue is full", 7.0)
        if "changed" in which:
            served.spec = type(served.spec)(
                "double", (tensor("x", "FP32", -1, 6),), (tensor("y", "FP32", -1, 6),), 8
            )
        answer = await pair.ask(pair.worker, INFER, body, x_request_id="find-me")
        assert (answer.status, [value for name, value in answer.headers if name == b"x-request-id"]) == (
            status,
            [b"find-me"],
        )
        found = [vars(record) for record in caplog.records if record.name == "halfeven.requests"]
        assert [(one["status"], one["request_id"], one["model"]) for one in found] == [
            (status, "find-me", "double")
        ]

    with caplog.at_level(logging.INFO, "halfeven.requests"):
        paired(logged)


def test_a_caller_that_leaves_cancels_its_request_in_the_engine_process() -> None:
    async def leaves(pair: Pair) -> None:
        served = pair.roster.models["double"]
        served.holding = True
        begun = pair.worker.begin(pair.worker.find(("double", None)), None, numbers(1))
        while not served.held:
            await asyncio.sleep(0)
        begun.future.cancel()
        assert await asyncio.to_thread(served.cancelled.wait, SECONDS)

    paired(leaves)


def test_callers_that_leave_while_the_engine_process_reads_nothing_leave_no_bytes_behind() -> None:
    """Its event loop is at work. What these requests may take of the memory is free again for others."""

    async def leave(pair: Pair) -> None:
        loop, channel = asyncio.get_running_loop(), pair.side._channel
        loop.remove_reader(channel._wire.fileno())
        model, array = pair.worker.find(("double", None)), np.zeros((2 * RING_BYTES // 16, 4), np.float32)
        tracemalloc.start()
        try:
            for _ in range(8):
                future = model.submit([array.copy()], len(array))
                future.cancel()
                await asyncio.sleep(0)
            assert tracemalloc.get_traced_memory()[0] < 2 * array.nbytes, "that which was begun, and no other"
        finally:
            tracemalloc.stop()
            loop.add_reader(channel._wire.fileno(), channel._hear)
        assert (await pair.ask(pair.worker, INFER, numbers(1))).status == 200

    paired(leave)


def test_the_end_of_the_engine_process_refuses_what_waits_and_what_comes() -> None:
    async def ends(pair: Pair) -> None:
        served = pair.roster.models["double"]
        served.holding = True
        waiting = asyncio.ensure_future(pair.ask(pair.worker, INFER, numbers(1)))
        while not served.held:
            await asyncio.sleep(0)
        pair.side.close()
        first, second = await waiting, await pair.ask(pair.worker, INFER, numbers(1))
        for refused in (first, second):
            assert refused.status == 503 and dict(refused.headers)[b"retry-after"] == b"1"
        assert pair.lost.is_set()
        assert [(await pair.ask(pair.worker, path, b"", "GET")).status for path in
                ("/healthz", "/v2/health/live", "/v2/health/ready")] == [200, 200, 503]  # fmt: skip

    paired(ends)


def test_a_request_whose_body_comes_after_the_end_of_the_engine_process_is_to_be_sent_again() -> None:
    async def ends(pair: Pair) -> None:
        async def body_after_the_end() -> Any:
            pair.side.close()
            await pair.lost.wait()
            return {"type": "http.request", "body": numbers(1), "more_body": False}

        collected = Collected(b"")
        scope = {**SCOPE, "headers": [(b"host", b"localhost")]}
        async with asyncio.timeout(SECONDS):
            await pair.worker(scope, body_after_the_end, collected.send)
        assert (collected.status, dict(collected.headers)[b"retry-after"]) == (503, b"1")

    paired(ends)


def test_an_answer_that_breaks_off_in_the_engine_process_is_not_given_as_a_whole_one() -> None:
    """The worker has the engine process answer the whole request, and would send what it has of the answer."""

    async def half(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"outputs": [', "more_body": True})

    async def breaks_off(pair: Pair) -> None:
        pair.engine._route = half
        refused = await pair.ask(pair.worker, INFER, b"{")
        assert (refused.status, dict(refused.headers)[b"retry-after"]) == (503, b"1")

    paired(breaks_off)


def test_the_end_of_a_worker_cancels_what_its_callers_wait_for() -> None:
    async def ends(pair: Pair) -> None:
        served = pair.roster.models["double"]
        served.holding = True
        begun = pair.worker.begin(pair.worker.find(("double", None)), None, numbers(1))
        while not served.held:
            await asyncio.sleep(0)
        pair.link.close()
        with pytest.raises(Exception, match="engine process ended"):
            await begun.future
        while not served.cancelled.is_set():
            await asyncio.sleep(0)

    paired(ends)


def test_a_key_s_limit_is_held_in_the_engine_process_for_all_workers(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    secret, _ = keys.add("one", scopes=("infer",), concurrency=1)

    async def limited(pair: Pair) -> None:
        pair.roster.models["double"].holding = True
        served = pair.worker.find(("double", None))
        first = pair.worker.begin(served, None, numbers(1), f"Bearer {secret}")
        while not pair.roster.models["double"].held:
            await asyncio.sleep(0)
        second = pair.worker.begin(served, None, numbers(1), f"Bearer {secret}")
        with pytest.raises(AnsweredByEngine) as refused:
            await second.future
        assert refused.value.status == 429 and b"at once" in refused.value.body
        pair.roster.models["double"].held[0].set_result(_answer(pair))
        assert (await first.future).batch_rows == 1
        third = pair.worker.begin(served, None, numbers(1), f"Bearer {secret}")
        while len(pair.roster.models["double"].held) < 2:
            await asyncio.sleep(0)
        third.future.cancel()

    paired(limited, AccessControl(keys))


def _answer(pair: Pair) -> Answer:
    served = pair.roster.models["double"]
    return Answer([np.zeros((1, 4), np.float32)], served.prepared, 1, 2, 1)


def test_the_time_of_writing_is_added_up_in_the_engine_process() -> None:
    async def written(pair: Pair) -> None:
        for _ in range(3):
            await pair.ask(pair.worker, INFER, numbers(1))
            pair.link.flush()
        while "double" not in pair.engine.written or sum(pair.engine.written["double"].buckets) < 3:
            await asyncio.sleep(0)
        assert sum(pair.engine.written["double"].buckets) == 3

    paired(written)
