"""The commands that bring models in: ``init`` writes a model folder for a model that has none, ``import`` does so for
those of another server."""

from pathlib import Path
from typing import Annotated

import typer

from .console import Ended, order


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
            help="Real inputs (safetensors, npz): a module needs them, an ONNX file runs with them."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a model.toml.")] = False,
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
    force: Annotated[bool, typer.Option("--force", help="Overwrite a model.toml.")] = False,
) -> Ended:
    """Write model folders for the models of an existing Triton or TorchServe server."""
    from rich.text import Text

    from ...exporters.importing.server_models import import_models

    facts, lines = import_models(path, out, samples, force)
    further = [f"next: halfeven convert {model['folder']}" for model in facts["models"]]
    return facts, Text("\n".join([*lines, *further])), 0 if facts["models"] else 4
