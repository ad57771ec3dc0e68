"""Half against whole on a CUDA device: throughput, latency and memory of the torch form, in one run.

    make gpu-prepare                         converts, on a CPU: python -m tests.benchmarks.gpu STORE --prepare
    make gpu PYTHON=python3 OUT=/tmp/out     measures:           python -m tests.benchmarks.gpu STORE --out FILE.json

Every model is converted first, where that was not done beforehand, and proven on the device; a half that is not equal
is not measured. Times are medians, of the engine's whole run (copies in and out included); memory is what torch
allocated at its peak.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from halfeven.exporters.convert import Options, convert
from halfeven.exporters.environment import environment
from halfeven.exporters.inputs.samples import load_samples
from halfeven.exporters.reprove import reprove
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.load import load_half, load_whole
from halfeven.models.engines.torch_engine import seconds_of
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.models.store import Store, Version

from tests.benchmarks.workloads import WORKLOADS, write_folder

BATCHES = (1, 8, 32)


def measured(engine: Engine, version: Version, rows: int) -> dict[str, float]:
    spec = version.spec()
    samples = load_samples(version.file("samples.safetensors"), spec)
    _, arrays = next(iter(samples.batches(rows, 1)))
    parts = [[arrays[tensor.name]] for tensor in spec.inputs]
    engine.warm_up(parts)
    torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(seconds_of(lambda: engine.run(parts), budget_s=1.0))
    return {
        "milliseconds": seconds * 1e3,
        "rows_per_second": rows / seconds,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
    }


def compare(version: Version, device: torch.device) -> dict[str, Any]:
    """One model: the gate on this device, then FP32 and FP16 at each batch size."""
    samples = load_samples(version.file("samples.safetensors"), version.spec())
    half = load_half(version, "torch", device)
    report = reprove(version, half, device, samples)
    found: dict[str, Any] = {"gate": report.summary(), "passed": report.passed}
    half.close()
    for label, load in (("fp32", load_whole), ("fp16", load_half)):
        engine = load(version, "torch", device)
        found[label] = {str(rows): measured(engine, version, rows) for rows in BATCHES}
        engine.close()
    found["speed_up"] = {
        str(rows): found["fp32"][str(rows)]["milliseconds"] / found["fp16"][str(rows)]["milliseconds"]
        for rows in BATCHES
    }
    return found


def converted(root: Path, model: str) -> Version:
    """The model's version in the store at ``root``, converted now where it has none. Needs no device."""
    store = Store(root)
    if (found := store.newest(model)) is not None:
        return found
    folder = write_folder(root / "folders", model, "torch", "O1")
    return convert(folder, store, Options(forms=("torch",)), print).version


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--prepare", action="store_true", help="only convert; needs no CUDA device")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    use_true_fp32()
    versions = {model: converted(asked.store, model) for model in WORKLOADS}
    if asked.prepare:
        return
    device = torch.device("cuda:0")
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(device),
        "models": {},
    }
    for model, version in versions.items():
        results["models"][model] = compare(version, device)
        print(model, json.dumps(results["models"][model], indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
