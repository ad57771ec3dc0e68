"""A folder for another engine: the proven half and its original as ONNX, with all that is needed to prove the half
again.

    half.onnx original.onnx           the proven half, its FP32 original (with weights beside them from 2 GB on)
    samples.safetensors            the samples: every second one judges
    inputs.npz expected.npz        what the proof asks, as rows, and what the original answers (`file_rows.py`)
    spec.json precision.json parity.json manifest.json      signature, plan, verdict, digests of all files
    README.md                      the build command of the engine

The folder is a version like those of the store (`Version.at`), so that the gate judges by it as by those.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...models.engines.true_fp32 import use_true_fp32
from ...models.errors import BadInput, BadSetting
from ...models.files.durable import new_folder
from ...models.store.manifest import write_manifest
from ...models.store.store import LIVE, Version
from ..inputs.samples import stored_samples
from ..on_device.reprove import reference_run_of
from ..onnx.parted_transposes import part_transposes_in
from ..proof.subject import CPU
from .build_commands import BY_ENGINE, TENSORRT, commands_for
from .default_session import check_by_default
from .file_rows import write_rows
from .onnx_pair import HALF, ORIGINAL, check_exportable, put_pair, suit_tensorrt
from .readme import readme
from .tensorrt_operators import LackingOperation

COPIED = ("spec.json", "precision.json", "samples.safetensors")
STATED = ("half", "reason", "notes", "samples", "row_operations", "created")  # of the version's own manifest


def export(
    version: Version, engine: str, target: Path, notify: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Write the folder ``target``, new or empty, at once: it is whole or not there. Gives its facts.

    Raises BadSetting for an unknown engine, Conflict where the folder is not empty, and as `onnx_pair` does where the
    version has no proven half as ONNX and none can be made. For TensorRT operations that it lacks are rewritten in the
    files (`suit_tensorrt`).
    """
    if engine not in BY_ENGINE:
        raise BadSetting(f"--for {engine!r}: expected one of {', '.join(BY_ENGINE)}")
    check_exportable(version)
    use_true_fp32()
    with new_folder(target) as folder:
        samples = stored_samples(version)
        notify(f"answering the samples of {version} in FP32")
        run = reference_run_of(version, version.manifest["half"], CPU, samples)
        proof, lacking = put_pair(version, run, folder, notify), []
        if engine == TENSORRT:
            lacking, again = suit_tensorrt(version, run, samples, folder, notify)
            proof = again or proof
        if parted := part_transposes_in(folder / HALF):
            notify(
                f"{parted} half Transpose parted from the MatMul after it: ONNX Runtime's optimiser crashes on the pair"
            )
        write_rows(run, folder)
        if version.manifest["half"] == "fp16":  # its CPU provider has no products of bfloat16
            notify("running the half in ONNX Runtime with its default settings")
            check_by_default(version, run, folder)
        for name in COPIED:
            (folder / name).write_bytes(version.bytes(name))
        (folder / "parity.json").write_text(json.dumps(proof, indent=2, allow_nan=False) + "\n")
        shapes = {name: array.shape[1:] for name, array in samples.arrays.items()}
        facts = _manifest(version, engine, proof, lacking)
        commands = commands_for(engine, version.spec(), shapes)
        (folder / "README.md").write_text(readme(folder, facts, proof, commands))
        write_manifest(folder, LIVE, facts)
    return facts | {"folder": str(target), "files": Version.at(target).manifest["files"]}


def exported_version(folder: Path) -> Version:
    """The version that an exported folder holds. Raises BadInput for any other folder: none of its code is run."""
    version = Version.at(folder)
    if "exported" not in version.manifest or version.has("original.pt2") or not version.has(ORIGINAL):
        raise BadInput(
            f"{folder} is not a folder that `halfeven export` wrote: expected its manifest.json, with {ORIGINAL} "
            "beside it; give such a folder, or NAME or NAME@VERSION of the store"
        )
    return version


def _manifest(
    version: Version, engine: str, proof: dict[str, Any], lacking: Sequence[LackingOperation]
) -> dict[str, Any]:
    (form,) = proof["forms"].values()
    passed = {key: form[key] for key in ("passed", "max_error_u", "sqnr_db")}
    return {
        "model": version.name,
        "version": version.number,
        "exported": {
            "for": engine,
            "digest": version.digest,
            **({"lacking": [operation.to_json() for operation in lacking]} if engine == TENSORRT else {}),
        },
        **{key: version.manifest.get(key) for key in STATED},
        "forms": {"onnx": {**passed, "file": "half.onnx"}},
    }
