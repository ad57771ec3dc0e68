"""``halfeven demo``: convert, prove, serve, fine-tune and serve again, on real handwritten digits.

Convert in both forms, prove, serve, predict held-out samples, convert again under another policy and watch the swap
under live traffic, roll back; then fine-tune through the API on digits that version 1 cannot read, and convert the
result. Everything uses what users have: the function behind `halfeven convert`, a server process, HTTP.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from rich.text import Text

from ...exporters.conversion.convert import Conversion, Options, convert
from ...exporters.inputs.samples import TARGET, Samples, load_samples
from ...exporters.report.page import size_text
from ...models.engines.device_choice import resolve_device
from ...models.engines.load import load_original
from ...models.errors import NotReady
from ...models.files.tensor_file import save_tensors
from ...models.folder.package import read_folder
from ...models.store.store import Store, Version
from ...models.zoo import zoo_folder
from ...models.zoo.digits.train import read_images, split
from ..bench.callers import BenchTraffic, Caller, served_version
from ..finetune.client.job_command import fine_tune
from ..finetune.training.loop.setting_names import EMULATED
from ..versions.versions_in_store import store_at

INPUT, OUTPUT = "image", "logits"
NEW_ROWS, OLD_ROWS = 720, 360  # a third of old digits among the new ones, so that the old are not forgotten
SEED = 7
Notify = Callable[[str], None]
MODEL = "digits"
SWAP_SECONDS = 120.0  # a load measures forms: 2 s on idle cores, over 20 s beside five busy processes


def shifted(images: np.ndarray) -> np.ndarray:
    """Images turned by a quarter and with black and white exchanged: version 1 has never seen such digits."""
    return np.ascontiguousarray(1.0 - np.rot90(images, 1, (2, 3)))


def write_training_file(path: Path) -> Path:
    """Shifted digits and some as they were, none of them held out: the layout of ``samples.safetensors``."""
    images, labels = (tensor.numpy() for tensor in read_images())
    rows, _ = split(read_images()[1])
    rows = np.random.default_rng(SEED).permutation(rows.numpy())
    new, old = rows[:NEW_ROWS], rows[-OLD_ROWS:]
    tensors = {
        INPUT: np.concatenate([shifted(images[new]), images[old]]).astype(np.float32),
        TARGET + OUTPUT: np.concatenate([labels[new], labels[old]]).astype(np.int64),
    }
    save_tensors(path, tensors)
    return path


STEADY_SECONDS = 1.5
CONNECTIONS = 8
PAUSE_S = 0.01  # of callers beside work that would wait for them: a conversion, a training
BATCH = 40
TRAINING = {"n_epochs": 4, "batch_size": 32, "learning_rate": 3e-3, "precision": EMULATED}


def run_demo(store_path: Path | None, notify: Notify) -> tuple[dict[str, Any], Table]:
    """Run the demonstration; gives its facts and the table. The store and its reports are kept."""
    started = time.perf_counter()
    where = store_path or Path(tempfile.mkdtemp(prefix="halfeven-demo-"))
    store = store_at(where, "its versions")
    with tempfile.TemporaryDirectory(prefix="halfeven-demo-model-") as name:
        folder = own_folder(Path(name))
        samples = load_samples(folder / "samples.safetensors", read_folder(folder).spec)
        notify("1. converting the digits under level O1 (the lists of torch.autocast), in both forms")
        first = convert(folder, store, Options(), _indented(notify))
        with server(store, notify) as port:
            facts = _first_half(port, folder, store, samples, first, notify)
            facts |= _second_half(port, store, samples, Path(name), notify)
    facts["accuracy_fp32"] = _accuracy_of_original(first.version, samples)
    facts["passed"] = _passed(facts)
    facts["store"] = str(store.root)
    facts["seconds"] = round(time.perf_counter() - started, 1)
    return facts, _table(facts)


def _first_half(
    port: int, folder: Path, store: Store, samples: Samples, first: Conversion, notify: Notify
) -> dict[str, Any]:
    """Serve, predict, swap and roll back under traffic."""
    notify("2. serving what was proven, and predicting held-out digits over HTTP")
    accuracy, precision = _accuracy_over_http(port, samples)
    with BenchTraffic(port, MODEL, samples.arrays, CONNECTIONS) as steady:
        time.sleep(STEADY_SECONDS)
    notify("3. converting again under level O3 (everything in half), while requests come in")
    with BenchTraffic(port, MODEL, samples.arrays, 2, PAUSE_S) as traffic:
        second = convert(folder, store, Options(level="O3"), _indented(notify))
        await_version(port, second.version.number, notify)
        notify("4. rolling back, while requests come in")
        store.rollback(MODEL)
        await_version(port, first.version.number, notify)
    return {
        "versions": [
            _version_facts(first, "O1"),
            _version_facts(second, "O3"),
        ],
        "all_equal": first.asked_passed and second.asked_passed,
        "accuracy_fp16": accuracy,
        "precision": precision,
        "held_out": samples.count // BATCH * BATCH,
        "requests_per_second": round(steady.answered / steady.seconds),
        "swap": _traffic_facts(traffic),
    }


def _second_half(port: int, store: Store, samples: Samples, folder: Path, notify: Notify) -> dict[str, Any]:
    """Fine-tune on digits that version 1 cannot read, under traffic, and look at both kinds afterwards."""
    new = replace(samples, arrays={INPUT: shifted(samples.arrays[INPUT])})
    notify(
        "5. the same digits turned and inverted: version 1 cannot read them; fine-tuning it through the API"
    )
    before = {"new": _accuracy_over_http(port, new)[0], "old": _accuracy_over_http(port, samples)[0]}
    notify(f"   version 1 reads {before['new']:.1%} of them (and {before['old']:.1%} of the old ones)")
    file = write_training_file(folder / "shifted.safetensors")
    with BenchTraffic(port, MODEL, samples.arrays, 2, PAUSE_S) as traffic:
        job = fine_tune(
            f"http://127.0.0.1:{port}",
            MODEL,
            file,
            seed=SEED,
            hyperparameters=TRAINING,
            notify=_indented(notify),
        )
        if (job["promotion"] or {}).get("state") == "promoted":
            await_version(port, int(job["fine_tuned_model"].partition("@")[2]), notify)
    after = {"new": _accuracy_over_http(port, new)[0], "old": _accuracy_over_http(port, samples)[0]}
    return {"job": job, "before": before, "after": after, "learning_traffic": _traffic_facts(traffic)}


def _accuracy_over_http(port: int, samples: Samples) -> tuple[float, str]:
    """The share of right digits, and the precision that the server says it answered in."""
    caller = Caller(port, MODEL)
    right, precision = 0, ""
    for indices, arrays in samples.batches(BATCH, samples.count // BATCH):
        answer, headers = caller.infer(arrays)
        right += int((answer[OUTPUT].argmax(-1) == samples.targets[OUTPUT][list(indices)]).sum())
        precision = headers["halfeven-precision"]
    caller.close()
    return right / (samples.count // BATCH * BATCH), precision


def _accuracy_of_original(version: Version, samples: Samples) -> float:
    engine = load_original(version, "torch", resolve_device("cpu"))
    asked = samples.count // BATCH * BATCH
    (logits,) = engine.run([[samples.arrays[tensor.name][:asked]] for tensor in version.spec().inputs])
    return float((logits.argmax(-1) == samples.targets[OUTPUT][:asked]).mean())


def _version_facts(done: Conversion, level: str) -> dict[str, Any]:
    return dict(done.facts, report=str(done.version.folder / "report.html"), level=level)


def _traffic_facts(traffic: BenchTraffic) -> dict[str, Any]:
    return {
        "answered": traffic.answered,
        "failed": traffic.failed,
        "by_version": dict(traffic.by_version),
        "faults": traffic.faults,
    }


def _passed(facts: dict[str, Any]) -> bool:
    """True if the demonstration showed what it promises; else the command ends with exit code 1."""
    tolerance = facts["job"]["hyperparameters"]["forgetting_tolerance"]
    return (
        facts["all_equal"]
        and facts["precision"] == "fp16"
        and facts["accuracy_fp16"] == facts["accuracy_fp32"]
        and facts["swap"]["failed"] == facts["learning_traffic"]["failed"] == 0
        and (facts["job"]["promotion"] or {}).get("state") == "promoted"
        and facts["after"]["new"] >= 0.95
        and facts["after"]["old"] >= facts["before"]["old"] - tolerance
    )


def _table(facts: dict[str, Any]) -> Table:
    table = Table(title="halfeven demo: handwritten digits", caption=_caption(facts), caption_justify="left")
    for heading in (
        "version",
        "form",
        "verdict",
        "half nodes",
        "kept",
        "max error / limit",
        "half / original",
    ):
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
    before, after, job = facts["before"], facts["after"], facts["job"]
    learnt = job["fine_tuned_model"] or f"nothing ({job['error']})"
    lines = [
        f"accuracy on {facts['held_out']} held-out digits: FP32 {facts['accuracy_fp32']:.2%}, "
        f"FP16 over HTTP {facts['accuracy_fp16']:.2%}",
        f"swap and rollback: {_described(facts['swap'])}",
        f"fine-tuned to {learnt}: turned and inverted digits {before['new']:.1%} → {after['new']:.1%}, "
        f"digits as they were {before['old']:.1%} → {after['old']:.1%}",
        f"trained with {_trained(job)}",
        f"while it learnt and was swapped in: {_described(facts['learning_traffic'])}",
        f"{facts['requests_per_second']} requests per second from {CONNECTIONS} connections of one Python client",
        f"all of it in {facts['seconds']} s",
        "",
        *(
            f"open the report of version {v['version']} in a browser: {v['report']}"
            for v in facts["versions"]
        ),
        f"run next: {_program()} serve --store {facts['store']}",
        "then open http://127.0.0.1:8000",
    ]
    return Text("\n".join(lines), style="default")


def _trained(job: dict[str, Any]) -> str:
    """The words on how the model was trained: on a CPU FP16 is stored, and products are computed in FP32, as the tensor
    cores of a GPU do."""
    how = "FP16 storage and FP32 products"
    if (summary := job["summary"]) is None:
        return how
    return (
        f"{how}: the gradient scaler went from {summary['scale_min']:,.0f} to {summary['scale_max']:,.0f} and "
        f"skipped {summary['skipped']} of {summary['steps']} steps"
    )


def _program() -> str:
    """The command as this shell finds it, or where it is installed."""
    return "halfeven" if shutil.which("halfeven") else str(Path(sys.executable).with_name("halfeven"))


def _described(traffic: dict[str, Any]) -> str:
    versions = ", ".join(f"version {v}: {n}" for v, n in sorted(traffic["by_version"].items()))
    return f"{traffic['answered']} requests answered ({versions}), {traffic['failed']} failed"


def _indented(notify: Notify) -> Notify:
    return lambda sentence: notify(f"   {sentence}")


def own_folder(target: Path) -> Path:
    """The zoo's digits with a form asked for, so that the half serves: on a CPU ``auto`` would rightly prefer FP32.

    On a CPU that is the ONNX form: ONNX Runtime computes it about as fast as FP32, and torch's own FP16 convolutions
    take from 2 to 100 times as long, by processor.
    """
    form = "torch" if torch.cuda.is_available() else "onnx"
    folder = target / MODEL
    shutil.copytree(zoo_folder(MODEL), folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "samples.safetensors").chmod(0o644)
    manifest = folder / "model.toml"
    lines = [line for line in manifest.read_text().splitlines() if not line.startswith("form")]
    manifest.write_text(f'form = "{form}"\n' + "\n".join(lines) + "\n")
    return folder


@contextmanager
def server(store: Store, notify: Notify) -> Iterator[int]:
    """A server process of its own on a free port of this machine; stopped gracefully at the end."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "halfeven.serve.cli.main",
        "serve",
        "--store",
        str(store.root),
        "--port",
        "0",
    ]
    command += ["--drain-seconds", "0"]  # there is no load balancer to wait for
    log = store.root / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=store.root)
    try:
        port = await_port(process, log)
        await_version(port, None, notify)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def await_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("halfeven listens on http://"):
                return int(line.rpartition(":")[2])
        time.sleep(0.1)
    raise NotReady(f"the demo's server did not start; its log: {log.read_text(errors='replace')[-2000:]}")


def await_version(port: int, number: int | None, notify: Notify, model: str = MODEL) -> None:
    """Wait until the server answers with this version (any version, where None)."""
    began = time.monotonic()
    found = None
    while time.monotonic() < began + SWAP_SECONDS:
        found = served_version(port, model)
        if found is not None and number in (None, int(found)):
            notify(f"   version {found} is active ({time.monotonic() - began:.1f} s)")
            return
        time.sleep(0.05)
    raise NotReady(
        f"after {SWAP_SECONDS:g} s {f'version {found}' if found else 'no version'} of {model} is active, and "
        f"{f'version {number}' if number else 'any version'} was expected: try again when the machine has less to do"
    )
