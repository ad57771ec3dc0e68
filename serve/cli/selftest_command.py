"""``halfeven selftest``: a device checked before it serves, and what is wrong there switched off."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from .console import DEFAULT_STORE, Json, StoreAt, errors, finish


def selftest(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    store: StoreAt = DEFAULT_STORE,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the JSON here.")] = None,
    as_json: Json = False,
) -> None:
    """Check a device in about a minute, and switch off by name, in the store, what is wrong there."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from ..http.routes.history import store_at
        from ..selftest.selftest import selftest, table_of

        root = store_at(store, writes=True).root
        with errors.status("selftest") as status:
            facts = selftest(device, root, status.update)
        if out is not None:
            out.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2) + b"\n")
        return facts, table_of(facts), 3 if facts["status"] == "failed" else 0

    finish(work, as_json)
