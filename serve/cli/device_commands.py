"""The two commands about this machine: ``doctor`` looks at it, ``selftest`` checks what a device computes."""

from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from .console import DEFAULT_STORE, Ended, StoreAt, check_target, command, progress


@command
def doctor(store: StoreAt = DEFAULT_STORE) -> Ended:
    """Print what halfeven can use on this machine, and what to install for the rest."""
    from .doctor import examine

    facts = examine(store.expanduser().resolve())
    table = Table("what", "found", "advice")
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
