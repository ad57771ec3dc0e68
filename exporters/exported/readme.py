"""The page of an exported folder: the verdict, the build command, and how an engine's answers are judged."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

from ...models.store.manifest import sha256_of
from ..report.headline import headline
from .build_commands import Commands
from .tensorrt_operators import SEEN_IN

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
row i is the answer to row i of `inputs.npz`, and `expected.npz` has what FP32 answers there. Exit code 0: equal; 3: not
equal, and the report says where.
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


def readme(folder: Path, facts: Mapping[str, Any], proof: Mapping[str, Any], commands: Commands) -> str:
    """``facts``: the manifest of ``folder``; ``proof``: its ``parity.json``."""
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
        operations=_operations(facts["exported"].get("lacking", ())),
    )
    return page + (f"\n```python\n{dedent(commands.asks).strip()}\n```\n" if commands.asks else "")


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
