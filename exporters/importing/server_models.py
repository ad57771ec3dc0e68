"""``halfeven import``: the models of an existing server, written as model folders."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...models.errors import BadFolder, BadInput
from ..inputs.samples import read_tensors
from .imported import Refusal, Written
from .torchserve import archives_at, take_archives
from .triton import is_repository, take_repository


def import_models(
    path: Path, out: Path, samples: Path | None = None, overwrite: bool = False
) -> tuple[Mapping[str, Any], list[str]]:
    """Write a model folder below ``out`` for every model of a Triton repository, a Triton model, a TorchServe archive
    or a folder of archives.

    ``samples``: real inputs for one archive. ``overwrite``: also files that are there. Gives ``models`` (as
    `Written.to_json`) and ``refused`` (name and reason), and the same as lines for a terminal. Raises BadFolder for any
    other path, and where there is one model and it is refused its own error.
    """
    found = list(_found(path, out, samples, overwrite))
    written = [one for one in found if isinstance(one, Written)]
    refused = [one for one in found if isinstance(one, Refusal)]
    if len(refused) == 1 and not written:
        raise refused[0].error
    facts = {
        "models": [one.to_json() for one in written],
        "refused": [{"model": one.name, "reason": str(one.error)} for one in refused],
    }
    lines = [line for one in written for line in one.lines()]
    return facts, [*lines, *(f"refused: {one['model']}: {one['reason']}" for one in facts["refused"])]


def _found(path: Path, out: Path, samples: Path | None, overwrite: bool) -> Iterator[Written | Refusal]:
    if is_repository(path):
        if samples is not None:
            raise BadInput("--samples is for a TorchServe archive: a Triton model's inputs are in its files")
        yield from take_repository(path, out, overwrite)
        return
    archives = archives_at(path)
    if not archives:
        raise BadFolder(
            f"{path} {'is not taken' if path.exists() else 'does not exist'}: expected a Triton model repository "
            "(folders with a config.pbtxt or 1/model.onnx), one model of it, a TorchServe archive (.mar), or a folder "
            "of archives; `halfeven init` takes single files"
        )
    if samples is not None and len(archives) > 1:
        raise BadInput(
            f"--samples is for one model, {path} has {len(archives)}: import each archive by itself"
        )
    arrays = read_tensors(samples) if samples is not None else None
    yield from take_archives(archives, out, arrays, overwrite)
