"""The server's load, as an autoscaler and a load balancer read it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from halfeven.models.errors import Overloaded
from halfeven.serve.batching.counters import Counters
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.limits.connections import Connections
from halfeven.serve.http.limits.memory_budget import MemoryBudget
from halfeven.serve.http.server_load import LoadCollector, ServerLoad
from prometheus_client import CollectorRegistry, generate_latest

from tests.serve.conftest import GOOD, FakeRoster, front_of, make_roster, running

PATH = "/v2/models/double/infer"
ASKING = "endpoint-load-metrics-format"


class Waiting:
    """A loaded version with three requests in its queue."""

    name, number, waiting, expected_wait_s = "double", 3, 3, 0.25

    def all_counters(self) -> list[Counters]:
        return [Counters("3", batches={4: (2, 1_000)})]


WAITING: Any = Waiting()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeRoster, httpx.Client]]:
    roster = make_roster()
    front = front_of(roster, load=ServerLoad(lambda: [WAITING]))
    with (
        running(front) as address,
        httpx.Client(base_url=f"http://{address}", verify=False) as client,
    ):
        yield roster, client


def test_an_answer_says_the_load_in_the_format_that_the_request_asks_for(
    server: tuple[FakeRoster, httpx.Client],
) -> None:
    _, client = server
    text = client.post(PATH, content=GOOD, headers={ASKING: "TEXT"})
    assert text.status_code == 200
    assert text.headers["endpoint-load-metrics"] == (
        "TEXT application_utilization=0.0,named_metrics.queue_requests=3,named_metrics.queue_seconds=0.25"
    )
    kind, _, report = (
        client.post(PATH, content=GOOD, headers={ASKING: "json"})
        .headers["endpoint-load-metrics"]
        .partition(" ")
    )
    assert kind == "JSON"
    assert json.loads(report) == {
        "application_utilization": 0.0,
        "named_metrics": {"queue_requests": 3, "queue_seconds": 0.25},
    }


@pytest.mark.parametrize("headers", [{}, {ASKING: "BIN"}])
def test_an_answer_says_no_load_where_none_or_an_unknown_format_is_asked_for(
    server: tuple[FakeRoster, httpx.Client], headers: dict[str, str]
) -> None:
    answer = server[1].post(PATH, content=GOOD, headers=headers)
    assert answer.status_code == 200 and "endpoint-load-metrics" not in answer.headers


def test_a_refusal_says_the_load_too(server: tuple[FakeRoster, httpx.Client]) -> None:
    roster, client = server
    roster.models["double"].refusal = Overloaded("the queue is full", 1.0)
    answer = client.post(PATH, content=GOOD, headers={ASKING: "TEXT"})
    roster.models["double"].refusal = None
    assert answer.status_code == 503 and "queue_requests=3" in answer.headers["endpoint-load-metrics"]


def test_the_gauges_of_metrics() -> None:
    bounds = ServerBounds(budget=MemoryBudget(1000), connections=Connections(7))
    bounds.budget.take(40)
    registry = CollectorRegistry()
    load = ServerLoad(lambda: [WAITING])
    registry.register(LoadCollector(load, bounds, lambda: False, lambda: {"running": 1, "queued": 2}))
    found = generate_latest(registry).decode().splitlines()
    for line in (
        'halfeven_expected_wait_seconds{model="double",version="3"} 0.25',
        'halfeven_jobs{status="running"} 1.0',
        'halfeven_jobs{status="queued"} 2.0',
        "halfeven_ready 0.0",
        "halfeven_device_utilisation 0.0",
        "halfeven_request_memory_bytes 40.0",
        "halfeven_request_memory_limit_bytes 1000.0",
        "halfeven_open_connections 0.0",
        "halfeven_connection_limit 7.0",
    ):
        assert line in found
