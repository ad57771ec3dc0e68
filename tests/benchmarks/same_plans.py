"""A check that conversion is a function: every model converted twice, the second time beside busy processes.

    python -m tests.benchmarks.same_plans [--only NAME …] [--road ROAD …] [--busy 3] [--out FILE.json]

Roads: ``zoo`` (the shipped folders, both forms), ``program`` (the corpus as captured programs, both forms),
``file`` and ``file-O3`` (the corpus as ONNX files). Each pass is a process of its own, with a hash seed of its own.
``precision.json`` and ``parity.json`` of the two passes are compared byte for byte; the exit code is 1 where any
differs.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.forms import foreign_subject
from halfeven.exporters.proof.maker import Notify
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.errors import CannotConvert, HalfevenError
from halfeven.models.folder.package import ModelFolder, Precision
from halfeven.models.store.store import Store, Version
from halfeven.models.zoo import zoo_folder

from tests.corpus import CORPUS, captured, fresh

ROWS, SEED = 32, 1  # of the samples that a model of the corpus is converted with
COMPARED = ("precision.json", "parity.json")
ROADS = ("zoo", "program", "file", "file-O3")
BUSY = ("sh", "-c", "while :; do :; done")


def names_of(road: str) -> list[str]:
    if road != "zoo":
        return list(CORPUS)
    return sorted(toml.parent.name for toml in zoo_folder("").glob("*/model.toml"))


def converted(
    road: str, name: str, folder: Path, given: int = ROWS, notify: Notify = lambda _: None
) -> Version:
    """One model converted into a store in ``folder``, of the corpus on ``given`` samples."""
    store = Store(folder / "store")
    if road == "zoo":
        return convert(zoo_folder(name), store).version
    original = captured(name)
    spec = replace(original.spec, name="model")  # not every name of the corpus is one that a store takes
    samples = Samples({key: tensor.numpy() for key, tensor in fresh(name, given, SEED).items()})
    if road == "program":
        subject = Subject(
            original.program, spec, samples, Precision("O1"), Options().forms, folder, {}, search=True
        )
        return travel(subject, ProgramForms(subject), store, notify)
    return _from_file(road, folder, spec, samples, name, store)


def _from_file(road: str, folder: Path, spec: Any, samples: Samples, name: str, store: Store) -> Version:
    source, precision = folder / "original.onnx", Precision("O3" if road == "file-O3" else "O1")
    write_onnx(captured(name).program, captured(name).spec, source, {})
    asked = ModelFolder(folder, source.name, (), None, None, spec, precision)
    return travel(*foreign_subject(asked, samples, {}, True, lambda _: None), store, lambda _: None)


def one_pass(road: str, names: Sequence[str], out: Path) -> None:
    """Convert, and leave what is compared in ``out``, with the seconds of each model."""
    for name in names:
        start = time.perf_counter()
        kept = out / road / name.replace(" ", "-").replace("'", "").replace(",", "")
        kept.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                version = converted(road, name, Path(scratch))
                found = {file: version.file(file).read_bytes() for file in COMPARED}
                facts = version.manifest["forms"].values()
                outcome = [f"{f.get('half_nodes')}/{f.get('nodes')}" for f in facts] + [version.status]
            except CannotConvert as error:
                found, outcome = {"error": str(error).replace(scratch, "").encode()}, ["error"]
            except HalfevenError:
                found, outcome = {"error": traceback.format_exc().encode()}, ["error"]
        for file, text in found.items():
            (kept / file).write_bytes(text)
        line = {
            "road": road,
            "model": name,
            "seconds": round(time.perf_counter() - start, 1),
            "outcome": outcome,
        }
        print(json.dumps(line), flush=True)


def _passed(road: str, names: Sequence[str], out: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.benchmarks.same_plans", "--road", road, "--into", str(out)]
    done = subprocess.run([*command, "--only", *names], stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"road"')]


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """``count`` processes that never wait, until the block ends."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def differing(one: Path, other: Path) -> dict[str, list[str]]:
    """The models, by file, of which the two passes left different bytes, or of which only one pass left the file."""
    files = {path.relative_to(place) for place in (one, other) for path in place.rglob("*.json")}
    files |= {path.relative_to(place) for place in (one, other) for path in place.rglob("error")}
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        sides = [place / file for place in (one, other)]
        if not all(side.exists() for side in sides) or sides[0].read_bytes() != sides[1].read_bytes():
            found.setdefault(file.name, []).append(str(file.parent))
    return found


def _table(rows: Sequence[Mapping[str, Any]], found: Mapping[str, list[str]]) -> str:
    lines = ["| road | models | seconds calm | seconds beside load |", "| --- | --- | --- | --- |"]
    for road in dict.fromkeys(row["road"] for row in rows):
        of_road = [row for row in rows if row["road"] == road]
        calm, beside = (sum(row[key] for row in of_road) for key in ("calm", "beside"))
        lines.append(f"| {road} | {len(of_road)} | {calm:.0f} | {beside:.0f} |")
    lines += [f"\n{file}: {len(names)} differ: {', '.join(names)}" for file, names in found.items()]
    return "\n".join([*lines, "\nnothing differs" if not found else ""])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.same_plans")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models of the zoo or of the corpus")
    parser.add_argument("--road", nargs="+", default=list(ROADS), choices=ROADS)
    parser.add_argument("--busy", type=int, default=3, help="processes beside the second pass")
    parser.add_argument("--out", type=Path, help="results.json")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    wanted = {r: [n for n in names_of(r) if not asked.only or n in asked.only] for r in asked.road}
    if asked.into is not None:
        for road, names in wanted.items():
            one_pass(road, names, asked.into)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        calm, beside = Path(scratch) / "calm", Path(scratch) / "beside"
        rows: list[dict[str, Any]] = []
        for road, names in ((road, names) for road, names in wanted.items() if names):
            first = _passed(road, names, calm)
            with busy(asked.busy):
                second = _passed(road, names, beside)
            pairs = zip(first, second, strict=True)
            rows += [{**one, "calm": one["seconds"], "beside": two["seconds"]} for one, two in pairs]
            differ = sum(map(len, differing(calm / road, beside / road).values()))
            print(f"{road}: {len(first)} models, {differ} files differ", flush=True)
        found = differing(calm, beside)
    print(_table(rows, found))
    if asked.out:
        asked.out.write_text(json.dumps({"rows": rows, "differ": found}, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
