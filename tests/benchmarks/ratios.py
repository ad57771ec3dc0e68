"""Serving by this checkout, by an older one and by PyTriton, in turns of one pass: requests per second, and ratios.

    python -m tests.benchmarks.ratios [--pytriton PYTHON] [--before CHECKOUT] [--model encoder] [--level LEVEL]

``--pytriton`` names an interpreter with ``nvidia-pytriton`` (0.7.0), which serves FP32. Each checkout converts the
model of `workloads.py` by itself (``--level O0`` is served in FP32), and is asked by 32 callers for ``--settle``
seconds, in which it corrects its choices. Then, in each of ``--rounds`` rounds, every server is asked by one caller and
by 32, for ``--seconds`` seconds each; the medians count. All are asked by ``halfeven bench``, with the same binary
requests. Run it on a calm machine; with the defaults it takes about seven minutes.

The last line on stdout is JSON: what each checkout chose, requests per second, the ratios to PyTriton, and those of
this checkout to the older one.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from halfeven.serve.bench.command import Plan, bench
from safetensors.numpy import save_file

from tests.benchmarks.server_process import convert_by, engine_of, free_port, is_ready, of_checkout, process
from tests.benchmarks.workloads import WORKLOADS, write_folder

ROOT = Path(__file__).resolve().parent.parent.parent
CALLERS = (1, 32)


@contextmanager
def ours(checkout: Path, folder: Path, where: Path) -> Iterator[int]:
    """The port of a checkout that serves what it converted."""
    where.mkdir()
    environment = of_checkout(checkout, where / "links")
    convert_by(environment, folder, where / "store", form="auto")
    serve = ["halfeven.serve.cli.main", "serve", "--device", "cpu", "--drain-seconds", "0"]
    with process([*serve, "--store", str(where / "store")], where, free_port(), environment) as port:
        wait_ready(port)
        yield port


@contextmanager
def pytriton(python: str, folder: Path, name: str) -> Iterator[int]:
    """The port of a PyTriton server; its stub finds the interpreter's own library."""
    library = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    port, script = free_port(), Path(__file__).with_name("pytriton_server.py")
    command = ["env", f"LD_LIBRARY_PATH={library}", python, str(script), str(folder), name, str(port)]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        wait_ready(port)
        yield port
    finally:
        running.terminate()
        running.wait(60)


def wait_ready(port: int) -> None:
    for _ in range(1200):
        if is_ready(port):
            return
        time.sleep(0.1)
    raise TimeoutError("a server did not become ready")


def asked(port: int, model: str, rows: Path, callers: int, seconds: float) -> float:
    """Requests per second, each with one row. A server that is ready may have a model that is not yet."""
    plan = Plan((callers,), seconds=seconds, warmup_s=0.5, data=rows)
    stage = bench(f"http://127.0.0.1:{port}", model, plan, lambda _: None)["stages"][0]
    assert set(stage["statuses"]) == {"200"}, stage["statuses"]
    return stage["per_second"]


def measured(ports: dict[str, int], model: str, rows: Path, given: argparse.Namespace) -> dict[str, Any]:
    for name in set(ports) - {"pytriton"}:
        asked(ports[name], model, rows, max(CALLERS), given.settle)
    rates: dict[str, dict[int, list[float]]] = {name: {callers: [] for callers in CALLERS} for name in ports}
    for turn in range(given.rounds):
        for name in sorted(ports, reverse=bool(turn % 2)):
            for callers in CALLERS:
                rates[name][callers].append(asked(ports[name], model, rows, callers, given.seconds))
                print(f"{name}, {callers} callers: {rates[name][callers][-1]:,.1f}/s", flush=True)
    found = {name: [statistics.median(each) for each in of.values()] for name, of in rates.items()}
    ratios = {
        f"{one} / {other}": [round(a / b, 3) for a, b in zip(found[one], found[other], strict=True)]
        for one, other in (("now", "pytriton"), ("before", "pytriton"), ("now", "before"))
        if one in found and other in found
    }
    chosen = {name: engine_of(port, model) for name, port in ports.items() if name != "pytriton"}
    return {
        "model": model,
        "callers": CALLERS,
        "chosen": chosen,
        "per second": found,
        **ratios,
        "rounds": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pytriton", help="an interpreter with nvidia-pytriton")
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--model", default="encoder", choices=list(WORKLOADS))
    parser.add_argument("--level", default="mixed_bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--settle", type=float, default=90.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as target, ExitStack() as running:
        where = Path(target)
        folder = write_folder(where, given.model, "auto", given.level)
        datatype, inner, _ = WORKLOADS[given.model]
        draw, shape = np.random.default_rng(7), [16, *json.loads(inner)[1:]]
        whole = datatype == "INT64"
        save_file(
            {"x": draw.integers(0, 30522, shape) if whole else draw.standard_normal(shape, np.float32)},
            where / "rows.safetensors",
        )
        checkouts = {"now": ROOT} | ({"before": given.before.resolve()} if given.before else {})
        ports = {
            name: running.enter_context(ours(one, folder, where / name)) for name, one in checkouts.items()
        }
        if given.pytriton:
            ports["pytriton"] = running.enter_context(pytriton(given.pytriton, folder, given.model))
        print(json.dumps(measured(ports, given.model, where / "rows.safetensors", given)))


if __name__ == "__main__":
    main()
