"""One budget for what requests hold: never passed, and given back once, however a request ends."""

import asyncio
import gzip
import json
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from halfeven.models.errors import HalfevenError, Overloaded, TooLarge
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.http.caller import lend, read_body
from halfeven.serve.http.content_coding import decoded
from halfeven.serve.http.limits import memory_budget
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.limits.memory_budget import (
    FREE_BYTES,
    Lease,
    MemoryBudget,
    default_limit,
    json_bytes,
    usable_memory,
)

from tests.control_group_tree import UNIFIED, control_groups, of_version_1
from tests.specs import tensor

from ...conftest import FakeRoster, FakeServed, front_of, make_roster
from ..messages import GONE, chunk, receiving
from ..raw_requests import message
from ..wire import Wire

MIB = 2**20


def test_a_random_walk_never_passes_the_limit_and_gives_all_back() -> None:
    """Requests begin, grow, shrink and end in any order, some twice; a second count of what each holds agrees."""
    draw = random.Random(np.random.default_rng().bytes(8))
    budget = MemoryBudget(MIB)
    held: dict[Lease, int] = {}
    refused = 0
    for _ in range(5000):
        step, lease = draw.random(), draw.choice(list(held)) if held else None
        if step < 0.2 or lease is None:
            held[budget.lease()] = 0
        elif step < 0.7:
            nbytes = draw.randrange(4 * FREE_BYTES)
            try:
                lease.add(nbytes)
                held[lease] += nbytes
            except (Overloaded, TooLarge):
                refused += 1
        elif step < 0.8:
            with ExitStack() as block:
                before = lease.held
                try:
                    block.enter_context(lease.meanwhile(2 * FREE_BYTES))
                except (Overloaded, TooLarge):
                    refused += 1
                    continue
                assert before + FREE_BYTES <= lease.held <= before + 2 * FREE_BYTES
            # The free bytes of the lease that were used meanwhile are counted as if they stayed.
            held[lease] = max(held[lease], min(held[lease] + 2 * FREE_BYTES, FREE_BYTES))
        else:
            for _ in range(draw.randrange(1, 3)):
                lease.close()
            del held[lease]
        assert budget.used == sum(max(nbytes - FREE_BYTES, 0) for nbytes in held.values()) <= budget.limit
    for lease in held:
        lease.close()
    assert budget.used == 0 and refused > 100


def test_a_request_that_can_never_fit_is_not_asked_to_come_again() -> None:
    budget = MemoryBudget(MIB)
    lease = budget.lease()
    lease.add(MIB)
    with pytest.raises(TooLarge, match="HALFEVEN_MAX_IN_FLIGHT_MIB"):
        lease.add(MIB)
    with pytest.raises(Overloaded) as refusal:
        budget.lease().add(MIB)
    assert refusal.value.retry_after_s > 0 and budget.used == MIB - FREE_BYTES


def test_small_requests_are_let_in_however_full_the_budget_is() -> None:
    budget = MemoryBudget(MIB)
    budget.take_anyway(10 * MIB)
    budget.lease().add(FREE_BYTES)
    with pytest.raises(Overloaded):
        budget.lease().add(FREE_BYTES + 1)


def test_a_thread_that_goes_on_for_a_request_that_has_ended_takes_nothing() -> None:
    budget = MemoryBudget(MIB)
    lease = budget.lease()
    with lease.meanwhile(2 * FREE_BYTES):
        lease.close()
        with pytest.raises(Overloaded, match="has ended"):
            lease.add(2 * FREE_BYTES)
    assert budget.used == 0


def used_by(steps: Callable[[Lease], Awaitable[Any]], limit: int) -> tuple[Any, int, int]:
    """The result or the error of the steps, what the lease then held, and what was left in the budget when it was
    closed."""

    async def run() -> tuple[Any, int, int]:
        budget = MemoryBudget(limit)
        lease = lend(scope, budget)
        try:
            found: Any = await steps(lease)
        except HalfevenError as error:
            found = type(error)
        held = lease.held
        lease.close()
        return found, held, budget.used

    scope: dict[str, Any] = {"headers": []}
    return asyncio.run(run())


@pytest.mark.parametrize(
    "end", [chunk(b"", False), GONE, chunk(bytes(MIB), True), None], ids=["whole", "left", "large", "slow"]
)
def test_a_body_counts_while_it_comes(end: dict[str, Any] | None) -> None:
    counted: list[int] = []

    async def steps(lease: Lease) -> bytes:
        pieces = [chunk(bytes(FREE_BYTES), True)] * 4 + ([end] if end else [])
        give = receiving(*pieces)

        async def receive() -> Any:
            counted.append(lease.held // FREE_BYTES)
            return await give()

        scope = {"headers": [], "halfeven.lease": lease}
        return await read_body(scope, receive, MIB, 0.01)

    try:
        _, held, left = used_by(steps, MIB)
    except Exception as error:
        assert end is GONE and type(error).__name__ == "CallerLeft"
    else:
        assert held == 3 * FREE_BYTES and left == 0
    assert counted[:5] == [0, 0, 1, 2, 3]


def test_a_body_is_refused_at_the_piece_that_does_not_fit() -> None:
    async def steps(lease: Lease) -> bytes:
        scope = {"headers": [], "halfeven.lease": lease}
        return await read_body(scope, receiving(*[chunk(bytes(FREE_BYTES), True)] * 99), 100 * MIB)

    assert used_by(steps, MIB) == (TooLarge, MIB, 0)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [MIB, 3 * MIB, 40 * MIB])
def test_a_body_that_is_inflated_counts_while_it_grows(budget: int) -> None:
    bomb = gzip.compress(bytes(16 * MIB))
    found, held, left = used_by(lambda lease: decoded(bomb, "gzip", 64 * MIB, lease), budget)
    assert left == 0
    if budget == 40 * MIB:
        assert found == bytes(16 * MIB) and held == 16 * MIB - FREE_BYTES
    else:
        assert found is TooLarge and budget - MIB <= held <= budget


@pytest.mark.parametrize(
    "item", [b"1.5,", b"[],", b"{},", b'"ab",', b'{"a":1},', b"[1,2],", b"-12345678901,"], ids=repr
)
def test_the_objects_of_json_are_not_counted_too_low(item: bytes) -> None:
    def size(value: Any) -> int:
        inner = (
            value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
        )
        return sys.getsizeof(value) + sum(map(size, inner))

    text = b"[" + item * 5000 + b"0]"
    assert size(orjson.loads(text)) <= 1.3 * json_bytes(text)


def test_a_long_text_is_counted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of all of it at once would keep the interpreter's lock."""
    text = json.dumps([{"a": [1, 2], "b,": "[{"}] * 50).encode()
    at_once = json_bytes(text)
    counted = list[int]()

    def count(piece: np.ndarray) -> int:
        counted.append(piece.size)
        return int(piece.sum())

    monkeypatch.setattr(memory_budget, "_PIECE", 100)
    monkeypatch.setattr(memory_budget, "np", SimpleNamespace(**{**vars(np), "count_nonzero": count}))
    assert json_bytes(text) == at_once
    assert max(counted) == 100 and sum(counted) == 4 * len(text)


def test_the_default_is_a_share_of_the_memory_that_this_process_may_have(tmp_path: Path) -> None:
    assert default_limit(lambda: 512 * MIB) == 128 * MIB
    assert default_limit(lambda: 64 * MIB) == 64 * MIB and default_limit(lambda: 2**40) == 1024 * MIB
    assert default_limit() > 0


@pytest.mark.parametrize(
    ("own", "mount", "files", "limit"),
    [
        ("0::/box", UNIFIED, {"box/memory.max": "max"}, None),
        ("0::/box", UNIFIED, {"box/memory.max": str(256 * MIB)}, 256 * MIB),
        ("0::/a/b", UNIFIED, {"a/b/memory.max": "max", "a/memory.max": str(128 * MIB)}, 128 * MIB),
        ("4:memory:/a", of_version_1("memory"), {"memory/a/memory.limit_in_bytes": str(64 * MIB)}, 64 * MIB),
        ("4:memory:/a", of_version_1("memory"), {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_the_memory_is_what_the_tightest_control_group_allows(
    own: str, mount: str, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    whole = usable_memory(tmp_path / "without any")
    groups = control_groups(tmp_path / "groups", [own], [mount], files)
    assert usable_memory(groups) == (whole if limit is None else limit) > 0


# The budget in the server.

ROWS = 8
BINARY = json.dumps(
    {
        "inputs": [
            {
                "name": "x",
                "shape": [ROWS, 4096],
                "datatype": "FP32",
                "parameters": {"binary_data_size": ROWS * 16384},
            }
        ]
    }
).encode()
BODY = BINARY + bytes(ROWS * 16384)


def asked(**headers: str) -> bytes:
    length = str(len(BINARY))
    return message(BODY, "/v2/models/wide/infer", inference_header_content_length=length, **headers)


def wide_roster() -> FakeRoster:
    roster = make_roster()
    spec = ModelSpec("wide", (tensor("x", "FP32", -1, 4096),), (tensor("y", "FP32", -1, 4096),), 8)
    roster.models["wide"] = FakeServed(spec, lambda x: [x[:, :4]], roster.models["double"].prepared)
    return roster


WAYS = {"short": {}, "known head": {}, "long": {"expect": ""}}


@pytest.mark.parametrize("end", ["answer", "refusal", "disconnect", "cancel", "half a body"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_a_request_ends_gives_its_bytes_back(end: str, way: str) -> None:
    budget, roster = MemoryBudget(MIB), wide_roster()
    sent = asked(**WAYS[way])

    async def run() -> None:
        front = front_of(roster, bounds=ServerBounds(10.0, budget))
        wire, wide = Wire(front), roster.models["wide"]
        if way == "known head":
            await wire.send(sent, sent)
        wide.holding = True
        whole = sent[:-5] if end == "half a body" else sent
        await wire.send(*([whole] if way == "known head" else [whole[:70_000], whole[70_000:]]))
        assert budget.used > 60_000
        if end == "answer":
            wide.holding = False
            wide.held[0].set_result(wide.submit([np.zeros((8, 4096), np.float32)], 8).result())
        elif end == "refusal":
            wide.held[0].set_exception(Overloaded("full"))
        elif end == "cancel" and wire.protocol.tasks:
            next(iter(wire.protocol.tasks)).cancel()
        else:
            wire.protocol.connection_lost(None)
        await wire.settled()
        assert budget.used == 0

    asyncio.run(run())


def test_a_full_budget_is_said_with_the_time_to_come_again() -> None:
    async def run() -> bytes:
        roster, budget = wide_roster(), MemoryBudget(MIB)
        budget.take_anyway(MIB)
        front = front_of(roster, bounds=ServerBounds(10.0, budget))
        written = b""
        for way in ({}, {"expect": ""}):
            wire = Wire(front)
            written += await wire.send(asked(**way)[:70_000], asked(**way)[70_000:])
            written += await Wire(front).send(message(b'{"inputs": []}', "/v2/models/wide/infer"))
        return written

    written = asyncio.run(run())
    assert written.count(b"HTTP/1.1 503") == written.count(b"retry-after: 1") == 2
    assert written.count(b"HTTP/1.1 400") == 2, "a small body is read"
