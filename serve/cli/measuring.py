"""The commands that measure or check: ``bench`` a running server, ``tune`` a model, ``doctor`` and ``selftest`` this
machine."""

from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.markup import escape

from .console import (
    DEFAULT_STORE,
    Ended,
    Key,
    KeyFileOf,
    StoreAt,
    check_target,
    command,
    listing,
    notify,
    progress,
)


@command
def bench(
    url: Annotated[str, typer.Argument(help="The server, as http://127.0.0.1:8000.")],
    name: Annotated[str, typer.Argument(help="The model.")],
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: callers of each stage; default 1,8,32.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: arrivals per second of each stage (Poisson).")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds of each stage that are measured.")] = 5.0,
    warmup: Annotated[float, typer.Option(help="Seconds of the same load before it.")] = 1.0,
    wire: Annotated[str, typer.Option(help="binary or json.")] = "binary",
    rows: Annotated[int, typer.Option(help="Rows of each request.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Send rows of this npz or safetensors file.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="INPUT=SIZE,…: free dimensions behind the batch; default 16 each."),
    ] = None,
    header: Annotated[list[str] | None, typer.Option(help="'NAME: VALUE', sent with every request.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a request counts as lost.")] = 30.0,
    key: Key = None,
    key_file: KeyFileOf = None,
    report: Annotated[Path | None, typer.Option(help="Also write a page with plots here.")] = None,
) -> Ended:
    """Put load on a running server: throughput, latency, and where the time went."""
    from ..bench import command
    from ..bench.shown import render, render_page

    check_target("--report", report)
    callers = "1,8,32" if concurrency is None and rate is None else concurrency
    plan = command.Plan(
        concurrency=command.counts(callers, "--concurrency") if callers is not None else (),
        rates=command.numbers(rate, "--rate") if rate is not None else (),
        seconds=seconds, warmup_s=warmup, timeout_s=timeout, rows=rows, wire=wire, data=data,
        shapes=tuple(shape or ()), headers=tuple(header or ()),
    )  # fmt: skip
    with progress("bench") as show:
        facts = command.bench(url, name, plan, show)
    if report is not None:
        report.write_text(render_page(facts))
    return facts, render(facts), command.exit_code(facts)


@command
def tune(
    name: Annotated[str, typer.Argument(help="NAME (the active version) or NAME@VERSION.")],
    store: StoreAt = DEFAULT_STORE,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 30.0,
) -> Ended:
    """Measure forms, batch sizes, threads and delay on this device, and keep the winner for `serve`."""
    from ..tuning.search import tune
    from ..tuning.shown import described
    from ..versions.versions_in_store import store_at

    facts = tune(name, store_at(store, "the winner", in_state=True), device, seconds, notify)
    return facts, described(facts), 0


@command
def doctor(store: StoreAt = DEFAULT_STORE) -> Ended:
    """Print what halfeven can use on this machine, and what to install for the rest."""
    from ..versions.versions_in_store import store_at
    from .doctor import examine

    facts = examine(store_at(store).root)
    table = listing("what", "found", "advice")
    for check in facts["checks"]:
        table.add_row(*map(escape, (check["what"], check["found"], check["advice"])))
    return facts, table, 0


@command
def selftest(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    store: StoreAt = DEFAULT_STORE,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the JSON here.")] = None,
) -> Ended:
    """Check a device in about a minute, and switch off by name, in the store, what is wrong there."""
    from ..selftest.selftest import selftest, table_of
    from ..versions.versions_in_store import store_at

    check_target("--out", out)
    root = store_at(store, "what is wrong on this device", in_state=True).root
    with progress("selftest") as show:
        facts = selftest(device, root, show)
    if out is not None:
        out.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2) + b"\n")
    return facts, table_of(facts), 3 if facts["status"] == "failed" else 0
