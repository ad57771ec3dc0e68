"""ONNX Runtime's engine on a device that is late on purpose: its inputs and outputs are bound where they are."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.models.engines.onnx_engine import OnnxEngine
from halfeven.models.engines.wire_widening import widened
from halfeven.models.spec.datatypes import Wire
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from onnx import TensorProto, helper, numpy_helper

from tests.models.engines.simulated_onnx import placed
from tests.models.engines.simulated_runs import PACES, SEEDS, WIDTH, differs, rows, trial
from tests.simulated_gpu import SimulatedGpu
from tests.simulated_gpu.onnx_session import Session, onnx_runtime_on

CPU = torch.device("cpu")


def node(operator: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output], name=output, **attributes)


def write_net(path: Path) -> Path:
    """Two products with a half between them, the index of the largest, and a reshape by computed sizes."""
    draw = np.random.default_rng()
    weights = [draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) for _ in range(2)]
    nodes = [
        node("MatMul", ["x", "w0"], "first"),
        node("Relu", ["first"], "positive"),
        node("Cast", ["positive"], "narrow", to=TensorProto.FLOAT16),
        node("Cast", ["narrow"], "wide", to=TensorProto.FLOAT),
        node("MatMul", ["wide", "w1"], "second"),
        node("Shape", ["x"], "sizes"),
        node("Identity", ["sizes"], "same_sizes"),
        node("Reshape", ["second", "same_sizes"], "y"),
        node("ArgMax", ["y"], "best", axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH]),
            helper.make_tensor_value_info("best", TensorProto.INT64, ["n"]),
        ],
        [numpy_helper.from_array(weight, f"w{index}") for index, weight in enumerate(weights)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_net(tmp_path_factory.mktemp("onnx") / "net.onnx")


@pytest.fixture(params=SEEDS)
def gpu(request: pytest.FixtureRequest) -> Iterator[SimulatedGpu]:
    with SimulatedGpu(random.Random(request.param), PACES[request.param % 3]) as gpu, onnx_runtime_on(gpu):
        yield gpu


def engine(file: Path, gpu: SimulatedGpu) -> OnnxEngine:
    return OnnxEngine(file, "fp16", gpu.device)


def test_two_batches_are_in_flight_their_answers_are_right_and_the_host_waits_for_nothing_else(
    file: Path, gpu: SimulatedGpu
) -> None:
    here, there = OnnxEngine(file, "fp16", CPU), engine(file, gpu)
    assert (here.in_flight, there.in_flight) == (1, 2)
    chance = random.Random(0)
    batches = [rows(*[chance.randint(1, 4) for _ in range(chance.randint(1, 3))]) for _ in range(8)]
    assert trial(gpu, there, here, batches) == []


def test_after_the_warm_up_nothing_takes_new_memory(file: Path) -> None:
    with SimulatedGpu(random.Random(0)) as gpu, onnx_runtime_on(gpu):
        there = engine(file, gpu)
        there.warm_up(rows(4))
        before = gpu.memory.fresh
        there.warm_up(rows(2, 2))
        assert gpu.memory.fresh == before


def test_the_session_leaves_room_for_a_second_version_and_searches_no_algorithm_on_a_requests_time(
    file: Path,
) -> None:
    with SimulatedGpu(random.Random(0), capacity=1 << 30) as gpu, onnx_runtime_on(gpu):
        session = engine(file, gpu)._session
        assert isinstance(session, Session)
        settings = session.settings
    assert int(settings["gpu_mem_limit"]) * 2 <= 1 << 30
    assert settings["arena_extend_strategy"] == "kSameAsRequested"
    assert settings["cudnn_conv_algo_search"] != "EXHAUSTIVE" and settings["use_tf32"] == "0"


def test_a_smaller_wire_datatype_is_widened_on_the_device(file: Path, gpu: SimulatedGpu) -> None:
    x = TensorSpec("x", "FP32", (Dim(), Dim(WIDTH, WIDTH)))
    spec = ModelSpec("net", (replace(x, wire=Wire("UINT8", 0.5, 1.0)),), (), max_batch_size=8)
    here, there = OnnxEngine(file, "fp16", CPU), widened(engine(file, gpu), spec)
    pixels = np.random.default_rng().integers(0, 9, (3, WIDTH), np.uint8)
    expected = here.run([[pixels.astype(np.float32) * 0.5 + 1]])
    assert not differs(there.run([[pixels]]), expected) and isinstance(there, OnnxEngine)


def test_nodes_on_the_cpu_are_named_those_with_halves_apart_and_sizes_are_none_of_them(
    file: Path, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = [("Shape", "sizes"), ("Identity", "same_sizes"), ("Relu", "positive"), ("Cast", "narrow")]
    on_cuda = [("MatMul", "first"), ("MatMul", "second")]
    placed(monkeypatch, CUDA=on_cuda, CPU=on_cpu[:2])
    there = engine(file, gpu)
    assert there.placement is not None and there.placement.sentence() == ""
    placed(monkeypatch, CUDA=on_cuda, CPU=on_cpu)
    there = engine(file, gpu)
    assert there.placement is not None
    assert there.placement.nodes == {"CUDAExecutionProvider": 2, "CPUExecutionProvider": 4}
    assert there.placement.on_cpu == ("Relu 'positive'", "Cast 'narrow'")
    assert there.placement.half_on_cpu == ("Cast 'narrow'",)
    assert "of them Cast 'narrow' with half tensors" in there.placement.sentence()


def test_a_node_on_the_cpu_has_its_inputs_before_it_begins(
    file: Path, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed(monkeypatch, CPU=[("Relu", "positive")])
    here, there = OnnxEngine(file, "fp16", CPU), engine(file, gpu)
    wrong = trial(gpu, there, here, [rows(2), rows(3), rows(1)])
    assert wrong == ["the host waited in a run of ONNX Runtime"] * 3
