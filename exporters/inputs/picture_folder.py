"""A folder of pictures as samples, for `load_samples` where it is given a folder instead of a file.

    pictures/ant/1.png  pictures/bee/2.jpg      folders named as the labels: classes as INT64 targets
    pictures/1.png  pictures/2.jpg              no targets

Each file goes through `models/pictures/picture.py`, as requests do. Samples come in the order of labels, then of names.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...models.errors import BadInput, BadSamples
from ...models.pictures.picture import SUFFIXES, picture_row
from ...models.pictures.pixels import Picture
from ...models.spec.spec import ModelSpec, TensorSpec


def read_pictures(folder: Path, spec: ModelSpec, max_bytes: int) -> dict[str, np.ndarray]:
    """The tensors as a samples file has them: the input's rows, and ``target:<output>`` where there are classes.

    ``max_bytes`` bounds the rows in memory. Raises BadSamples naming the file, TooLarge.
    """
    tensor = _input(spec)
    picture = Picture.of(tensor, spec.batched)
    output = _labelled(spec)
    files = list(_files(folder, output))
    rows: list[np.ndarray] = []
    for _, file in files:
        rows.append(_row(file, picture))
        if rows[0].nbytes * len(files) > max_bytes:
            raise BadSamples(f"{len(files)} pictures take more than {max_bytes} bytes as rows; give fewer")
        if rows[-1].shape != rows[0].shape:
            raise BadSamples(
                f"{file.name}: expected {list(rows[0].shape)} as the others, got {list(rows[-1].shape)}; set "
                "picture.size in model.toml"
            )
    arrays = {tensor.name: np.stack(rows)}
    if output is not None and files[0][0] is not None:
        arrays[f"target:{output.name}"] = np.array([number for number, _ in files], np.int64)
    return arrays


def _input(spec: ModelSpec) -> TensorSpec:
    if len(spec.inputs) != 1 or spec.inputs[0].picture is None:
        raise BadSamples(
            f"a folder of pictures needs a model with one input that has a picture entry in model.toml; '{spec.name}' "
            f"has {[tensor.name for tensor in spec.inputs]}; give a safetensors file instead"
        )
    return spec.inputs[0]


def _labelled(spec: ModelSpec) -> TensorSpec | None:
    """The output whose labels are the names of the folders."""
    return next((t for t in spec.outputs if t.labels and t.kind in ("logits", "probabilities")), None)


def _files(folder: Path, output: TensorSpec | None) -> Iterator[tuple[int | None, Path]]:
    """(class, file), or (None, file) where the pictures lie in the folder itself."""
    plain = _pictures(folder)
    classes = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not plain and not any(_pictures(path) for path in classes):
        raise BadSamples(f"there are no pictures in it; expected {', '.join(SUFFIXES)} files")
    if plain and classes:
        raise BadSamples(
            f"it has pictures and folders ({classes[0].name}) side by side; expected all pictures in folders named "
            "as their classes, or none"
        )
    if plain:
        yield from ((None, file) for file in plain)
        return
    labels = _labels(output)
    if unknown := [path.name for path in classes if path.name not in labels]:
        raise BadSamples(f"the folder {unknown[0]!r} is no label of the model: expected {list(labels)[:20]}")
    for number, label in enumerate(labels):
        yield from ((number, file) for file in _pictures(folder / label))


def _labels(output: TensorSpec | None) -> tuple[str, ...]:
    if output is None:
        raise BadSamples(
            "it has folders, but the model has no output of kind logits or probabilities with labels in model.toml: "
            "the folders' names must be labels"
        )
    return output.labels


def _pictures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    # macOS adds "._1.png" for "1.png" to a tar.
    files = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in files if path.suffix.lower() in SUFFIXES and path.is_file())


def _row(file: Path, picture: Picture) -> np.ndarray:
    try:
        return picture_row(file.read_bytes(), picture, BadSamples)
    except (BadInput, OSError) as error:
        raise BadSamples(f"{file.parent.name}/{file.name}: {error}") from None
