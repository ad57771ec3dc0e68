"""A prediction is answered as JSON, npy, npz, or as a PNG where the answer is one picture (RFC 9110, 12.5.1)."""

from collections.abc import Iterator, Sequence

import numpy as np

from ....models.errors import BadRequest
from ....models.pictures.picture import png_of
from ....models.pictures.pixels import Picture
from ....models.spec.spec import ModelSpec
from .numpy_files import NPY_TYPE, NPZ_TYPE, write_npy, write_npz
from .predict import given_as_called, write_predict

JSON_TYPE, PNG_TYPE = "application/json", "image/png"
_MANY = 2**20  # elements that take longer to write than a hand-over to a thread


def answer_type(spec: ModelSpec, rows: int, accept: str) -> str:
    """The first type of ``Accept`` that this answer can have, by quality and then order; JSON where none is.

    A PNG needs one row and one output of kind ``image``; where that is the only output, ``*/*`` means PNG.
    Raises BadRequest where npy is asked for and there are several outputs.
    """
    pictures = [tensor for tensor in spec.outputs if tensor.kind == "image"]
    png = PNG_TYPE if rows == 1 and len(pictures) == 1 else JSON_TYPE
    usual = png if len(spec.outputs) == 1 else JSON_TYPE
    if accept in ("", "*/*"):
        return usual
    known = {
        "*/*": usual, "application/*": JSON_TYPE, JSON_TYPE: JSON_TYPE, "image/*": png, PNG_TYPE: png,
        NPY_TYPE: NPY_TYPE, NPZ_TYPE: NPZ_TYPE,
    }  # fmt: skip
    found = next((known[name] for name in _ranges(accept) if name in known), JSON_TYPE)
    if found == NPY_TYPE and len(spec.outputs) > 1:
        raise BadRequest(
            f"model '{spec.name}' has {len(spec.outputs)} outputs, an npy file has one array: expected "
            f"Accept: {NPZ_TYPE}"
        )
    return found


def _ranges(accept: str) -> Iterator[str]:
    """The media ranges of an Accept header, best first."""
    ranked = []
    for item in accept.split(","):
        name, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = next((p.removeprefix("q=") for p in parameters if p.startswith("q=")), "1")
        try:
            ranked.append((-float(quality), name))
        except ValueError:
            ranked.append((0.0, name))
    return (name for weight, name in sorted(ranked, key=lambda pair: pair[0]) if weight < 0)


def write_answer(spec: ModelSpec, outputs: Sequence[np.ndarray], kind: str) -> bytes:
    """The outputs as a body of the ``kind`` that `answer_type` chose."""
    if kind == PNG_TYPE:
        (tensor, array), *_ = [
            pair for pair in zip(spec.outputs, outputs, strict=True) if pair[0].kind == "image"
        ]
        return png_of(array[0] if spec.batched else array, Picture.of(tensor, spec.batched))
    if kind == NPY_TYPE:
        return write_npy(*given_as_called(spec, outputs).values())
    if kind == NPZ_TYPE:
        return write_npz(given_as_called(spec, outputs))
    return write_predict(spec, outputs)


def is_quick_to_write(spec: ModelSpec, outputs: Sequence[np.ndarray]) -> bool:
    """True if writing takes less than handing it to a thread would."""
    return all(tensor.kind != "image" for tensor in spec.outputs) and sum(a.size for a in outputs) < _MANY
