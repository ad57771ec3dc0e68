"""The metadata of a half and the page beside it: the verdict, and the digests of the proof."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import external_data_helper

from ...models.store.manifest import sha256_of
from ...models.store.store import Version
from ..conversion.convert import Conversion
from ..exported.onnx_pair import HALF, ORIGINAL
from ..onnx.custom_nodes import join
from ..onnx.own_layout import declare_as, give_own_layout
from ..onnx.reading.bounded_file import read_graph, tensors
from ..onnx.reading.large_files import DATA
from ..report.headline import headline, not_run
from .around_custom import AroundCustom

# Keys of a manifest: they have digests of their own, or differ though the same half is made again.
_NOT_STATED = frozenset(("format", "status", "digest", "files", "created", "exported"))


def digest_of_facts(manifest: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """The SHA-256 of what a manifest states beside the time, with the digests of ``files``: all but the half's own."""
    stated = {key: value for key, value in manifest.items() if key not in _NOT_STATED}
    text = json.dumps(stated | {"files": files}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


_AROUND = """
## Nodes that were not run

Note: {said}.
So it cannot load `half.onnx` either: the lines above are for the files of other models, and those that ask a server or
take `answers.npz` are refused here. The nodes stand in `half.onnx` as they were, and read and give FP32;
`original.onnx` is the model without them. Of engines, `prove` judges ONNX files.
"""


def correct_page(page: Path, stated: Mapping[str, Any]) -> None:
    """Name the nodes that were not run, and take out the half's digest: the half cannot name a page that names it."""
    said = ".** Its largest error"
    lines = page.read_text().replace(said, f"{not_run(stated)}{said}", 1).splitlines(keepends=True)
    more = _AROUND.format(said=not_run(stated)[2:]) if "around" in stated else ""
    page.write_text("".join(line for line in lines if not line.startswith(f"| `{HALF}")) + more)


def describe(
    draft: Path,
    version: Version,
    source: Path,
    data: str,
    stated: Mapping[str, Any],
    around: AroundCustom | None,
) -> None:
    """The half gets the shapes of ``source`` and its custom nodes, and metadata: the verdict, and the digests of the
    proof's other files and of what the manifest states. Its file of weights, if it has one, is called ``data``, and is
    one of those files: whoever signs the half signs its weights."""
    model, spec = onnx.load(draft / HALF, load_external_data=False), version.spec()
    give_own_layout(model, spec)
    if source.suffix == ".onnx":
        declare_as(model, read_graph(source), spec)
    if around:
        join(model, around.whole)
    if (draft / (HALF + DATA)).exists():
        (draft / (HALF + DATA)).rename(draft / data)
        for tensor in filter(external_data_helper.uses_external_data, tensors(model)):
            next(entry for entry in tensor.external_data if entry.key == "location").value = data
    files = {
        path.name: sha256_of(path) for path in draft.iterdir() if path.name not in (HALF, "manifest.json")
    }
    said = {
        "verdict": headline(Conversion(version, version.manifest).shown() | {"around": stated.get("around")}),
        "proof": files["parity.json"],
        "original": files[ORIGINAL],
        "facts": digest_of_facts(stated, files),
    }
    for key, value in said.items():
        model.metadata_props.add(key=f"halfeven.{key}", value=value)
    onnx.save(model, draft / HALF)
