"""Every converter on the same ONNX files, held to the same gate.

    python -m tests.benchmarks.converters [--peers PYTHON] [--only NAME …] [--converter NAME …] [--out FILE]

The corpus is captured and written as FP32 ONNX once; other people's converters (in the interpreter
``--peers``, which may have packages that ours has not) and our own convert those files, each in a process of
its own, with the same calibration samples. ``--out results.json`` has every model's verdict, and the table
stands beside it in ``results.md``.
"""

import argparse
import contextlib
import json
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.on_device.environment import environment
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.errors import ExportFailed

from tests.benchmarks.converter_judge import CONVERSION, GOOD, IO, LOAD, MISSING, SILENT, WRONG
from tests.benchmarks.converter_peers import PEERS
from tests.corpus import CORPUS, captured, fresh

OURS = ("halfeven, file", "halfeven, file, O3", "halfeven, program", "halfeven, program, O3")
CALIBRATION_ROWS, CALIBRATION_SEED, BATCH = 32, 1, 8
HANGS_AFTER = 3000.0  # seconds without an answer; the workers' own limit is processor time
HERE = Path(__file__).resolve().parent
Row = dict[str, Any]  # one model by one converter: verdict, reason, seconds, size, …


@dataclass(slots=True)
class Worker:
    """A process that answers a line of JSON with a line of JSON; one that dies or hangs is started again."""

    command: Sequence[str]
    limit: float = HANGS_AFTER
    hello: Mapping[str, Any] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> Mapping[str, Any]:
        """The first line of the started process: a version, or the reason why there is none."""
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.hello = self._answer(HANGS_AFTER)
        return self.hello

    def ask(self, job: Mapping[str, Any]) -> Row:
        if self._process is None and "version" not in self.start():
            return {"error": f"cannot be started again: {self.hello}"}
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died since; the answer says so
            print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._answer(self.limit)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _answer(self, limit: float) -> Row:
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(limit) else None
        if line:
            return json.loads(line)
        status = None if line is None else self._process.wait()
        self.stop()
        if status == -signal.SIGXCPU:
            return {"error": "took longer than the processor time that one model has"}
        return {"error": f"hung: no answer in {limit:g} s" if line is None else f"died with status {status}"}


@dataclass(frozen=True, slots=True)
class File:
    """One model of the corpus as an ONNX file, with a folder of calibration batches."""

    name: str
    source: Path
    calibration: Path

    def job(self, target: Path) -> dict[str, str]:
        return {
            "name": self.name,
            "source": str(self.source),
            "target": str(target),
            "calibration": str(self.calibration),
        }


def write_files(names: Sequence[str], folder: Path) -> tuple[list[File], dict[str, str]]:
    """The files, and the models that cannot be written as FP32 ONNX with the reason."""
    files, left_out = [], {}
    for name in names:
        place = folder / name.replace(" ", "-").replace("'", "").replace(",", "")
        place.mkdir(parents=True, exist_ok=True)
        file = File(name, place / "original.onnx", place / "calibration")
        try:
            _write(file)
            files.append(file)
        except ExportFailed as error:
            left_out[name] = str(error)
    return files, left_out


def _write(file: File) -> None:
    original = captured(file.name)
    write_onnx(original.program, original.spec, file.source, {})
    file.calibration.mkdir(exist_ok=True)
    arrays = fresh(file.name, CALIBRATION_ROWS, CALIBRATION_SEED)
    samples = Samples({key: tensor.numpy() for key, tensor in arrays.items()})
    rows = min(BATCH, original.spec.max_batch_size) if original.spec.batched else 0
    for index, (_, batch) in enumerate(samples.batches(rows)):
        np.savez(file.calibration / f"{index:03}.npz", **batch)  # type: ignore[arg-type]


def converted(converter: str, worker: Worker, judge: Worker, files: Sequence[File]) -> Iterator[Row]:
    """One row a model."""
    hello = worker.start()
    if "version" not in hello:
        yield {"verdict": MISSING, "reason": str(hello)}
        files = ()
    for file in files:
        target = file.source.with_name(f"{converter.replace(', ', '-').replace(' ', '-')}.onnx")
        target.unlink(missing_ok=True)
        done = worker.ask(file.job(target))
        row = {"model": file.name, "seconds": done.get("seconds")} | _verdict(file, target, done, judge)
        yield json.loads(json.dumps(row).replace(f"{file.source.parent}/", ""))  # where it lay says nothing
    worker.stop()


def _verdict(file: File, target: Path, done: Row, judge: Worker) -> Row:
    if error := done.get("error"):
        return {"verdict": CONVERSION, "reason": error}
    found = judge.ask(file.job(target))
    if error := found.get("error"):
        died = error.startswith(("died", "hung"))
        return {"verdict": LOAD if died else "not judged", "reason": f"the judge: {error}"}
    return found


def workers(peers: str) -> dict[str, Worker]:
    script = str(HERE / "converter_peers.py")
    theirs = {name: Worker((peers, script, name)) for name in PEERS}
    module = (sys.executable, "-m", "tests.benchmarks.converter_ours")
    return theirs | {name: Worker((*module, name)) for name in OURS}


# The tables.


def summary(results: Mapping[str, Sequence[Row]], versions: Mapping[str, Any] | None = None) -> str:
    """Markdown: one row a converter."""
    heads = (
        "converter", "good", "silently wrong", "wrong", "✗conv", "✗load", "✗io", "checker objects",
        "FP32 of float nodes (good ones)", "casts (good ones)", "processor seconds (worst)", "version",
    )  # fmt: skip
    return _table(
        heads, [[*_line(name, rows), (versions or {}).get(name, "")] for name, rows in results.items()]
    )


def _line(name: str, rows: Sequence[Row]) -> list[str]:
    if rows[0]["verdict"] == MISSING:
        return [name, "not installed", *[""] * 9]
    good = [row["size"] for row in rows if row["verdict"] == GOOD]
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    counts = [_count(rows, verdict) for verdict in (SILENT, WRONG, CONVERSION, LOAD, IO)]
    floats, fp32, casts = (sum(size[key] for size in good) for key in ("floats", "fp32", "casts"))
    return [
        name,
        f"{len(good)}/{len(rows)}",
        *map(str, counts),
        str(sum(bool(row.get("checker")) for row in rows)),
        f"{fp32}/{floats}",
        str(casts),
        f"{sum(seconds):.1f} ({max(seconds, default=0):.1f})",
    ]


def _count(rows: Sequence[Row], verdict: str) -> int:
    return sum(row["verdict"] == verdict for row in rows)


def pairs(results: Mapping[str, Sequence[Row]], ours: Sequence[str] = OURS) -> str:
    """Markdown: theirs and ours on the models that both get right."""
    heads = ("theirs", "ours", "models good for both", "FP32 nodes: theirs, ours", "casts: theirs, ours")
    lines = []
    for peer in (name for name in results if name not in ours):
        for own in (name for name in ours if name in results):
            both = list(_both_good(results[peer], results[own]))
            sums = [
                f"{sum(one[key] for one, _ in both)}, {sum(other[key] for _, other in both)}"
                for key in ("fp32", "casts")
            ]
            lines.append([peer, own, str(len(both)), *sums])
    return _table(heads, lines)


def _both_good(one: Sequence[Row], other: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    sizes = {row["model"]: row["size"] for row in other if row["verdict"] == GOOD}
    for row in one:
        if row["verdict"] == GOOD and row["model"] in sizes:
            yield row["size"], sizes[row["model"]]


def by_model(results: Mapping[str, Sequence[Row]]) -> str:
    """Markdown: the verdicts, with k FP32 nodes and c casts where the answers are right."""
    names = {name: rows for name, rows in results.items() if rows[0]["verdict"] != MISSING}
    models = [row["model"] for row in next(iter(names.values()), [])]
    cells = {name: {row["model"]: _cell(row) for row in rows} for name, rows in names.items()}
    return _table(("model", *names), [[model, *(cells[name][model] for name in names)] for model in models])


def _cell(row: Row) -> str:
    if row["verdict"] in (GOOD, SILENT, WRONG):
        return f"{row['verdict']} k{row['size']['fp32']} c{row['size']['casts']}"
    return f"✗{row['verdict']}"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.converters")
    parser.add_argument(
        "--peers", default=sys.executable, help="the interpreter that has the other converters"
    )
    parser.add_argument("--only", nargs="+", default=list(CORPUS), choices=list(CORPUS), metavar="NAME")
    parser.add_argument(
        "--converter", nargs="+", default=[*PEERS, *OURS], choices=[*PEERS, *OURS], metavar="NAME"
    )
    parser.add_argument("--out", type=Path, help="results.json; the tables go to results.md beside it")
    parser.add_argument(
        "--join", nargs="+", type=Path, help="print the tables of these results of one commit"
    )
    parser.add_argument("--files", type=Path, help="keep the ONNX files in this folder")
    asked = parser.parse_args()
    if asked.join:
        parts = [json.loads(path.read_text()) for path in asked.join]
        joined = {key: {k: v for part in parts for k, v in part[key].items()} for key in parts[0]}
        print(_text(joined["results"], joined["left out"], joined["about"]))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        files, left_out = write_files(asked.only, asked.files or Path(scratch))
        judge = Worker((sys.executable, "-m", "tests.benchmarks.converter_judge"))
        results, about, text = dict[str, list[Row]](), dict[str, Any](), ""
        for name, worker in ((name, workers(asked.peers)[name]) for name in asked.converter):
            results[name] = list(converted(name, worker, judge, files))
            about[name] = str(worker.hello.get("version", "not installed"))
            text = _text(results, left_out, environment(torch.device("cpu")) | about)
            if asked.out:  # after each converter: a run of an hour may be ended
                asked.out.write_text(
                    json.dumps({"about": about, "left out": left_out, "results": results}, indent=1)
                )
                asked.out.with_suffix(".md").write_text(text)
        judge.stop()
    print(text)


def _text(results: Mapping[str, Sequence[Row]], left_out: Mapping[str, str], about: Mapping[str, Any]) -> str:
    out = "".join(f"\n- {name}: {reason}" for name, reason in left_out.items()) or " none"
    versions = "".join(f"\n- {key}: {value}" for key, value in about.items())
    parts = (
        summary(results, about),
        pairs(results),
        by_model(results),
        f"Not exported:{out}",
        f"Environment:{versions}",
    )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
