"""ONNX Runtime's real CUDA provider on stub libraries: where nodes are placed, in which stream, what waits."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from halfeven.exporters.torch.autocast.bit_equality import half_by_rules
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.engines.switched_off import ONNX_HALF
from halfeven.models.errors import CannotConvert
from onnx import TensorProto, helper

from tests.corpus import CORPUS, captured
from tests.slow import drawn
from tests.stub_cuda import LACKING, can_compile, run_on_stubs, stub_libraries

pytestmark = pytest.mark.skipif(not can_compile(), reason=LACKING)
STREAM = 0x1230
# The engine as it is; torch's side is the host's memory, which the stubs take for the device's.
ENGINE = """
import json, sys
from types import SimpleNamespace
import numpy as np, torch
from halfeven.models.engines import onnx_engine, onnx_on_cuda
class Streams:
    computing = 0x1230
    def enqueue(self, name, work, after=None):
        work()
        return SimpleNamespace(synchronize=lambda: None)
    def on_host(self, shape, dtype): return torch.empty(tuple(shape), dtype=dtype)
    def on_device(self, nbytes): return torch.empty(nbytes, dtype=torch.uint8)
def as_tensor(holder, device):
    import ctypes
    facts = holder.__cuda_array_interface__
    memory = (ctypes.c_char * facts["shape"][0]).from_address(facts["data"][0])
    return torch.frombuffer(memory, dtype=torch.uint8)
onnx_on_cuda.cuda_streams = lambda device: Streams()
torch.cuda.is_available = lambda: True
torch.cuda.mem_get_info = lambda device: (1 << 32, 1 << 32)
torch.as_tensor = as_tensor
device = torch.device("cuda:0")
"""
PLACED = """
found = {}
for path in sys.argv[1:]:
    placement = onnx_engine.OnnxEngine(onnx_engine.Path(path), "fp16", device).placement
    found[path] = [placement.nodes.get("CUDAExecutionProvider", 0), placement.on_cpu, placement.half_on_cpu]
print(json.dumps(found))
"""
SELFTEST = """
import shutil
from halfeven.serve.selftest import check_fast_forms
check_fast_forms.write_onnx = lambda program, spec, path, _: shutil.copy(sys.argv[1], path)
net = SimpleNamespace(name="cubic", loops=False, spec=None, half=lambda device: None)
outcome = check_fast_forms.onnx_placement(device, [net])
print(json.dumps([outcome.status, outcome.evidence, outcome.off]))
"""
RUN = """
engine = onnx_engine.OnnxEngine(onnx_engine.Path(sys.argv[1]), "fp16", device)
print("[stub] begin", file=sys.stderr, flush=True)
for rows in (2, 3):
    answers = engine.run([[np.ones((rows, 8), np.float32)]])
    print([list(answer.shape) for answer in answers])
print("[stub] end", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_libraries(tmp_path_factory.mktemp("stubs"))


def file(
    path: Path, nodes: list[onnx.NodeProto], inputs: dict[str, list[int | str]], outputs: dict[str, int]
) -> Path:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def node(operator: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output], name=output, **attributes)


@pytest.mark.slow
def test_a_half_that_the_device_has_no_kernel_for_is_named_by_the_selftest_too_and_sizes_are_not(
    libraries: Path, tmp_path: Path
) -> None:
    cubic = file(
        tmp_path / "cubic.onnx",
        [
            node("Cast", ["image"], "image16", to=TensorProto.FLOAT16),
            node("Relu", ["image16"], "positive"),
            node("Cast", ["grid"], "grid16", to=TensorProto.FLOAT16),
            node("GridSample", ["positive", "grid16"], "warped", mode="cubic"),
            node("Cast", ["warped"], "y", to=TensorProto.FLOAT),
            node("Shape", ["image"], "sizes"),
            node("ReduceProd", ["sizes"], "count", keepdims=0),
        ],
        {"image": ["n", 3, 5, 5], "grid": ["n", 4, 4, 2]},
        {"y": TensorProto.FLOAT, "count": TensorProto.INT64},
    )
    printed, _ = run_on_stubs(libraries, ENGINE + PLACED + SELFTEST, str(cubic))
    placed, (status, evidence, off) = map(json.loads, printed.splitlines())
    ((on_cuda, on_cpu, halves),) = placed.values()
    assert on_cuda >= 3 and on_cpu == halves == ["GridSample 'warped'"]
    assert (status, off) == ("failed", [ONNX_HALF]) and "GridSample 'warped' with half tensors" in evidence


@pytest.mark.slow
def test_a_run_is_in_our_stream_alone_and_the_host_waits_for_nothing(libraries: Path, tmp_path: Path) -> None:
    net = file(
        tmp_path / "net.onnx",
        [
            node("Mul", ["x", "x"], "square"),
            node("Softplus", ["square"], "y"),
            node("ArgMax", ["square"], "best"),
        ],
        {"x": ["n", 8]},
        {"y": TensorProto.FLOAT, "best": TensorProto.INT64},
    )
    printed, notes = run_on_stubs(libraries, ENGINE + RUN, str(net))
    assert printed.splitlines() == ["[[2, 8], [1, 8]]", "[[3, 8], [1, 8]]"]
    notes = notes[notes.index("begin") + 1 : notes.index("end")]
    assert any(note.startswith("launches") for note in notes)
    assert {note.rpartition(" ")[2] for note in notes} == {hex(STREAM)}, "work in another stream"
    assert not [note for note in notes if "waits" in note or " in " in note or " out " in note]


def written(name: str, folder: Path) -> Path | None:
    """The model's half as ONNX by the level's rules; None where it has no ONNX form."""
    model = captured(name)
    path = folder / f"{name}.onnx"
    try:
        half = half_by_rules(model.program, model.spec, model.example)
        write_onnx(half.program, model.spec, path, {})
    except (CannotConvert, RuntimeError):
        return None
    return path


@pytest.mark.slow
def test_the_halves_of_corpus_and_zoo_compute_no_half_on_the_cpu(libraries: Path, tmp_path: Path) -> None:
    names = ("zoo mlp", "lstm", *drawn(16, tuple(CORPUS)))
    files = [path for name in names if (path := written(name, tmp_path)) is not None]
    printed, _ = run_on_stubs(libraries, ENGINE + PLACED, *map(str, files))
    found = json.loads(printed)
    halves = {Path(path).stem: on_cpu for path, (_, _, on_cpu) in found.items() if on_cpu}
    print(sum(on_cuda for on_cuda, _, _ in found.values()), "nodes of", len(found), "files on CUDA")
    assert halves == {}
