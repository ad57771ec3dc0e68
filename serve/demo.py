"""``halfeven demo``: the whole story on real handwritten digits, told while it happens.

Convert in both forms, prove, serve, predict what the model has never seen, convert again under another
policy and watch the swap under live traffic, roll back. Everything goes through the same doors that users
have: the road of `exporters.convert`, a server process, HTTP.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..exporters.convert import Conversion, Options, convert
from ..exporters.report import size_text
from ..exporters.samples import Samples, load_samples
from ..models.engines.load import load_whole
from ..models.engines.placement import resolve_device
from ..models.errors import NotReady
from ..models.package import read_folder
from ..models.store import Store, Version
from ..models.zoo import zoo_folder
from .traffic import Caller, Traffic, served_version

Say = Callable[[str], None]
MODEL, OUTPUT = "digits", "logits"
SWAP_SECONDS = 20.0
STEADY_SECONDS = 1.5
CONNECTIONS = 8


def tell(store_path: Path | None, say: Say) -> tuple[dict[str, Any], Table]:
    """Run the story; give its facts and the one table. The store and its reports stay where they are."""
    started = time.perf_counter()
    where = store_path or Path(tempfile.mkdtemp(prefix="halfeven-demo-"))
    store = Store(where.resolve())
    with tempfile.TemporaryDirectory(prefix="halfeven-demo-model-") as name:
        folder = _folder(Path(name))
        samples = load_samples(folder / "samples.safetensors", read_folder(folder).spec)
        say("1. converting the digits under level O1 (the lists of torch.autocast), in both forms")
        first = convert(folder, store, Options(), _indented(say))
        say("2. serving what was proven, and predicting held-out digits over HTTP")
        with _server(store, say) as port:
            accuracy = _accuracy_over_http(port, samples)
            steady = _steady(port, samples)
            say("3. converting again under level O3 (everything in half), while requests come in")
            with Traffic(port, MODEL, samples.arrays, CONNECTIONS) as traffic:
                second = convert(folder, store, Options(level="O3"), _indented(say))
                _await_version(port, second.version.number, say)
                say("4. rolling back, while requests come in")
                store.rollback(MODEL)
                _await_version(port, first.version.number, say)
    facts = _facts(
        store, first, second, accuracy, _accuracy_of_whole(first.version, samples), steady, traffic
    )
    facts["seconds"] = round(time.perf_counter() - started, 1)
    return facts, _table(facts)


def _folder(target: Path) -> Path:
    """The zoo's digits, asking for the torch half on duty: on a CPU ``auto`` would rightly prefer FP32."""
    folder = target / MODEL
    shutil.copytree(zoo_folder(MODEL), folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "samples.safetensors").chmod(0o644)
    manifest = folder / "model.toml"
    lines = [line for line in manifest.read_text().splitlines() if not line.startswith("form")]
    manifest.write_text('form = "torch"\n' + "\n".join(lines) + "\n")
    return folder


@contextmanager
def _server(store: Store, say: Say) -> Iterator[int]:
    """A server process of its own on a free port of this machine; stopped gracefully at the end."""
    command = [sys.executable, "-m", "halfeven.serve.cli", "serve", "--store", str(store.root), "--port", "0"]
    log = store.root / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=store.root, env={**os.environ})
    try:
        port = _await_port(process, log)
        _await_version(port, None, say)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("halfeven listens on http://"):
                return int(line.rpartition(":")[2])
        time.sleep(0.1)
    raise NotReady(f"the demo's server did not start; its log: {log.read_text(errors='replace')[-2000:]}")


def _await_version(port: int, number: int | None, say: Say) -> None:
    """Until the server answers with this version (any, where None)."""
    began = time.monotonic()
    found = None
    while time.monotonic() < began + SWAP_SECONDS:
        found = served_version(port, MODEL)
        if found is not None and number in (None, int(found)):
            say(f"   version {found} is on duty ({time.monotonic() - began:.1f} s)")
            return
        time.sleep(0.05)
    raise NotReady(f"version {number or '(any)'} of {MODEL} did not come on duty: the server says {found}")


def _accuracy_over_http(port: int, samples: Samples) -> dict[str, Any]:
    caller = Caller(port, MODEL)
    right = 0
    precision = ""
    for indices, arrays in samples.batches(40, samples.count // 40):
        answer, headers = caller.infer(arrays)
        right += int((answer[OUTPUT].argmax(-1) == samples.targets[OUTPUT][list(indices)]).sum())
        precision = headers["halfeven-precision"]
    asked = samples.count // 40 * 40
    return {"accuracy": right / asked, "samples": asked, "precision": precision}


def _accuracy_of_whole(version: Version, samples: Samples) -> float:
    engine = load_whole(version, "torch", resolve_device("cpu"))
    asked = samples.count // 40 * 40
    spec = version.spec()
    (logits,) = engine.run([[samples.arrays[tensor.name][:asked]] for tensor in spec.inputs])
    return float((logits.argmax(-1) == samples.targets[OUTPUT][:asked]).mean())


def _steady(port: int, samples: Samples) -> dict[str, Any]:
    with Traffic(port, MODEL, samples.arrays, CONNECTIONS) as traffic:
        time.sleep(STEADY_SECONDS)
    return {"answered": traffic.answered, "per_second": round(traffic.answered / traffic.seconds)}


def _facts(
    store: Store,
    first: Conversion,
    second: Conversion,
    half: dict[str, Any],
    accuracy_whole: float,
    steady: dict[str, Any],
    traffic: Traffic,
) -> dict[str, Any]:
    versions = [
        dict(done.facts, report=str(done.version.folder / "report.html"), level=level)
        for done, level in ((first, "O1"), (second, "O3"))
    ]
    passed = (
        traffic.failed == 0
        and half["accuracy"] == accuracy_whole
        and half["precision"] == "fp16"
        and first.asked_passed
        and second.asked_passed
    )
    return {
        "passed": passed,
        "store": str(store.root),
        "versions": versions,
        "accuracy_fp32": accuracy_whole,
        "accuracy_fp16": half["accuracy"],
        "held_out": half["samples"],
        "requests_per_second": steady["per_second"],
        "connections": CONNECTIONS,
        "swap": {"answered": traffic.answered, "failed": traffic.failed, "by_version": traffic.by_version},
        "faults": traffic.faults,
    }


def _table(facts: dict[str, Any]) -> Table:
    table = Table(title="halfeven demo: handwritten digits", caption=_caption(facts), caption_justify="left")
    for heading in ("version", "form", "verdict", "half nodes", "kept", "max error / limit", "half / whole"):
        table.add_column(heading)
    for version in facts["versions"]:
        for form, found in version["forms"].items():
            error = found["max_error_u"]
            table.add_row(
                f"{version['version']} ({version['level']})",
                form,
                "equal" if found["passed"] else "refused",
                f"{found['half_nodes']} of {found['nodes']}",
                str(len(found["kept"])),
                f"{error:.2f}u / 4u" if error is not None else "-",
                f"{size_text(found['bytes'])} / {size_text(found['bytes_fp32'])}",
            )
    return table


def _caption(facts: dict[str, Any]) -> Text:
    swap = facts["swap"]
    by_version = ", ".join(f"version {v}: {n}" for v, n in sorted(swap["by_version"].items()))
    lines = [
        f"accuracy on {facts['held_out']} held-out digits: FP32 {facts['accuracy_fp32']:.2%}, "
        f"FP16 over HTTP {facts['accuracy_fp16']:.2%}",
        f"during swap and rollback: {swap['answered']} requests answered ({by_version}), {swap['failed']} failed",
        f"{facts['requests_per_second']} requests per second from {facts['connections']} connections of one "
        "Python client on this machine",
        *(f"report of version {v['version']}: {v['report']}" for v in facts["versions"]),
        f"all of it in {facts['seconds']} s",
    ]
    return Text("\n".join(lines), style="default")


def _indented(say: Say) -> Say:
    return lambda sentence: say(f"   {sentence}")
