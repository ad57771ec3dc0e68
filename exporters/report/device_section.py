"""The section of a report about other devices than the conversion's, put into the stored page when it is asked for."""

from collections.abc import Sequence
from html import escape

from ..device_proofs import DeviceProof

_COLUMNS = ("device", "driver", "cudnn", "torch", "onnxruntime")


def with_device_proofs(page: str, proofs: Sequence[DeviceProof]) -> str:
    """The page with a table of what the gate found on other devices; as it is where nothing was proven there."""
    if not proofs:
        return page
    head = "".join(
        f"<th>{heading}</th>" for heading in ("form", "verdict", "batch sizes", *_COLUMNS, "proven at")
    )
    rows = "".join(f"<tr>{_row(proof)}</tr>" for proof in reversed(proofs))
    section = f"<section><h2>On other devices</h2><table><tr>{head}</tr>{rows}</table></section>"
    before, end, after = page.rpartition("</main>")
    return before + section + end + after if end else page + section


def _row(proof: DeviceProof) -> str:
    sizes = ", ".join(map(str, proof.batch_sizes))
    libraries = (str(proof.environment.get(key, "")) for key in _COLUMNS)
    return "".join(
        f"<td>{escape(cell)}</td>" for cell in (proof.form, proof.summary, sizes, *libraries, proof.at)
    )
