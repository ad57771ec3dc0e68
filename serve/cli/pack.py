"""``halfeven samples``: a folder of pictures as a samples file, which is a training file too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...exporters.inputs.samples import load_samples
from ...models.errors import BadInput
from ...models.package import read_folder
from ...models.store import Store
from .parity_command import version_called


def pack(target: str, pictures: Path, out: Path, store: Store) -> Mapping[str, Any]:
    """Write the rows that the model of ``target`` (a folder, NAME or NAME@VERSION) makes of the pictures.

    Raises UnknownName, and BadInput where a picture or the name of its folder does not fit the model.
    """
    if not pictures.is_dir():
        raise BadInput(f"{pictures} is no folder: expected pictures, in folders that are named as the labels")
    if out.suffix != ".safetensors":
        raise BadInput(f"{out}: expected a name that ends with .safetensors")
    is_folder = (Path(target) / "model.toml").is_file()
    spec = read_folder(Path(target)).spec if is_folder else version_called(target, store).spec()
    samples = load_samples(pictures, spec)
    samples.save(out)
    return {
        "file": str(out),
        "rows": samples.count,
        "inputs": list(samples.arrays),
        "targets": list(samples.targets),
    }
