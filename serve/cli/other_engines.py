"""The commands for engines that are not ours: ``export`` gives one the proven half, ``prove`` judges its answers."""

from pathlib import Path
from typing import Annotated

import typer

from .console import DEFAULT_STORE, Ended, Key, KeyFileOf, StoreAt, command, notify, order


@order
def export(
    target: Annotated[str, typer.Argument(help="NAME (the active version) or NAME@VERSION.")],
    folder: Annotated[Path, typer.Argument(help="A new or an empty folder.")],
    engine: Annotated[str, typer.Option("--for", help="tensorrt, onnxruntime or openvino.")],
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Write a proven half as ONNX, with its proof and the build command of another engine."""
    from rich.text import Text

    from ...exporters.exported.folder import export as write
    from ..versions.versions_in_store import store_at, version_called

    facts = write(version_called(target, store_at(store)), engine, folder, notify)
    next_step = f"build it as {folder}/README.md says, then: halfeven prove {folder} --against URL"
    return facts, Text(f"{facts['model']}@{facts['version']} is in {folder}\n{next_step}"), 0


@command
def prove(
    target: Annotated[
        str, typer.Argument(help="NAME, NAME@VERSION, or a folder that `halfeven export` wrote.")
    ],
    against: Annotated[
        str,
        typer.Option(help="http://HOST:PORT (a V2 server), FILE.onnx, or FILE.npz: answers to inputs.npz."),
    ],
    store: StoreAt = DEFAULT_STORE,
    samples: Annotated[Path | None, typer.Option(help="Judge with these instead of the stored ones.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each request to a server.")] = 60.0,
    header: Annotated[
        list[str] | None, typer.Option(help="'NAME: VALUE', sent with every request to a server.")
    ] = None,
    key: Key = None,
    key_file: KeyFileOf = None,
) -> Ended:
    """Compare another engine's answers with those of the FP32 original, by the rules that judge a half."""
    from .prove_command import prove_against, shown

    facts = prove_against(target, store, against, samples, timeout, header or (), notify)
    return facts, shown(facts), 0 if facts["status"] == "equal" else 3
