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
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any

import numpy as np
import onnxruntime

from ...models.errors import BadInput, BadSetting, DamagedFile, ExportFailed, ParityRefused
from ...models.files.durable import new_folder
from ...models.order.one_order import one_order
from ...models.spec.spec import ModelSpec
from ...models.store.manifest import sha256_of, write_manifest
from ...models.store.store import LIVE, Version
from ..inputs.samples import stored_samples
from ..on_device.reprove import reference_run_of
from ..onnx.output_names import output_names
from ..onnx.parted_transposes import part_transposes_in
from ..proof.prove import ReferenceRun, judged
from ..proof.subject import CPU
from ..report.headline import headline
from .build_commands import BY_ENGINE, TENSORRT, Commands, commands_for
from .file_rows import INPUTS, answers_differ_in_shape, take_rows, write_rows
from .onnx_pair import HALF, ORIGINAL, check_exportable, put_pair, suit_tensorrt
from .tensorrt_operators import SEEN_IN, LackingOperation

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
        raise BadSetting(f"the engine {engine!r}: expected one of {', '.join(BY_ENGINE)}")
    check_exportable(version)
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
        commands = commands_for(engine, version.spec(), shapes, answers_differ_in_shape(folder))
        (folder / "README.md").write_text(readme(folder, facts, proof, commands, version.spec()))
        write_manifest(folder, LIVE, facts)
    return facts | {"folder": str(target), "files": Version.at(target).manifest["files"]}


def exported_version(folder: Path) -> Version:
    """The version that an exported folder holds. Raises BadInput for any other folder (none of its code is run),
    DamagedFile."""
    version = Version.at(folder)
    if "exported" not in version.manifest or version.has("original.pt2") or not version.has(ORIGINAL):
        raise BadInput(
            f"{folder} is not a folder that `halfeven export` wrote: expected its manifest.json, with {ORIGINAL} "
            "beside it; give such a folder, or NAME or NAME@VERSION of the store"
        )
    if lacking := [key for key in ("half", "reason", "forms") if key not in version.manifest]:
        raise DamagedFile(
            f"{folder / 'manifest.json'} is damaged: it has no {lacking[0]}; export the model again"
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


_CHILD = """
import json
import sys
import numpy as np
import onnxruntime

half, inputs, answers, rows, outputs = *sys.argv[1:4], int(sys.argv[4]), json.loads(sys.argv[5])
onnxruntime.disable_telemetry_events()
session = onnxruntime.InferenceSession(half, providers=["CPUExecutionProvider"])
given = dict(np.load(inputs))
theirs = {output.name for output in session.get_outputs()}
names = [own if own in theirs else name for name, own in outputs.items()]  # a foreign file may give an input back
found = {name: [] for name in outputs}
for start in range(0, min(map(len, given.values())), rows or 1):
    part = slice(start, start + rows) if rows else (start, ...)  # an array also of a scalar input
    asked = {name: array[part] for name, array in given.items()}
    for name, array in zip(outputs, session.run(names, asked)):
        found[name].extend(array if rows else [array])
rows = ((place, row, array) for place, name in enumerate(outputs) for row, array in enumerate(found[name]))
np.savez(answers, **{f"{place}[{row}]": array for place, row, array in rows})
"""


def check_by_default(version: Version, run: ReferenceRun, folder: Path) -> None:
    """Run the half in ``folder`` in ONNX Runtime with its default settings, as whoever gets the file runs it, on the
    rows of its proof, and judge its answers.

    It runs in a process of its own: ONNX Runtime's optimiser does more to a file than that of halfeven's engine, and
    one of its passes ends the process (`exporters/onnx/parted_transposes.py`).

    Raises ExportFailed where it does not run, ParityRefused where its answers are not equal, OrderEnded.
    """
    spec = version.spec()
    with TemporaryDirectory(prefix="halfeven-export-") as place:
        answers = Path(place) / "answers.npz"
        rows = str(spec.max_batch_size if spec.batched else 0)
        names = output_names(spec)
        _in_a_child([str(folder / HALF), str(folder / INPUTS), str(answers), rows, json.dumps(names)])
        with np.load(answers) as file:
            # An output has its number here: "y[0]" may be the name of one beside "y".
            found = {
                name: [file[key] for key in file.files if key.startswith(f"{place}[")]
                for place, name in enumerate(names)
            }
        taken = take_rows(run, found)
    report = judged(run, version.manifest["half"], [taken])
    if not report.passed:
        raise ParityRefused(
            f"the half of {version} is not equal in ONNX Runtime {onnxruntime.__version__} with its default settings: "
            f"{report.summary()}; serve it with halfeven, or convert it again with more in FP32 (--keep)"
        )


def _in_a_child(words: list[str]) -> None:
    command = [sys.executable, "-P", "-c", _CHILD, *words]
    with one_order() as order:
        status, written = order.run(command, "the run of the export's samples by ONNX Runtime")
    if status:
        said = next(iter(written.strip().splitlines()[-1:]), "no reason given")
        why = f"it ends by signal {-status}" if status < 0 else said[:400]
        raise ExportFailed(
            f"ONNX Runtime {onnxruntime.__version__} does not run the half with its default settings: {why}; serve it "
            "with halfeven, which proves each file with the settings that it serves it with"
        )


_PAGE = """\
# {model}, version {version}: a proven {half} half for {engine}

**{headline}.** Its largest error: {summary}.

Proven in ONNX Runtime {runtime} on {device}. An engine that is built of the file computes with
kernels of its own: judge its answers, as below, before it serves.

| file | SHA-256 |
|---|---|
{digests}

`half.onnx` has the precision of every node in its types; `precision.json` says which nodes stay in FP32 and why,
`parity.json` has the whole verdict. `original.onnx` is the FP32 original. `manifest.json` has the digests of all files.
{layout}
## Build

```console
{build}
```

{notes}
{operations}
## Judge the engine

The same gate that judged the half, from this folder alone:

```console
halfeven prove . --against http://HOST:8000    # a running server (Open Inference Protocol V2, HTTP)
halfeven prove . --against answers.npz         # a file of answers
halfeven prove . --against half.onnx           # an ONNX file, in ONNX Runtime
```

A server is asked at several batch sizes and with adversarial inputs too. `answers.npz` has one array for each output:
row i is the answer to row i of `inputs.npz`, and `expected.npz` has what FP32 answers there. Where the answers of an
output `y` differ in shape from row to row, both have an array for each row: `y[0]`, `y[1]`, …. Exit code 0: equal; 3:
not equal, and the report says where.
"""

_OPERATIONS = """
## Operations that TensorRT lacks

{engine} does not have these operations of ONNX. One that is rewritten is computed in `half.onnx` and `original.onnx` by
operations that it has: the half was proven again so, and the original answers as before.{left}

| value | operation | |
|---|---|---|
{lines}
"""
_LEFT = """ One that stays as it is
keeps an engine from being built, unless your TensorRT has it; the table says why it stays."""


def readme(
    folder: Path, facts: Mapping[str, Any], proof: Mapping[str, Any], commands: Commands, spec: ModelSpec
) -> str:
    """The page of an exported folder. ``facts``: the manifest of ``folder``; ``proof``: its ``parity.json``."""
    report = proof["forms"]["onnx"]
    shown = {**facts, "status": "live", "forms": {"onnx": {"passed": True, "parity": report}}}
    digests = (f"| `{path.name}` | `{sha256_of(path)}` |" for path in sorted(folder.glob("*.onnx*")))
    page = _PAGE.format(
        model=facts["model"],
        version=facts["version"],
        half=facts["half"],
        engine=facts["exported"]["for"],
        headline=headline(shown),
        summary=report["summary"].removeprefix("passed: "),
        runtime=proof["environment"]["onnxruntime"],
        device=proof["environment"]["device"],
        digests="\n".join(digests),
        build=commands.build,
        notes=commands.notes,
        layout=_layout(spec),
        operations=_operations(facts["exported"].get("lacking", ())),
    )
    return page + (f"\n```python\n{dedent(commands.asks).strip()}\n```\n" if commands.asks else "")


def _layout(spec: ModelSpec) -> str:
    """The sentence on tensors whose batch is moved; an empty text where the model has the batch first everywhere."""
    moved = [f"`{tensor.name}`" for tensor in (*spec.inputs, *spec.outputs) if tensor.batch_axis]
    if not moved:
        return ""
    return (
        "\nThe batch is the first axis of every array and tensor here; the model itself has that of "
        f"{', '.join(moved)} on\nanother axis. A file with `halfeven.layout: own` in its metadata (`halfeven fp16`) "
        "has the model's own shapes.\n"
    )


def _operations(lacking: Sequence[Mapping[str, str]]) -> str:
    """The page's section on the operations that TensorRT lacks; an empty text where the file has no such operation."""
    if not lacking:
        return ""
    lines = [
        f"| `{each['output']}` | {each['operation']} | {each['left_because'] or 'rewritten'} |"
        for each in lacking
    ]
    left = sum(bool(each["left_because"]) for each in lacking)
    return _OPERATIONS.format(engine=SEEN_IN, lines="\n".join(lines), left=_LEFT if left else "")
