"""``halfeven bench``: one stage of load after another, each reported as figures."""

import asyncio
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from ...models.errors import BadSetting, HalfevenError
from ...models.machine.core_wait import waited_for_core_s
from .benched_model import BenchedModel, bodies, find
from .figures import Cpu, figures
from .loadgen import ClosedLoop, Load, OpenLoop, Target
from .record import Record

Notify = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages to run: callers of each closed one, arrivals per second of each open one; times in seconds."""

    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    seconds: float = 5.0
    warmup_s: float = 1.0
    timeout_s: float = 30.0
    rows: int = 1
    wire: str = "binary"
    data: Path | None = None
    shapes: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    connections: int = 2000


def bench(url: str, name: str, plan: Plan, notify: Notify = print) -> dict[str, Any]:
    """Every stage of the plan. Raises NotReady where no server answers, BadSetting where an option is wrong,
    UnknownName for an unknown model, BadInput in the server's own words where it refuses the very first request.
    """
    _check(plan)
    subject = find(url, name, plan.shapes, plan.headers)
    sent = bodies(subject, plan.rows, plan.wire, plan.data)
    subject.try_once(*sent[0])
    target = subject.target(sent)
    stages = []
    for callers in plan.concurrency:
        notify(f"closed loop, {callers} callers: {plan.seconds:g} s after {plan.warmup_s:g} s of warm-up")
        stages.append(
            {"load": "closed", "concurrency": callers, **_measure(subject, target, plan, callers, None)}
        )
    for rate in plan.rates:
        notify(f"open loop, {rate:g} arrivals/s: {plan.seconds:g} s after {plan.warmup_s:g} s of warm-up")
        stages.append({"load": "open", "rate": rate, **_measure(subject, target, plan, None, rate)})
    return {
        "model": name,
        "url": url,
        "wire": plan.wire,
        "rows": plan.rows,
        "data": str(plan.data) if plan.data is not None else "generated",
        "request_bytes": len(target.requests[0]),
        "inputs": [tensor.to_json() for tensor in subject.spec.inputs],
        "stages": stages,
    }


def numbers(text: str, option: str, most: float = 1e6) -> tuple[float, ...]:
    """``1,8,32`` as positive numbers of at most ``most``. Raises BadSetting naming the option."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < number <= most for number in found):
        raise BadSetting(
            f"{option} {text!r}: expected numbers above 0, up to {most:,.0f}, with commas between, as 1,8,32"
        )
    return found


def counts(text: str, option: str) -> tuple[int, ...]:
    """``1,8,32`` as positive whole numbers. Raises BadSetting naming the option."""
    found = numbers(text, option)
    if not all(number.is_integer() for number in found):
        raise BadSetting(f"{option} {text!r}: expected whole numbers with commas between, as 1,8,32")
    return tuple(map(int, found))


def _check(plan: Plan) -> None:
    times = (plan.seconds, plan.warmup_s, plan.timeout_s)
    if not all(map(math.isfinite, times)) or plan.seconds <= 0 or plan.warmup_s < 0 or plan.timeout_s <= 0:
        raise BadSetting(
            f"--seconds {plan.seconds:g}, --warmup {plan.warmup_s:g}, --timeout {plan.timeout_s:g}: expected seconds "
            "above 0, and a warm-up of 0 or more"
        )
    if max(plan.concurrency, default=0) > plan.connections:
        raise BadSetting(f"--concurrency {max(plan.concurrency)}: at most {plan.connections} connections")


def _measure(
    subject: BenchedModel, target: Target, plan: Plan, callers: int | None, rate: float | None
) -> dict[str, Any]:
    gc.collect()
    gc.freeze()  # a collection over what is loaded would be measured as the server's
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_stage(subject, target, plan, callers, rate))
    finally:
        gc.unfreeze()


async def _stage(
    subject: BenchedModel, target: Target, plan: Plan, callers: int | None, rate: float | None
) -> dict[str, Any]:
    start = time.perf_counter()
    begin = start + plan.warmup_s
    record = Record(begin, begin + plan.seconds)
    load: Load
    if rate is not None:
        load = OpenLoop(target, record, plan.timeout_s, rate, start, plan.connections)
    else:
        load = ClosedLoop(target, record, plan.timeout_s, callers or 1)
    async with asyncio.TaskGroup() as together:
        watching = together.create_task(_watch(subject, record))
        together.create_task(load.run())
    cpu, before, after = watching.result()
    return figures(record, cpu, before, after, plan.rows)


async def _watch(subject: BenchedModel, record: Record) -> tuple[Cpu, Mapping[str, Any], Mapping[str, Any]]:
    """The processor time of this thread during the window, and the server's statistics before and after it."""
    await asyncio.sleep(record.begin - time.perf_counter())
    began_s, used_s, waited_s = time.perf_counter(), time.thread_time(), waited_for_core_s()
    before = asyncio.create_task(asyncio.to_thread(_statistics, subject))
    await asyncio.sleep(record.end - time.perf_counter())
    cpu = Cpu(time.thread_time() - used_s, time.perf_counter() - began_s, waited_for_core_s() - waited_s)
    return cpu, await before, await asyncio.to_thread(_statistics, subject)


def _statistics(subject: BenchedModel) -> Mapping[str, Any]:
    """The server's V2 statistics, empty where it keeps none or does not answer."""
    try:
        return subject.get(f"{subject.path}/stats")
    except HalfevenError:
        return {}


def exit_code(facts: Mapping[str, Any]) -> int:
    """0 where every stage had a good answer, else 1."""
    stages: Sequence[Mapping[str, Any]] = facts["stages"]
    return 0 if all(stage["ok"] for stage in stages) else 1
