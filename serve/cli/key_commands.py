"""``halfeven keys``: make, list and revoke the keys of a server. A running server follows within a second."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..access.keys import INFER, NAME_IN_STORE, SCOPES, KeyFile, KeyRecord
from .console import DEFAULT_STORE, Command, CommandGroup, Ended, Json, StoreAt, command, listing, notify

FIRST = (
    "this is the first key of {file}: from now on every server that looks at this file refuses requests without a key, "
    "a running one within a second"
)
LAST = (
    "no key is left in {file}: every server that looks at it refuses every request. `halfeven keys add NAME` makes "
    "another key; to serve without keys, remove the file and start the server again"
)

app = typer.Typer(
    name="keys", cls=CommandGroup, help="Make, list and revoke the keys of a server.", no_args_is_help=True
)

FileAt = Annotated[
    Path | None,
    typer.Option(
        "--key-file", envvar="HALFEVEN_KEY_FILE", help="The file of the keys; default: in the store."
    ),
]


@app.command(cls=Command)
@command
def add(
    name: Annotated[str, typer.Argument(help="A name of your own, shown in the list and in messages.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"What it may do: {', '.join(SCOPES)}; default infer. Repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Only for this model; default all. Repeatable.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="At most so many requests per second.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="At most so many requests at once.")] = None,
    store: StoreAt = DEFAULT_STORE,
    key_file: FileAt = None,
    as_json: Json = False,
) -> Ended:
    """Make a key and print it, this once: the file has only its digest."""
    file = _file(store, key_file)
    closes = file.read() is None
    key, record = file.add(name, scope or (INFER,), model or (), rate, concurrency)
    note = FIRST.format(file=file.path) if closes else ""
    if note:
        notify(note)
    if not as_json:
        notify(f"the key '{name}' ({record.id}): it is printed this once, keep it; the server has its digest")
    return {**_facts(record), "key": key, "note": note or None}, key, 0


@app.command("list", cls=Command)
@command
def list_keys(store: StoreAt = DEFAULT_STORE, key_file: FileAt = None) -> Ended:
    """Show every key: its name, scopes, models and limits; never the key itself."""
    file = _file(store, key_file)
    keys = file.read()
    records = [] if keys is None else list(keys.by_id.values())
    table = listing("id", "name", "scopes", "models", "requests/s", "at once", whole="id")
    for one in records:
        limits = [str(limit or "-") for limit in (one.rate, one.concurrency)]
        table.add_row(one.id, one.name, ", ".join(one.scopes), ", ".join(one.models) or "all", *limits)
    none = (
        "no key; a server needs none"
        if keys is None
        else "no key is left: a server refuses every request; `halfeven keys add NAME` makes one, and without the "
        "file a server that is started anew needs none"
    )
    return {"keys": [_facts(one) for one in records]}, table if records else f"{file.path}: {none}", 0


@app.command(cls=Command)
@command
def revoke(
    name: Annotated[str, typer.Argument(help="The key's name or id.")],
    store: StoreAt = DEFAULT_STORE,
    key_file: FileAt = None,
) -> Ended:
    """Remove a key; a running server refuses it within a second."""
    file = _file(store, key_file)
    record = file.revoke(name)
    left = file.read()
    note = LAST.format(file=file.path) if left is not None and not left.by_id else ""
    shown = f"the key '{record.name}' ({record.id}) is revoked" + (f"; {note}" if note else "")
    return {**_facts(record), "note": note or None}, shown, 0


def _file(store: Path, key_file: Path | None) -> KeyFile:
    return KeyFile(key_file or store / NAME_IN_STORE)


def _facts(record: KeyRecord) -> dict[str, Any]:
    return {key: value for key, value in record.to_json().items() if key != "sha256"}
