"""An exported half runs in ONNX Runtime with its default settings, as whoever gets the file runs it.

ONNX Runtime 1.31 ends the process (a segmentation fault) where its optimiser joins a half Transpose with the MatMul
that reads it. So no exported file has that pair, and each is run by default, in a process of its own, before it is
handed out.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ...models.errors import ExportFailed, ParityRefused
from ...models.order.one_order import one_order
from ...models.store.store import Version
from ..onnx.output_names import output_names
from ..onnx.reading.graph import ONNX, Names, attribute, graphs, names_in
from ..proof.prove import ReferenceRun, judged
from .file_rows import INPUTS, take_rows
from .onnx_pair import HALF

_CHILD = """
import sys
import numpy as np
import onnxruntime

half, inputs, answers, rows = *sys.argv[1:4], int(sys.argv[4])
onnxruntime.disable_telemetry_events()
session = onnxruntime.InferenceSession(half, providers=["CPUExecutionProvider"])
given = dict(np.load(inputs))
names = [output.name for output in session.get_outputs()]
found = []
for start in range(0, min(map(len, given.values())), rows or 1):
    part = slice(start, start + rows) if rows else start
    found.append(session.run(names, {name: array[part] for name, array in given.items()}))
join = np.concatenate if rows else np.stack
np.savez(answers, **{name: join([one[place] for one in found]) for place, name in enumerate(names)})
"""


def part_transposes(path: Path) -> int:
    """Put a Reshape that changes nothing between each half Transpose and the MatMul that reads it, and write the file
    where there is one; gives how many."""
    model = onnx.load(path, load_external_data=False)
    names, parted = Names(names_in(model.graph)), 0
    types = _types(model)
    for graph in graphs(model.graph):
        parted += _part(graph, model.graph, types, names)
    if parted:
        onnx.save(model, path)
    return parted


def check_by_default(version: Version, run: ReferenceRun, folder: Path) -> None:
    """Run the half in ``folder`` with default settings on the rows of its proof, and judge its answers.

    Raises ExportFailed where it does not run, ParityRefused where its answers are not equal, OrderEnded.
    """
    spec = version.spec()
    with TemporaryDirectory(prefix="halfeven-export-") as place:
        answers = Path(place) / "answers.npz"
        rows = str(spec.max_batch_size if spec.batched else 0)
        _in_a_child([str(folder / HALF), str(folder / INPUTS), str(answers), rows])
        with np.load(answers) as file:
            taken = take_rows(run, {name: file[own] for name, own in output_names(spec).items()})
    report = judged(run, version.manifest["half"], [taken])
    if not report.passed:
        raise ParityRefused(
            f"the half of {version} is not equal in ONNX Runtime {onnxruntime.__version__} with its default settings: "
            f"{report.summary()}; serve it with halfeven, or convert it again with more in FP32 (--keep)"
        )


def _in_a_child(words: list[str]) -> None:
    command = [sys.executable, "-P", "-c", _CHILD, *words]
    with one_order() as order:
        status, written = order.run(command, "the run of the export's samples by ONNX Runtime")
    if status:
        said = next(iter(written.strip().splitlines()[-1:]), "no reason given")
        why = f"it ends by signal {-status}" if status < 0 else said[:400]
        raise ExportFailed(
            f"ONNX Runtime {onnxruntime.__version__} does not run the half with its default settings: {why}; serve it "
            "with halfeven, which proves each file with the settings that it serves it with"
        )


def _types(model: ModelProto) -> dict[str, int]:
    values = (
        value for graph in graphs(model.graph) for value in (*graph.value_info, *graph.input, *graph.output)
    )
    return {value.name: value.type.tensor_type.elem_type for value in values}


def _part(graph: GraphProto, main: GraphProto, types: dict[str, int], names: Names) -> int:
    made = {
        node.output[0]: node for node in graph.node if node.op_type == "Transpose" and node.domain in ONNX
    }
    nodes, parted = list[NodeProto](), 0
    for node in graph.node:
        node = NodeProto.FromString(node.SerializeToString())
        for place, name in enumerate(node.input if node.op_type == "MatMul" else ()):
            order = attribute(made[name], "perm") if name in made else None
            if not isinstance(order, list) or types.get(name, TensorProto.FLOAT16) == TensorProto.FLOAT:
                continue
            places, same = names.fresh(f"{name}__places"), names.fresh(f"{name}__same")
            zeros = np.zeros(len(order), np.int64)
            main.initializer.append(numpy_helper.from_array(zeros, places))
            nodes.append(helper.make_node("Reshape", [name, places], [same], same))
            node.input[place] = same
            parted += 1
        nodes.append(node)
    if parted:
        del graph.node[:]
        graph.node.extend(nodes)
    return parted
