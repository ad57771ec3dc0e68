"""A folder with model.onnx on the whole road: converted by the command line, proven, stored, proven again."""

# ruff: noqa: E501  (graphs in their own lines)

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.exporters.inputs.samples import load_samples
from halfeven.exporters.on_device.reprove import reprove
from halfeven.models.engines.load import load_half
from halfeven.models.spec.spec import ParityLimits
from halfeven.models.store.manifest import sha256_of
from halfeven.models.store.store import Store, Version
from onnx import ModelProto, TensorProto, external_data_helper, numpy_helper
from safetensors.numpy import save_file

from tests.command_line import run
from tests.exporters.onnx.onnx_files import element_types, nodes_of, parsed
from tests.exporters.onnx.small_files import MLP, mlp
from tests.exporters.onnx.traps import f32, normal
from tests.model_folders import samples_of, tensor, write_folder


def folder_with(path: Path, model: ModelProto, outputs: int = 4, **settings: Any) -> Path:
    ins, outs = [tensor("x", "FP32", [-1, 8])], [tensor("y", "FP32", [-1, outputs])]
    samples = samples_of({"x": [8]}, 24)
    write_folder(
        path, "", inputs=ins, outputs=outs, samples=samples, source="model.onnx", max_batch_size=8, **settings
    )
    (path / "model.py").unlink()
    onnx.save(model, path / "model.onnx")
    return path


def converted(path: Path, store: Path, *words: object) -> tuple[dict[str, Any], Version]:
    code, facts, said = run("convert", path, "--store", store, *words)
    assert code == 0, said
    return facts, Store(store).version(facts["model"], facts["version"])


@pytest.mark.slow
def test_a_folder_with_an_onnx_file_becomes_a_version_of_onnx_files_alone(tmp_path: Path) -> None:
    facts, version = converted(folder_with(tmp_path / "mlp", mlp()), tmp_path / "store")
    assert facts["status"] == "live" and set(facts["forms"]) == {"onnx"}
    form = facts["forms"]["onnx"]
    assert (form["nodes"], form["half_nodes"], form["fp32_by_policy"], form["kept"], form["casts"]) == (
        3,
        3,
        0,
        [],
        2,
    )
    assert form["bytes"] * 2 == form["bytes_fp32"] == 4 * (16 * 8 + 16 * 4)
    files = {path.name for path in version.folder.iterdir()}
    assert {"original.onnx", "half.onnx", "parity.json", "precision.json", "report.html"} <= files
    assert not any(name.endswith((".pt2", "weights.safetensors")) for name in files)
    half = onnx.load(version.file("half.onnx"))
    onnx.checker.check_model(half, full_check=True)
    assert set(element_types(half).values()) == {TensorProto.FLOAT16} and len(nodes_of(half, "Cast")) == 2


@pytest.mark.slow
def test_boxes_that_are_chosen_by_near_ties_are_served_in_fp32(tmp_path: Path) -> None:
    """Some of 256 scores always change places in half, and no setting accepts other integers."""
    text = (
        "g (float[1,8] x) => (int64[k,3] y) { h = MatMul(x, w) r = Tanh(h) s = MatMul(r, v) u = Constant<value_ints=[1]>()"
        " a = Unsqueeze(s, u) p = Sigmoid(a) m = Constant<value_ints=[20]>() y = NonMaxSuppression(boxes, p, m, iou, least) }"
    )
    random = np.random.default_rng(5)
    corner, size = random.uniform(0, 100, (1, 256, 2)), random.uniform(5, 30, (1, 256, 2))
    weights = {
        "w": normal(random, 8, 64, scale=0.35), "v": normal(random, 64, 256, scale=0.1), "iou": f32([0.5]),
        "boxes": f32(np.concatenate([corner, corner + size], -1)), "least": f32([0.5]),
    }  # fmt: skip
    folder = write_folder(
        tmp_path / "boxes", "", inputs=[tensor("x", "FP32", [1, 8])], outputs=[tensor("y", "INT64", [-1, 3])],
        samples={"x": normal(random, 32, 1, 8)}, source="model.onnx", max_batch_size=0,
    )  # fmt: skip
    onnx.save(parsed(text, weights), folder / "model.onnx")
    facts, version = converted(folder, tmp_path / "store")
    assert facts["status"] == "live" and version.manifest["half"] is None
    assert "served in FP32" in facts["reason"] and "output 'y' (INT64) must be equal" in facts["reason"]
    assert "NonMaxSuppression 'y' chooses changes where 'boxes' and 'p' nearly tie" in facts["reason"]
    assert 'may be outputs of kind = "detections"' in facts["reason"]
    assert all(kept["evidence"] for kept in facts["forms"]["onnx"]["kept"])


def test_a_half_of_which_no_sample_says_anything_is_not_made(tmp_path: Path) -> None:
    """A half that is wrong everywhere else would pass where the original answers 0 to every judged sample."""
    model = mlp(
        "g (float[n,8] x) => (float[n,4] y) { h = MatMul(x, wt) l = Sub(h, far) r = Relu(l) y = MatMul(r, v) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(100, np.float32), "far"))
    model.graph.initializer.append(numpy_helper.from_array(normal(np.random.default_rng(3), 8, 16), "wt"))
    folder, store = folder_with(tmp_path / "mlp", model), tmp_path / "store"
    facts, version = converted(folder, store)
    assert facts["status"] == "live" and facts["forms"]["onnx"]["half_nodes"] == 0
    assert "proves nothing of a half; give samples" in facts["reason"]
    assert not (version.folder / "half.onnx").exists()
    loud = tmp_path / "loud.safetensors"
    save_file({"x": 100 * np.random.default_rng(5).normal(size=(24, 8)).astype(np.float32)}, loud)
    again, _ = converted(folder, store, "--samples", loud)
    assert again["forms"]["onnx"]["half_nodes"] > 0 and "proves nothing" not in again["reason"]


@pytest.mark.slow
def test_a_half_that_proves_nothing_once_it_was_made_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[ParityReport]()

    def always(reports: Iterable[ParityReport], limits: ParityLimits, cause: Callable[[str], str]) -> str:
        seen.extend(reports)
        return cause("for a reason")

    monkeypatch.setattr("halfeven.exporters.conversion.road.why_noise_proves_nothing", always)
    facts, version = converted(folder_with(tmp_path / "mlp", mlp()), tmp_path / "store")
    assert [report.passed for report in seen] == [True]
    assert facts["status"] == "live" and facts["forms"]["onnx"]["half_nodes"] == 0
    assert facts["reason"].endswith("for a reason")
    assert not (version.folder / "half.onnx").exists()


@pytest.mark.slow
def test_the_stored_version_is_proven_again_from_what_is_stored(tmp_path: Path) -> None:
    _, version = converted(folder_with(tmp_path / "mlp", mlp()), tmp_path / "store")
    cpu = torch.device("cpu")
    samples = load_samples(version.file("samples.safetensors"), version.spec())
    report = reprove(version, load_half(version, "onnx", cpu), cpu, samples)
    assert report.passed and 0 < report.max_error_u <= 4.0
    code, facts, said = run("parity", "mlp", "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["passed"], said


@pytest.mark.slow
def test_a_stored_half_that_overflows_in_half_storage_does_not_pass_again(tmp_path: Path) -> None:
    """ONNX Runtime's CPU computes chains of half in FP32: only half storage sees it."""
    _, version = converted(folder_with(tmp_path / "mlp", mlp()), tmp_path / "store")
    path = version.file("half.onnx")
    onnx.save(overflowing(onnx.load(path)), tmp_path / "other.onnx")
    path.unlink()
    path.write_bytes((tmp_path / "other.onnx").read_bytes())
    version.manifest["files"]["half.onnx"] = sha256_of(path)  # type: ignore[index]
    cpu = torch.device("cpu")
    samples = load_samples(version.file("samples.safetensors"), version.spec())
    engine = load_half(version, "onnx", cpu)
    assert np.isfinite(engine.run([[samples.arrays["x"][:8]]])[0]).all()
    report = reprove(version, engine, cpu, samples)
    assert not report.passed


def overflowing(half: ModelProto) -> ModelProto:
    """The half, with the result of its Relu taken times 2¹⁵ and then divided by as much."""
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in half.graph.node]
    at = next(place for place, node in enumerate(nodes) if node.op_type == "Relu")
    given, nodes[at].output[0] = nodes[at].output[0], "up__in"
    for name, value in (("up", 2.0**15), ("down", 2.0**-15)):
        half.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float16), name))
    more = [("up__in", "up", "up__out"), ("up__out", "down", given)]
    nodes[at + 1 : at + 1] = [onnx.helper.make_node("Mul", [x, y], [z]) for x, y, z in more]
    del half.graph.node[:]
    half.graph.node.extend(nodes)
    return half


@pytest.mark.parametrize("form", ["torch", "both"])
def test_a_torch_form_of_a_file_is_refused_by_name(form: str, tmp_path: Path) -> None:
    code, facts, said = run(
        "convert", folder_with(tmp_path / "mlp", mlp()), "--store", tmp_path / "store", "--form", form
    )
    assert code == 2 and "model.onnx" in said and "torch form" in said
    assert not facts.get("version") and Store(tmp_path / "store").names() == []


@pytest.mark.slow
def test_a_changed_file_makes_a_new_version_and_an_unchanged_one_does_not(tmp_path: Path) -> None:
    folder, store = folder_with(tmp_path / "mlp", mlp()), tmp_path / "store"
    assert converted(folder, store)[1].number == 1
    assert converted(folder, store)[1].number == 1
    onnx.save(mlp(seed=8), folder / "model.onnx")
    assert converted(folder, store)[1].number == 2


def external(model: ModelProto, location: str) -> ModelProto:
    for held in model.graph.initializer:
        external_data_helper.set_external_data(held, location)
        held.data_location = TensorProto.EXTERNAL
    return model


@pytest.mark.slow
def test_a_changed_file_of_external_data_makes_a_new_version(tmp_path: Path) -> None:
    folder, store = folder_with(tmp_path / "mlp", mlp()), tmp_path / "store"
    graphs = set[bytes]()
    for number, seed in ((1, 7), (2, 8)):
        (folder / "model.bin").unlink(missing_ok=True)  # onnx.save would append to it, at other offsets
        onnx.save(
            mlp(seed=seed),
            folder / "model.onnx",
            save_as_external_data=True,
            location="model.bin",
            size_threshold=0,
        )
        graphs.add((folder / "model.onnx").read_bytes())
        assert converted(folder, store)[1].number == number
    assert len(graphs) == 1, "the weights alone differ"


def test_an_unknown_op_is_refused_by_name(tmp_path: Path) -> None:
    unknown = mlp(MLP.replace("Relu(h)", "acme.Fold(h)"), more=', "acme" : 1')
    code, _, said = run("convert", folder_with(tmp_path / "acme", unknown), "--store", tmp_path / "store")
    assert code == 2 and "acme.Fold" in said


def test_classes_that_tie_in_half_are_no_reason_to_refuse(tmp_path: Path) -> None:
    random = np.random.default_rng()
    w = normal(random, 8, 6)
    w = np.concatenate([w, w * f32(1 + 1e-6)], 1)
    model = parsed(
        "g (float[n,8] x) => (int64[n] y) { s = MatMul(x, w) y = ArgMax<axis=1, keepdims=0>(s) }", {"w": w}
    )
    folder = folder_with(tmp_path / "ties", model)
    text = (folder / "model.toml").read_text()
    text = text.replace(
        'name = "y"\ndatatype = "FP32"\nshape = [-1, 4]', 'name = "y"\ndatatype = "INT64"\nshape = [-1]'
    )
    (folder / "model.toml").write_text(text)
    facts, _ = converted(folder, tmp_path / "store")
    assert facts["forms"]["onnx"]["passed"] and facts["forms"]["onnx"]["kept"] == []


@pytest.mark.slow
def test_a_file_whose_rows_together_have_another_width_takes_one_row_at_a_time(tmp_path: Path) -> None:
    """The rows that are compared first are alike; a later one, alone, takes the other branch."""
    random = np.random.default_rng(3)
    text = """g (float[n,8] x) => (float[n,m] y) {
        s = ReduceSum<keepdims=0>(x) c = Greater(s, zero)
        y = If (c) <then_branch = t () => (t) { t = MatMul(x, narrow) }, else_branch = e () => (e) { e = MatMul(x, wide) }>
    }"""
    onnx.save(
        parsed(text, {"zero": f32(0), "narrow": normal(random, 8, 4), "wide": normal(random, 8, 6)}),
        tmp_path / "net.onnx",
    )
    x = np.abs(normal(random, 24, 8))
    x[6:] *= -1
    np.savez(tmp_path / "s.npz", x=x[np.r_[0:3, 6:24, 3:6]])
    facts, version = converted(tmp_path / "net.onnx", tmp_path / "store", "--samples", tmp_path / "s.npz")
    assert version.spec().max_batch_size == 1 and facts["forms"]["onnx"]["half_nodes"]
    assert any(
        "max_batch_size is 1: output 'y' has rows of the shapes [[4], [6]]" in note for note in facts["notes"]
    )
