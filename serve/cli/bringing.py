"""The commands that bring something in: ``init`` writes a model folder for a model that has none, ``import`` does so
for those of another server, ``samples`` makes a samples file of pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...models.errors import BadInput
from .console import DEFAULT_STORE, Ended, StoreAt, check_target, command, order

if TYPE_CHECKING:
    from ...models.store.store import Store


@order
def init(
    path: Annotated[
        str, typer.Argument(help="model.onnx, program.pt2, a transformers folder, or model.py:build.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="Where a file's folder is written; default: its name, here.")
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            help="Real inputs (safetensors, npz): a module needs them, ONNX and transformers run with them."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that are there (model.toml, samples, the model).")
    ] = False,
) -> Ended:
    """Write a model folder whose model.toml is guessed; its guesses are marked, to be confirmed."""
    from ...exporters.guessing.writing import write_folder

    facts = write_folder(path, folder, samples, force)
    shown = [
        *facts["guesses"],
        f"guesses to confirm in {facts['folder']}/model.toml: {facts['to_confirm']}",
    ]
    return facts, "\n".join([*shown, f"next: halfeven convert {facts['folder']}"]), 0


@order
def import_models(
    path: Annotated[
        Path, typer.Argument(help="A Triton model repository, a model of it, or a TorchServe .mar.")
    ],
    out: Annotated[Path, typer.Argument(help="Where the model folders are written.")] = Path(),
    samples: Annotated[
        Path | None, typer.Option(help="Real inputs (safetensors, npz) of an archive with a model file.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that are there (model.toml, samples, the model).")
    ] = False,
) -> Ended:
    """Write model folders for the models of an existing Triton or TorchServe server."""
    from rich.text import Text

    from ...exporters.importing.server_models import import_models

    facts, lines = import_models(path, out, samples, force)
    further = [f"next: halfeven convert {model['folder']}" for model in facts["models"]]
    return facts, Text("\n".join([*lines, *further])), 0 if facts["models"] else 4


@command
def samples(
    target: Annotated[str, typer.Argument(help="A model folder, or NAME or NAME@VERSION in the store.")],
    pictures: Annotated[Path, typer.Argument(help="A folder of PNG and JPEG files, or one such per label.")],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Make a samples file, which is a training file too, of a folder of pictures."""
    from ..versions.versions_in_store import store_at

    facts = pack(target, pictures, out, store_at(store))
    return facts, f"{facts['file']}: {facts['rows']} rows", 0


def pack(target: str, pictures: Path, out: Path, store: "Store") -> Mapping[str, Any]:
    """Write the rows that the model of ``target`` (a folder, NAME or NAME@VERSION) makes of the pictures.

    Raises UnknownName, and BadInput where a picture or the name of its folder does not fit the model.
    """
    from ...exporters.inputs.samples import load_samples
    from ...models.folder.package import read_folder
    from ..versions.versions_in_store import version_called

    if not pictures.is_dir():
        raise BadInput(f"{pictures} is no folder: expected pictures, in folders that are named as the labels")
    if out.suffix != ".safetensors":
        raise BadInput(f"{out}: expected a name that ends with .safetensors")
    check_target("OUT", out, replaces=True)
    is_folder = (Path(target) / "model.toml").is_file()
    spec = read_folder(Path(target)).spec if is_folder else version_called(target, store).spec()
    made = load_samples(pictures, spec)
    made.save(out, private=False)
    return {"file": str(out), "rows": made.count, "inputs": list(made.arrays), "targets": list(made.targets)}
