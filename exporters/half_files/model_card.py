"""A block of Markdown for a model card: what was proven of a half that `halfeven fp16` wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...models.store.manifest import sha256_of
from ..report.headline import headline
from .half_file import proof_of


def model_card(file: Path, facts: Mapping[str, Any]) -> str:
    """``facts``: of the proof, as `half_file.verify` gives them."""
    version = proof_of(file)
    level, kept = version.read(
        "precision.json", lambda plan: (plan["level"], [f"`{node['node']}`" for node in plan["kept"]])
    )
    libraries = version.read("parity.json", lambda proof: proof["environment"].items())
    (form,) = facts["forms"].values()
    more = f", … ({len(kept)} in all)" if len(kept) > 10 else ""
    rows = {
        "verdict": headline(facts),
        "largest error": ", ".join(
            f"`{output['name']}` {output['max_error_u']:.3g}u of {output['limit_u']:.3g}u"
            for output in form["parity"]["outputs"]
            if output["max_error_u"] is not None
        ),
        "precision": f"{facts['half']}, level {level}",
        "kept in FP32 by the proof": ", ".join(kept[:10]) + more or "nothing",
        "file": f"`{file.name}`, SHA-256 `{sha256_of(file)}`",
        "original": f"SHA-256 `{version.manifest['files']['original.onnx']}`",
        "proven with": ", ".join(f"{name} {found}" for name, found in libraries),
    }
    lines = ["## Half precision", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {said.replace('|', '/')} |" for name, said in rows.items()]
    return "\n".join(
        [
            *lines,
            "",
            f"Check it again with `halfeven verify {file.name}` (the folder `{version.folder.name}`).",
        ]
    )
