"""Converts nets of 100 to 300 nodes (`tests/wild.py`, `trained_wild.py`), as captured programs and as ONNX files.

    python -m tests.benchmarks.wild [--only NAME …] [--road program file nms] [--level O1] [--out FILE.json]

The road *nms* is a finder's file with a NonMaxSuppression at its end, whose choice is the only output.
Prints a row for each conversion: nodes, those in half, those that would be if nothing were kept, their ratio (the
share that counts: nodes that only follow a kept one are FP32 too), kept by the search, evaluations, operations (in
units of 2**34, about a second of one core), seconds, outcome of the search, verdict; of 256 new inputs the number
whose error is above the limit, and the largest error.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.conversion import written
from halfeven.exporters.onnx.forms import FileForms, foreign_subject
from halfeven.exporters.policy.operations import Meter
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.errors import CannotConvert
from halfeven.models.folder.package import ModelFolder, Precision
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import Store, Version
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from tests.benchmarks.fresh_inputs import ROWS as FRESH
from tests.benchmarks.fresh_inputs import SEED as FRESH_SEED
from tests.benchmarks.fresh_inputs import wrong_inputs
from tests.benchmarks.trained_wild import TRAINED
from tests.corpus.case import Case
from tests.programs import Original, original
from tests.wild import WILD

ROWS, SEED, SECOND = 32, 1, 1 << 34
ROADS = ("program", "file", "nms")
NETS = WILD | TRAINED
FINDERS = ("finder", "trained-finder")


def fresh(case: Case, rows: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return case.inputs(rows)


def drawn(name: str, road: str, rows: int, seed: int) -> Samples:
    """Samples; on the road *nms*, which takes one at a time, each with an axis of 1 for its batch."""
    arrays = {key: tensor.numpy() for key, tensor in fresh(NETS[name], rows, seed).items()}
    return Samples({key: array[:, None] if road == "nms" else array for key, array in arrays.items()})


def captured(name: str) -> Original:
    case = NETS[name]
    torch.manual_seed(0)
    found = original(case.build(), fresh(case, 8, 0), case.free, case.max_batch_size)
    kinds = zip(found.spec.outputs, case.kinds or ("tensor",) * len(found.spec.outputs), strict=True)
    return replace(
        found,
        spec=replace(
            found.spec, name=name, outputs=tuple(replace(output, kind=kind) for output, kind in kinds)
        ),
    )


def converted(made: Original, road: str, level: str, folder: Path) -> tuple[Version, Any]:
    """The version, and its maker."""
    store = Store(folder / "store")
    samples = drawn(made.spec.name, road, ROWS, SEED)

    def notify(line: str) -> None:
        print(f"  {line}", flush=True)

    if road == "program":
        subject = Subject(
            made.program, made.spec, samples, Precision(level), ("torch",), folder, {}, search=True
        )
        maker = ProgramForms(subject)
        return travel(subject, maker, store, notify), maker
    write_onnx(made.program, made.spec, folder / "original.onnx", {})
    spec = with_choice(made.spec, folder / "original.onnx") if road == "nms" else made.spec
    asked = ModelFolder(folder, "original.onnx", (), None, None, spec, Precision(level))
    subject, other = foreign_subject(asked, samples, {}, True, notify)
    return travel(subject, other, store, notify), other


def with_choice(spec: ModelSpec, path: Path) -> ModelSpec:
    """Add a NonMaxSuppression to the file: up to 10 boxes of each kind with a score above 0.5. Gives the spec for one
    picture and the choice."""
    model = onnx.load(path)
    boxes, scores = (output.name for output in spec.outputs)
    for name, value in {
        "most": np.array([10]),
        "overlap": np.array([0.5], np.float32),
        "least": np.array([0.5], np.float32),
    }.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    read = [boxes, scores, "most", "overlap", "least"]
    model.graph.node.append(helper.make_node("NonMaxSuppression", read, ["chosen"], name="nms"))
    model.graph.output.append(helper.make_tensor_value_info("chosen", TensorProto.INT64, ["n", 3]))
    onnx.save(model, path)
    one = tuple(replace(tensor, shape=(Dim(1, 1), *tensor.shape[1:])) for tensor in spec.inputs)
    chosen = TensorSpec("chosen", "INT64", (Dim(), Dim(3, 3)))
    return replace(spec, inputs=one, outputs=(chosen,), max_batch_size=0)


def row_of(name: str, road: str, level: str) -> dict[str, Any]:
    spent, add = [0], Meter.on

    def counted(self: Meter, answers: Any) -> Any:
        answer = add(self, answers)

        def run(inputs: Any) -> Any:
            before = self.spent()
            try:
                return answer(inputs)
            finally:
                spent[0] += self.spent() - before

        return run

    made = captured(name)  # some are trained first
    Meter.on = counted  # type: ignore[method-assign]
    began = time.perf_counter()
    found: dict[str, Any] = {"net": name, "road": road, "level": level}
    try:
        with TemporaryDirectory() as scratch:
            version, maker = converted(made, road, level, Path(scratch))
            found |= _facts(version, maker) | {"seconds": round(time.perf_counter() - began)}
            found |= _unseen(name, road, version)
    except CannotConvert as error:
        found |= {"verdict": str(error), "seconds": round(time.perf_counter() - began)}
    finally:
        Meter.on = add  # type: ignore[method-assign]
    return found | {"operations": round(spent[0] / SECOND, 1)}


def _unseen(name: str, road: str, version: Version) -> dict[str, Any]:
    """The number of `FRESH` new inputs that the half answers with an error above the limit, and the largest error;
    empty where the version serves FP32."""
    if version.manifest["half"] is None:
        return {}
    ((form, report),) = version.json("parity.json")["forms"].items()
    wrong, worst = wrong_inputs(version, form, report, drawn(name, road, FRESH, FRESH_SEED))
    return {"fresh_wrong": wrong, "fresh_error_u": round(worst, 2)}


def _facts(version: Version, maker: Any) -> dict[str, Any]:
    (facts,) = version.manifest["forms"].values()
    search: Mapping[str, Any] = version.json("parity.json").get("search") or {}
    most = half_at_most(maker)
    return {
        "nodes": facts["nodes"],
        "half_nodes": facts["half_nodes"],
        "half_at_most": most,
        "share": round(facts["half_nodes"] / max(most, 1), 2),
        "kept": len(maker.planner.plan.searched),
        "evaluations": search.get("evaluations"),
        "search": facts["search"],
        "error_u": facts["max_error_u"],
        "verdict": version.status
        + ("" if version.status == "live" else f": {version.manifest['reason'][:300]}"),
    }


def half_at_most(maker: ProgramForms | FileForms) -> int:
    """Nodes in half where nothing is kept by a search."""
    assert maker.planner is not None
    if isinstance(maker, ProgramForms):
        return maker.planner.graph.settled(()).written(maker.subject.exported).half_nodes
    return written(maker.program, maker.planner.graph.settled(()), maker.info).half_nodes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.wild")
    parser.add_argument("--only", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--road", nargs="+", default=list(ROADS), choices=ROADS)
    parser.add_argument("--level", nargs="+", default=["O1"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, road, level in ((n, r, one) for n in asked.only for r in asked.road for one in asked.level):
        if road == "nms" and name not in FINDERS:
            continue
        rows.append(row_of(name, road, level))
        print(json.dumps(rows[-1]), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
