"""``halfeven prove --against``: which version, which engine, and what the terminal shows of the verdict."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from ...exporters.exported.folder import exported_version
from ...exporters.exported.other_engine import (
    OtherEngine,
    answers_file,
    check_custom_nodes,
    onnx_file,
    prove_engine,
)
from ...exporters.guessing.given_samples import judging_samples
from ...exporters.report.headline import not_run
from ...exporters.report.page import number_text, render_terminal
from ...models.errors import BadInput, BadSetting
from ...models.spec.spec import ModelSpec
from ..access.client_key import request_headers
from ..versions.versions_in_store import store_at, version_called
from .v2_engine import v2_engine


def prove_against(
    target: str,
    store: Path,
    against: str,
    samples: Path | None,
    timeout_s: float,
    headers: Sequence[str],
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """The facts of `exported.other_engine.prove_engine`. ``target``: NAME, NAME@VERSION or an exported folder.

    Raises UnknownName, BadSetting, BadInput or BadSamples for what was named, NotReady or EngineFailed where the engine
    gives no answer.
    """
    if not 0 < timeout_s < math.inf:
        raise BadSetting(f"--timeout {timeout_s}: expected a number of seconds above 0")
    exported = (Path(target) / "manifest.json").is_file()
    version = exported_version(Path(target)) if exported else version_called(target, store_at(store))
    if version.manifest.get("around") and not against.endswith(".onnx"):
        raise BadInput(
            f"{target} does not judge answers of the whole model{not_run(version.manifest)}; expected --against "
            "FILE.onnx"
        )
    if against.endswith(".onnx"):
        check_custom_nodes(Path(against), version)
    engine = _engine(against, version.spec(), timeout_s, headers)
    judging = judging_samples(version, samples)
    if callable(engine.asked):  # the rows of a file of answers are those that were given
        judging = judging.distinct()
    return prove_engine(version, judging, engine, notify)


def _engine(against: str, spec: ModelSpec, timeout_s: float, headers: Sequence[str]) -> OtherEngine:
    if "://" in against:
        engine = v2_engine(against, spec.name, timeout_s, request_headers(headers))
        return OtherEngine("V2 server", engine.url, engine)
    path = Path(against)
    if not path.is_file():
        raise BadInput(
            f"--against {against}: no such file; expected a URL, an ONNX file or a file of answers"
        )
    if path.suffix == ".onnx":
        return onnx_file(path, spec)
    if path.suffix in (".npz", ".safetensors"):
        return answers_file(path)
    raise BadInput(
        f"--against {against}: expected http://…, or a name that ends with .onnx, .npz or .safetensors"
    )


def shown(facts: Mapping[str, Any]) -> Group:
    """The engine, the table of the gate, and the worst row."""
    engine, worst = facts["engine"], facts["worst"]
    sizes = engine["asked"]["batch_sizes"]
    asked = (
        f"at batch sizes {', '.join(map(str, sizes))}"
        if sizes
        else "from a file, which tells nothing of batches"
    )
    lines = [f"{engine['kind']} {engine['where']}: {facts['samples']['judging']} judging samples {asked}"]
    if worst:
        lines.append(
            f"worst: row {worst['row']} of the samples, output '{worst['output']}', {number_text(worst['error_u'])}u"
        )
    return Group(render_terminal(facts), *map(Text, lines))
