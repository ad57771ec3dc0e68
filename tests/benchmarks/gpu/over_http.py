"""Rows a second over HTTP, at 1, 8 and 32 rows a request, beside what the same engine does in process."""

import time
import urllib.error
import urllib.request
from functools import partial

from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.inputs.samples import load_samples
from halfeven.models.engines.load import load_half
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.store.store import Store, Version
from halfeven.serve.bench.command import Plan, bench
from halfeven.serve.selftest.nets import answers_in_flight

from tests.benchmarks.gpu.phase import Phase
from tests.benchmarks.server_process import free_port, process
from tests.benchmarks.workloads import write_folder

CALLERS = 32
LARGEST = 32  # rows: max_batch_size of the workloads


def measure(phase: Phase) -> None:
    model = "tiny" if phase.tiny else "encoder"
    folder = write_folder(phase.scratch / "folders", model, "torch", "O1")
    began = time.monotonic()
    store = Store(phase.scratch / "store")
    version = convert(folder, store, Options(forms=("torch",))).version
    phase.facts.add("converted", model=model, took=time.monotonic() - began)
    phase.part("in process", partial(_in_process, phase, version))
    serve = ["halfeven.serve.cli.main", "serve", "--store", str(store.root), "--device", str(phase.device)]
    with process(serve, phase.scratch, free_port()) as port:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(phase, f"{url}/v2/models/{model}/ready")
        for rows in (8, 1, 32):
            phase.part("over HTTP", partial(_asked, phase, url, model, rows), rows=rows)


def _in_process(phase: Phase, version: Version) -> None:
    engine = load_half(version, "torch", phase.device)
    assert isinstance(engine, TorchEngine)
    samples = load_samples(version.file("samples.safetensors"), version.spec())
    _, arrays = next(iter(samples.batches(LARGEST, 1)))
    parts = [[arrays[tensor.name]] for tensor in version.spec().inputs]
    engine.warm_up(parts)
    if phase.cuda:
        engine.record(parts)
    count = 10 if phase.tiny else 200
    began = time.perf_counter()
    answers_in_flight(engine, [parts] * count)
    per_second = count * LARGEST / (time.perf_counter() - began)
    engine.close()
    phase.facts.add("in process", model=version.name, batch=LARGEST, rows_s=per_second)


def _wait_until_ready(phase: Phase, url: str) -> None:
    """Wait until the server is ready. Raises TimeoutError where it is not ready in this phase's time."""
    began = time.monotonic()
    while phase.left() > 5:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            phase.facts.add("server ready", took=time.monotonic() - began)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"{url} did not answer with 200")


def _asked(phase: Phase, url: str, model: str, rows: int) -> None:
    plan = Plan((CALLERS,), seconds=0.5 if phase.tiny else 2.0, warmup_s=0.5, rows=rows)
    stage = bench(url, model, plan, lambda _: None)["stages"][0]
    per_second = stage["per_second"] * rows
    phase.facts.add("over HTTP", model=model, rows=rows, callers=CALLERS, rows_s=per_second, stage=stage)
