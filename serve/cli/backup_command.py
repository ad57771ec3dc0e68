"""``halfeven backup``: a copy of a store from which a server can start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import DEFAULT_STORE, Json, StoreAt, finish, notify


def backup(
    folder: Annotated[Path, typer.Argument(help="A new or an empty folder.")],
    store: StoreAt = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Copy a store, also one that a server uses: models, keys, uploads, jobs. To restore: `serve --store FOLDER`."""

    def work() -> tuple[Mapping[str, Any], Any, int]:
        from ..backup import back_up
        from ..http.routes.history import store_at

        facts = back_up(store_at(store), folder, notify)
        for fault in facts["damaged"]:
            notify(f"damaged, left out: {fault}")
        versions = sum(map(len, facts["versions"].values()))
        counts = f"models: {len(facts['versions'])}, versions: {versions}, uploads: {facts['uploads']}"
        shown = f"{folder} has a copy ({counts}); `halfeven serve --store {folder}` serves it"
        return facts, shown, 1 if facts["damaged"] else 0

    finish(work, as_json)
