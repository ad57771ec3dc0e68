"""What is put into the stored page of a report when a server is asked for it: the way back to the server's pages, and
the section about other devices than the conversion's."""

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from ..device_proofs import DeviceProof

_COLUMNS = ("device", "driver", "cudnn", "torch", "onnxruntime")


def served_page(model: str, page: str, proofs: Sequence[DeviceProof]) -> str:
    """The page as ``/v1/models/MODEL/versions/NUMBER/report`` shows it; a proxy may show the server below a path."""
    root = "../../../../../"
    links = (
        f'<a href="{root}">all models</a>, <a href="{root}models/{quote(model, safe="")}">{escape(model)}</a>'
    )
    way_back = f'<nav aria-label="Pages" style="margin-bottom: 14px">{links}</nav>'
    return with_device_proofs(page.replace("<main>", f"<main>{way_back}", 1), proofs)


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
