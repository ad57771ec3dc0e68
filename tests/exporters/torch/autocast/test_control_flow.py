"""Branches, loops, scans and maps are converted from within, as live autocast runs them."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.graph.actions import Action
from halfeven.exporters.torch.autocast.kernels import keep_without_kernel
from halfeven.exporters.torch.autocast.ledger import weigh
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.rewrite import CASTS, HalfProgram, rewrite
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.archive.archive import load_program, save_program
from halfeven.models.engines.onnx_engine import OnnxEngine
from halfeven.models.errors import ExportFailed
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable, walk
from torch.fx import Node

from tests.control_flow import CONTROL_FLOW
from tests.exporters.torch.autocast.small_models import captured_small

CPU = torch.device("cpu")


@cache
def converted(name: str, level: str = "O1", lists: str = "cpu", keep: tuple[str, ...] = ()) -> HalfProgram:
    model = captured_small(name)
    plan = make_plan(runnable(model.program), Precision(level, keep=keep), lists)
    return rewrite(model.program, plan, model.spec, model.example)


def half_casts(half: HalfProgram) -> list[tuple[str, Node]]:
    return [(name, node) for name, node in walk(half.program.graph_module) if node.target in CASTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONTROL_FLOW.keys() - {"loop"}))
def test_the_weights_of_bodies_are_stored_in_half(name: str) -> None:
    half = converted(name)
    assert half.half_nodes > 0 and half.bytes * 2 == half.bytes_fp32


@pytest.mark.slow
def test_a_weight_that_a_body_reads_in_both_precisions_is_handed_over_in_both() -> None:
    half = converted("loop")
    assert sorted(str(t.dtype) for n, t in half.program.state_dict.items() if "weight" in n) == [
        "torch.float16",
        "torch.float32",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_no_weight_is_cast_in_a_body(name: str) -> None:
    half = converted(name)
    inputs = set(half.program.graph_signature.user_inputs)
    for _, node in half_casts(half):
        (source,) = node.all_input_nodes
        assert source.op != "placeholder" or source.graph is not half.program.graph or source.name in inputs
        assert (
            source.meta["val"].ndim != 2 or source.meta["val"].shape != (4, 4) or "weight" not in source.name
        )


def test_branches_that_end_in_half_give_half_and_uneven_ones_fp32() -> None:
    for name, dtype in (("branches", torch.float16), ("uneven", torch.float32)):
        (result,) = [n for n in converted(name).program.graph.nodes if n.name.startswith("getitem")]
        assert result.meta["val"].dtype == dtype


def test_the_state_of_a_loop_is_as_wide_as_any_turn_makes_it() -> None:
    nodes = converted("loop").program.graph.nodes
    assert {n.meta["val"].dtype for n in nodes if n.name.startswith("getitem")} == {
        torch.int64,
        torch.float32,
    }


def test_nodes_of_bodies_are_planned_and_kept_by_name_by_module_and_by_op() -> None:
    module = runnable(captured_small("branches").program)
    names = [name for name, node in walk(module) if str(node.target) == "aten.linear.default"]
    inner = [name for name in names if "." in name]
    assert len(inner) == 4 and len(names) == 5
    for pattern, kept in ((inner[0], inner[:1]), ("op:linear", names), ("true_graph_0", inner[:2])):
        plan = make_plan(module, Precision(keep=(pattern,)))
        assert [one.node for one in plan.kept if one.op == "linear"] == kept
        assert all(plan.actions[name] is Action.FP32 for name in kept)


def test_a_kept_node_of_a_body_computes_in_fp32() -> None:
    half = converted("branches", keep=("true_graph_0.linear",))
    dtypes = {
        name: node.meta["val"].dtype
        for name, node in walk(half.program.graph_module)
        if str(node.target) == "aten.linear.default"
    }
    assert dtypes.pop("true_graph_0.linear") == torch.float32
    assert set(dtypes.values()) == {torch.float16}


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_bodies_have_their_place_in_the_ledger_and_their_kernels_are_asked_for(name: str) -> None:
    model = captured_small(name)
    module = runnable(model.program)
    plan = keep_without_kernel(module, make_plan(module, Precision("O3")), model.example)
    ledger, weighed = weigh(module, plan, model.example)
    assert plan.kept == weighed.kept == ()
    assert {entry.weight for entry in ledger.entries} == {
        n for n, p in model.program.state_dict.items() if p.is_floating_point()
    }


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_it_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    half = converted(name)
    save_program(half.program, tmp_path / "half.pt2", weights=True)
    loaded = load_program(tmp_path / "half.pt2")
    tensors = list(CONTROL_FLOW[name].inputs(3).values())
    with torch.inference_mode():
        for one, other in zip(runnable(half.program)(*tensors), runnable(loaded)(*tensors), strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "op"),
    [("branches", "If"), ("uneven", "If"), ("loop", "Loop"), ("recurrent", "Scan")],
)
def test_the_onnx_form_has_the_same_bodies_and_answers(name: str, op: str, tmp_path: Path) -> None:
    model, half, path = captured_small(name), converted(name), tmp_path / "half.onnx"
    write_onnx(half.program, model.spec, path, {})
    assert op in {node.op_type for node in onnx.load(path).graph.node}
    for rows in (1, 6):
        tensors = list(CONTROL_FLOW[name].inputs(rows).values())
        with torch.inference_mode():
            expected = runnable(half.program)(*tensors)
        came = OnnxEngine(path, "fp16", CPU).run([[tensor.numpy()] for tensor in tensors])
        for one, other in zip(expected, came, strict=True):
            np.testing.assert_allclose(other, one.numpy(), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_a_loop_from_an_archive_has_its_onnx_form_too(tmp_path: Path) -> None:
    """The operands of a loop are lists in an archive, tuples in a program that was never written."""
    model = captured_small("loop")
    save_program(model.program, tmp_path / "original.pt2", weights=True)
    loaded = load_program(tmp_path / "original.pt2")
    half = rewrite(loaded, make_plan(runnable(loaded), Precision("O1"), "cpu"), model.spec, model.example)
    write_onnx(half.program, model.spec, tmp_path / "half.onnx", {})
    assert "Loop" in {node.op_type for node in onnx.load(tmp_path / "half.onnx").graph.node}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [("mapped", "map_impl"), ("nested", "while_loop_body_graph_0")])
def test_what_torch_cannot_write_as_onnx_is_told_by_name(name: str, words: str, tmp_path: Path) -> None:
    """A map has no op there, and torch.onnx 2.13 cannot inline a body in a body."""
    model = captured_small(name)
    with pytest.raises(ExportFailed, match=rf"{words}.*--form torch"):
        write_onnx(model.program, model.spec, tmp_path / "original.onnx", {})
    assert list(tmp_path.iterdir()) == []
