"""The two commands about this machine: ``doctor`` looks at it, ``selftest`` checks what a device computes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from .console import DEFAULT_STORE, Json, StoreAt, check_target, finish, progress


def doctor(store: StoreAt = DEFAULT_STORE, as_json: Json = False) -> None:
    """Print what halfeven can use on this machine, and what to install for the rest."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from .doctor import examine

        facts = examine(store.expanduser().resolve())
        table = Table("what", "found", "advice")
        for check in facts["checks"]:
            table.add_row(*map(escape, (check["what"], check["found"], check["advice"])))
        return facts, table, 0

    finish(work, as_json)


def selftest(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    store: StoreAt = DEFAULT_STORE,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the JSON here.")] = None,
    as_json: Json = False,
) -> None:
    """Check a device in about a minute, and switch off by name, in the store, what is wrong there."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from ..selftest.selftest import selftest, table_of
        from ..versions.versions_in_store import store_at

        check_target("--out", out)
        root = store_at(store, "what is wrong on this device", in_state=True).root
        with progress("selftest") as show:
            facts = selftest(device, root, show)
        if out is not None:
            out.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2) + b"\n")
        return facts, table_of(facts), 3 if facts["status"] == "failed" else 0

    finish(work, as_json)
