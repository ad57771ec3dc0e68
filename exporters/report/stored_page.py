"""Parts that are put into the stored page of a report when it is asked for: its number and date, links to the server's
pages, and the section about other devices than the conversion's."""

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from ...models.store.store import Version
from ..on_device.device_proofs import DeviceProof

_COLUMNS = ("device", "driver", "cudnn", "torch", "onnxruntime")


def stored_page(version: Version) -> str:
    """The page with what was not known when it was written: the version's number, and when it was made."""
    name, number = escape(version.name), version.number
    page = version.bytes("report.html").decode().replace(f"<title>{name}:", f"<title>{name}@{number}:", 1)
    made = f'<p class="quiet">version {number}, made {escape(str(version.manifest.get("created", "–")))}</p>'
    return page.replace(f"<h1>{name}</h1>", f"<h1>{name}<span>@{number}</span></h1>{made}", 1)


def served_page(version: Version, proofs: Sequence[DeviceProof]) -> str:
    """The report page of a version as ``/v1/models/MODEL/versions/NUMBER/report`` shows it: its links are
    relative, because a proxy may show the server below a path."""
    root, name = "../../../../../", version.name
    links = (
        f'<a href="{root}">all models</a>, <a href="{root}models/{quote(name, safe="")}">{escape(name)}</a>'
    )
    way_back = f'<main><nav aria-label="Pages" style="margin-bottom: 14px">{links}</nav>'
    return with_device_proofs(stored_page(version).replace("<main>", way_back, 1), proofs)


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
