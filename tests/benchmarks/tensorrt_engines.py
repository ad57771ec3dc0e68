"""A check that TensorRT builds every proven ONNX half of zoo and corpus, with the types that the plan gave it.

    python -m tests.benchmarks.tensorrt_engines [--road zoo program file] [--only NAME ...] [--out FILE.json]

Each model is converted, exported for tensorrt, and built by TensorRT-RTX as a strongly typed network for the shapes on
the exported page. That needs no GPU; the package tensorrt-rtx is proprietary and is nobody's dependency. The exit code
is 1 where an engine is not built or a tensor has another type than in the file (but FP64, which TensorRT has not).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfeven.exporters.exported.build_commands import profile_of
from halfeven.exporters.exported.folder import export
from halfeven.exporters.inputs.samples import stored_samples
from halfeven.models.errors import HalfevenError
from halfeven.models.store.store import LIVE, Version

from tests.benchmarks.same_plans import converted, names_of

ROADS = ("zoo", "program", "file")
SECONDS = 300  # for one engine


@dataclass(frozen=True)
class Row:
    """One model. Of the ``nodes`` values of its file ``compared`` are tensors of the network too (by name), ``half`` of
    them in half; ``different``: those with another type. ``refused``: why there is no engine."""

    road: str
    model: str
    nodes: int = 0
    compared: int = 0
    half: int = 0
    strongly_typed: bool = False
    different: tuple[str, ...] = ()
    refused: str = ""

    @property
    def holds(self) -> bool:
        return self.strongly_typed and not self.refused and not self.different


def row_of(road: str, name: str) -> Row | None:
    """The row of a model; None where no ONNX half is proven."""
    with tempfile.TemporaryDirectory() as scratch:
        version = converted(road, name, Path(scratch))
        form = version.manifest["forms"].get("onnx", {"passed": False})
        if version.status != LIVE or version.manifest["half"] is None or not form["passed"]:
            return None
        folder = Path(scratch) / "exported"
        export(version, "tensorrt", folder)
        facts = built(folder)
    different = tuple(facts.get("different", ()))
    counts = {key: facts.get(key, 0) for key in ("nodes", "compared", "half", "strongly_typed")}
    return Row(road, name, **counts, different=different, refused=facts["refused"])


def built(folder: Path) -> dict[str, Any]:
    """The report of `tensorrt_build.py` about an exported folder."""
    version = Version.at(folder)
    shapes = {name: array.shape[1:] for name, array in stored_samples(version).arrays.items()}
    profile = folder.with_suffix(".json")
    profile.write_text(json.dumps(profile_of(version.spec(), shapes)))
    command = [sys.executable, "-m", "tests.benchmarks.tensorrt_build", str(folder), str(profile)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"refused": f"not built within {SECONDS} s"}
    if done.returncode:
        return {"refused": f"the library ended with {done.returncode}: {done.stderr[-400:]}"}
    facts = json.loads(done.stdout.splitlines()[-1])
    return facts | {"refused": facts["refused"] and f"{facts['refused']} {done.stderr[-400:]}"}


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| road | engines | of halves | nodes | compared | in half | of another type |",
        "|---|---|---|---|---|---|---|",
    ]
    for road in dict.fromkeys(row.road for row in rows):
        found = [row for row in rows if row.road == road]
        sums = (sum(getattr(row, key) for row in found) for key in ("nodes", "compared", "half"))
        numbers = (
            sum(not row.refused for row in found),
            len(found),
            *sums,
            sum(len(r.different) for r in found),
        )
        lines.append(f"| {road} | {' | '.join(map(str, numbers))} |")
    lines += [f"\n{row.road} {row.model}: {row.refused}" for row in rows if row.refused]
    lines += [f"\n{row.road} {row.model}: {', '.join(row.different)}" for row in rows if row.different]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tensorrt_engines")
    parser.add_argument("--road", nargs="+", default=["zoo", "program"], choices=ROADS)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, help="results.json")
    asked = parser.parse_args()
    rows: list[Row] = []
    for road in asked.road:
        for name in asked.only or names_of(road):
            try:
                row = row_of(road, name)
            except HalfevenError as error:
                print(f"{road} {name}: {error}", file=sys.stderr, flush=True)
                continue
            print(
                json.dumps(asdict(row)) if row else f"{road} {name}: no proven ONNX half",
                file=sys.stderr,
                flush=True,
            )
            rows += [row] if row else []
    print(table(rows))
    if asked.out:
        asked.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if rows and all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
