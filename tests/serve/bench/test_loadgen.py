"""The two kinds of load against a server that does exactly as it is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest
import uvloop
from halfeven.serve.bench.connection import Connection
from halfeven.serve.bench.figures import Cpu, figures
from halfeven.serve.bench.loadgen import ClosedLoop, Load, OpenLoop, Target
from halfeven.serve.bench.record import Record

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nfull"
REQUEST = b"POST /infer HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"


def async_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on uvloop, as the command does."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(**arguments), 60))

    return run


class Server:
    """A server that counts requests; ``answer(number)`` gives the bytes for each, or None to hang up. It may stall."""

    def __init__(self, answer: Callable[[int], bytes | None]) -> None:
        self.answer = answer
        self.requests = 0
        self.under_way = self.most_under_way = 0
        self.open = asyncio.Event()
        self.open.set()
        self.opens_at = 0  # requests under way

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readexactly(len(REQUEST)):
                self.requests += 1
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
                number = self.requests
                if self.under_way == self.opens_at:
                    self.open.set()
                await asyncio.sleep(0)
                await self.open.wait()
                self.under_way -= 1
                answer = self.answer(number)
                if answer is None:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(
    answer: Callable[[int], bytes | None] = lambda _: OK,
) -> AsyncIterator[tuple[Server, Target]]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield server, Target("127.0.0.1", port, [REQUEST])
    finally:
        listening.close()


def record_of(seconds: float, warmup_s: float = 0.0) -> Record:
    now = time.perf_counter()
    return Record(now + warmup_s, now + warmup_s + seconds)


def described(record: Record) -> dict[str, Any]:
    return figures(record, Cpu(0.0, 1.0), {}, {}, rows=1)


@async_test
async def test_in_a_closed_loop_each_caller_has_one_request_under_way_and_all_are_answered() -> None:
    async with running() as (server, target):
        server.open.clear()
        server.opens_at = 4
        record = record_of(0.3)
        await ClosedLoop(target, record, 5.0, 4).run()
        found = described(record)
    assert server.most_under_way == 4
    assert found["ok"] == found["sent"] == server.requests
    assert found["ok"] >= 4
    assert found["statuses"] == {"200": found["ok"]}


@async_test
async def test_the_warm_up_is_the_same_load_and_does_not_count() -> None:
    async with running() as (server, target):
        record = record_of(0.2, warmup_s=0.2)
        await ClosedLoop(target, record, 5.0, 2).run()
    assert 0 < described(record)["ok"] < server.requests


@pytest.mark.slow
@async_test
async def test_arrivals_are_poisson_at_the_rate_that_was_asked_for() -> None:
    async with running() as (server, target):
        record = record_of(1.0)
        await OpenLoop(target, record, 20.0, 900.0, record.begin).run()
    found = described(record)
    assert found["ok"] == found["sent"] == server.requests
    assert 900 - 5 * 30 < found["sent"] < 900 + 5 * 30  # the deviation of a Poisson count is its root


async def stalled(load: Callable[[Target, Record], Load]) -> dict[str, Any]:
    """The report of a load about a server that answers nothing at all for half a second."""
    async with running() as (server, target):
        record = record_of(0.8)
        server.open.clear()
        asyncio.get_running_loop().call_at(asyncio.get_running_loop().time() + 0.5, server.open.set)
        await load(target, record).run()
        return described(record)


@pytest.mark.slow
@async_test
async def test_a_stall_is_felt_by_everybody_who_was_due_in_it_though_he_could_not_be_sent() -> None:
    found = await stalled(lambda target, record: OpenLoop(target, record, 20.0, 200.0, record.begin, most=1))
    slow = [at for at in found["timeline"] if at["p50"] > 100]
    # All requests but the first were sent after the stall, as there is one connection: they took no time at all.
    assert found["latency_ms"]["max"] > 400
    assert sum(at["count"] for at in slow) > 200 * 0.4 / 2
    assert found["ok"] == found["sent"]


@pytest.mark.slow
@async_test
async def test_what_the_generator_itself_was_late_with_counts_and_is_told() -> None:
    async with running() as (_, target):
        record = record_of(0.6)
        asyncio.get_running_loop().call_later(0.2, time.sleep, 0.25)
        await OpenLoop(target, record, 20.0, 200.0, record.begin).run()
    found = described(record)
    assert found["generator"]["late_ms"]["max"] > 150
    assert sum(at["count"] for at in found["timeline"] if at["p50"] > 50) > 10


@async_test
async def test_a_connection_that_ends_while_nothing_is_asked_costs_nobody_anything() -> None:
    record = record_of(10.0)
    load = OpenLoop(Target("127.0.0.1", 1, [REQUEST]), record, 1.0, 1.0, record.begin)
    for busy in (False, True):
        connection = Connection(load)
        connection.busy, connection.scheduled = busy, record.begin
        connection.finished = True  # as the connection itself says before it tells
        load.lost(connection)
    assert record.failures == {"connection lost": 1}


@pytest.mark.slow
@async_test
async def test_a_closed_loop_feels_a_stall_once_per_caller() -> None:
    found = await stalled(lambda target, record: ClosedLoop(target, record, 20.0, 1))
    slow = [at for at in found["timeline"] if at["p50"] > 400]
    assert sum(at["count"] for at in slow) <= 1
    assert found["latency_ms"]["max"] > 400


@async_test
async def test_what_is_refused_is_counted_apart_with_its_own_latency() -> None:
    async with running(lambda number: FULL if number % 2 else OK) as (_, target):
        record = record_of(0.2)
        await ClosedLoop(target, record, 5.0, 2).run()
    found = described(record)
    assert found["refused"]["count"] == found["statuses"]["503"] > 0
    assert found["refused"]["retry_after"] == {"1": found["refused"]["count"]}
    assert abs(found["statuses"]["200"] - found["statuses"]["503"]) <= 2
    assert found["messages"]["503"] == "full"


@async_test
async def test_who_is_hung_up_on_is_counted_and_the_load_goes_on() -> None:
    async with running(lambda number: None if number % 5 == 0 else OK) as (server, target):
        record = record_of(0.3)
        await ClosedLoop(target, record, 5.0, 2).run()
    found = described(record)
    assert found["statuses"]["connection lost"] == server.requests // 5 > 1
    assert found["ok"] == server.requests - server.requests // 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["closed", "open"])
@async_test
async def test_a_server_that_never_answers_costs_a_time_out_each_and_no_more_waiting(kind: str) -> None:
    async with running() as (server, target):
        server.open.clear()
        record = record_of(0.3)
        load: Load = ClosedLoop(target, record, 0.2, 3)
        if kind == "open":
            load = OpenLoop(target, record, 0.2, 100.0, record.begin, most=2)
        began = time.perf_counter()
        await load.run()
        found = described(record)
        assert time.perf_counter() - began < 20
        server.open.set()
    assert found["statuses"] == {"timeout": found["sent"]}
    assert found["sent"] >= 3
    assert found["latency_ms"] is None


@pytest.mark.parametrize("kind", ["closed", "open"])
@async_test
async def test_a_server_that_has_gone_is_told_and_ends_the_stage_in_time(kind: str) -> None:
    async with running() as (_, target):
        pass
    record = record_of(0.3)
    load: Load = ClosedLoop(target, record, 5.0, 2)
    if kind == "open":
        load = OpenLoop(target, record, 5.0, 200.0, record.begin)
    await load.run()
    found = described(record)
    assert found["statuses"] == {"cannot connect": found["sent"]}
    assert found["sent"] > 0
    assert "refused" in found["messages"]["cannot connect"]
