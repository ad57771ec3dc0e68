"""`docs/verify_proof.py` knows numpy and onnx alone: it verifies what the gate proved, and refuses what was changed."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from halfeven.exporters.conversion.convert import Options
from halfeven.exporters.exported.file_rows import write_npz
from halfeven.exporters.gate.divergence import Divergence
from halfeven.exporters.half_files.half_file import check_digests, proof_folder, proof_of, write_half
from halfeven.exporters.half_files.half_metadata import digest_of_facts
from halfeven.exporters.onnx.reading import large_files
from halfeven.models.errors import HalfevenError, ParityRefused
from halfeven.models.store.manifest import digest_of, sha256_of, write_manifest
from onnx import ModelProto, TensorProto, numpy_helper

from tests.exporters.half_files import onnx_net
from tests.exporters.half_files.verifier import VERIFIER, verified, verified_here

pytestmark = pytest.mark.slow  # a conversion


def test_it_imports_neither_halfeven_nor_torch_nor_a_runtime() -> None:
    seen = "print({'halfeven', 'torch', 'onnxruntime'} & set(sys.modules))"
    shown = f"import sys, runpy; runpy.run_path({str(VERIFIER)!r}); {seen}"
    done = subprocess.run([sys.executable, "-I", "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    assert len(VERIFIER.read_text().splitlines()) < 300


def test_it_verifies_what_the_gate_proved_with_the_same_error(half: Path) -> None:
    code, said = verified(half)
    (output,) = json.loads((proof_folder(half) / "parity.json").read_text())["forms"]["onnx"]["outputs"]
    assert code == 0 and said.startswith("verified: "), said
    assert float(said.split()[1].rstrip("u")) == pytest.approx(output["max_error_u"], abs=0.3)


def test_numbers_behind_a_step_may_differ_near_it_as_the_gate_counted() -> None:
    module = runpy.run_path(str(VERIFIER))
    limits = {"limit_u": 8.0, "min_sqnr_db": 40.0, "min_slice_sqnr_db": 20.0}
    fp32 = np.tile(np.arange(1, 101, dtype=np.float32), (10, 1))
    for tied, stepped, wrong, passed in (
        (3, 1000, 3, True),
        (3, 1000, 4, False),
        (99, 1000, 11, False),
        (3, 0, 1, False),
    ):
        half = fp32.copy()
        half[0, 50 : 50 + wrong] += 1
        judged = limits | {"tied": tied, "statistics": {"stepped": stepped}}
        try:
            found = module["check_output"]("y", half, fp32, judged, 2.0**-11)
            assert passed and found == 0
        except module["Refused"]:
            assert not passed, (tied, stepped, wrong)


def test_of_a_few_numbers_behind_a_step_one_may_differ() -> None:
    module = runpy.run_path(str(VERIFIER))
    judged = {"limit_u": 8.0, "min_sqnr_db": 40.0, "min_slice_sqnr_db": 20.0, "tied": 1}
    fp32 = np.arange(1, 11, dtype=np.float32)[None]
    half = fp32 + (fp32 == 3)
    assert module["check_output"]("y", half, fp32, judged | {"statistics": {"stepped": 10}}, 2.0**-11) == 0


def test_of_a_long_axis_the_slices_are_judged_that_the_gate_judges() -> None:
    module, u = runpy.run_path(str(VERIFIER)), 2.0**-11
    judged = {"limit_u": 8.0, "min_sqnr_db": 40.0, "min_slice_sqnr_db": 20.0, "tied": 0, "statistics": {}}
    for place, is_judged in ((1, False), (2, True)):  # of 8,192 every second one
        fp32 = np.ones((2, 8192), np.float32)
        fp32[:, place] = 6 * u
        half = fp32.copy()
        half[:, place] += np.float32(4 * u)
        divergence = Divergence()
        divergence.add(range(2), fp32.astype(np.float64), half.astype(np.float64))
        (axis,) = divergence.slices(u)
        assert (axis.worst_db < 20) == is_judged
        with pytest.raises(module["Refused"], match="slice 2 ") if is_judged else nullcontext():
            module["check_output"]("y", half, fp32, judged, u)


def appended(name: str) -> Callable[[Path], None]:
    def change(half: Path) -> None:
        path = half if name == "half" else proof_folder(half) / name
        path.write_bytes(path.read_bytes() + b" ")

    return change


def model(change: Callable[[ModelProto], None]) -> Callable[[Path], None]:
    """Another half, with all digests computed again."""

    def changed(half: Path) -> None:
        found = onnx.load(half)
        change(found)
        onnx.save(found, half)
        shutil.copyfile(half, proof_folder(half) / "half.onnx")
        again(half)
        named_again(half)

    return changed


def weight(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def changed(found: ModelProto) -> None:
        tensor = next(one for one in found.graph.initializer if one.data_type == TensorProto.FLOAT16)
        array = change(numpy_helper.to_array(tensor).copy()).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    return model(changed)


def rows(file: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def changed(half: Path) -> None:
        path = proof_folder(half) / file
        with np.load(path) as found:
            arrays = {name: change(array.copy()) for name, array in found.items()}
        write_npz(path, arrays)
        again(half)
        named_again(half)

    return changed


def verdict(**limits: Any) -> Callable[[Path], None]:
    """Another parity.json, whose digest the half names."""

    def changed(half: Path) -> None:
        path = proof_folder(half) / "parity.json"
        proof = json.loads(path.read_text())
        for output in proof["forms"]["onnx"]["outputs"]:
            output.update(limits)
        path.write_text(json.dumps(proof))
        states(half, "halfeven.proof", sha256_of(path))
        named_again(half)

    return changed


def form(**facts: Any) -> Callable[[Path], None]:
    """Another verdict, with all digests computed again."""

    def changed(half: Path) -> None:
        path = proof_folder(half) / "parity.json"
        proof = json.loads(path.read_text())
        proof["forms"]["onnx"].update(facts)
        path.write_text(json.dumps(proof))
        verdict()(half)

    return changed


def not_a_model(half: Path) -> None:
    half.write_bytes(b"not a model")
    shutil.copyfile(half, proof_folder(half) / "half.onnx")
    again(half)


def no_archive(half: Path) -> None:
    (proof_folder(half) / "inputs.npz").write_bytes(b"PK\x03\x04")
    again(half)
    named_again(half)


def again(half: Path, /, **facts: Any) -> None:
    path = proof_folder(half) / "manifest.json"
    manifest = json.loads(path.read_text()) | facts
    path.unlink()
    status = manifest.pop("status")
    write_manifest(
        path.parent, status, {key: manifest[key] for key in manifest if key not in ("files", "digest")}
    )


def states(half: Path, key: str, value: str) -> None:
    """Another value in the half's metadata, with all digests of the manifest computed again."""
    found = onnx.load(half)
    said = {one.key: one.value for one in found.metadata_props} | {key: value}
    del found.metadata_props[:]
    for name in said:
        found.metadata_props.add(key=name, value=said[name])
    onnx.save(found, half)
    shutil.copyfile(half, proof_folder(half) / "half.onnx")
    again(half)


def named_again(half: Path) -> None:
    """The half names the files of its proof as they are now."""
    manifest = json.loads((proof_folder(half) / "manifest.json").read_text())
    files = {name: digest for name, digest in manifest["files"].items() if name != "half.onnx"}
    states(half, "halfeven.facts", digest_of_facts(manifest, files))


def exchanged(name: str) -> Callable[[Path], None]:
    """Another file of the proof, whose digest the manifest has; the half is as it was."""

    def change(half: Path) -> None:
        appended(name)(half)
        again(half)

    return change


def outside(half: Path) -> None:
    """The manifest names a file of another folder, with its digest."""
    path, model = proof_folder(half) / "manifest.json", half.parent / "net.onnx"
    manifest = json.loads(path.read_text())
    manifest["files"][f"../{model.name}"] = sha256_of(model)
    path.write_text(json.dumps(manifest | {"digest": digest_of(manifest["files"])}))


def later(half: Path) -> None:
    path = proof_folder(half) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


def nothing(half: Path) -> None:
    """A half and answers of FP32 that are 0 throughout."""
    weight(lambda array: 0 * array)(half)
    rows("expected.npz", lambda array: 0 * array)(half)


def another_function(half: Path) -> None:
    """A half of other weights, with its own answers as those of FP32."""
    weight(lambda array: array * 1.5)(half)
    with np.load(proof_folder(half) / "inputs.npz") as rows_asked:
        own = onnx_net.answers(half, rows_asked["x"])
    rows("expected.npz", lambda _: own)(half)


def one_element(array: np.ndarray) -> np.ndarray:
    array.flat[3] = -array.flat[3] + 1
    return array


def not_finite(array: np.ndarray) -> np.ndarray:
    array.flat[0] = np.nan
    return array


def other_node(found: ModelProto) -> None:
    next(node for node in found.graph.node if node.op_type == "Relu").op_type = "Abs"


def swapped(half: Path) -> None:
    shutil.copyfile(proof_folder(half) / "half.onnx", proof_folder(half) / "original.onnx")
    again(half)


EXCHANGED = ("spec.json", "samples.safetensors", "inputs.npz", "expected.npz", "precision.json", "README.md")
TAMPERED = {
    "a byte of the half": appended("half"),
    "a byte of the proof's half": appended("half.onnx"),
    "a byte of the original": appended("original.onnx"),
    "a byte of the verdict": appended("parity.json"),
    "a byte of the plan": appended("precision.json"),
    "a byte of the answers": appended("expected.npz"),
    "a byte of the rows": appended("inputs.npz"),
    "a byte of the signature": appended("spec.json"),
    "a file more": lambda half: (proof_folder(half) / "more.txt").write_text(""),
    "a file less": lambda half: (proof_folder(half) / "precision.json").unlink(),
    "a file of another folder": outside,
    **{f"another {name}": exchanged(name) for name in EXCHANGED},
    "no manifest": lambda half: (proof_folder(half) / "manifest.json").unlink(),
    "a refused version": lambda half: again(half, status="refused"),
    "a half of another type": lambda half: again(half, half="bf16"),
    "a later format": later,
    "no half": lambda half: again(half, half=None),
    "another original": swapped,
    "a weight": weight(one_element),
    "all weights": weight(lambda array: array * 1.01),
    "a weight that is not finite": weight(not_finite),
    "another operation": model(other_node),
    "another function": another_function,
    "other answers": rows("expected.npz", lambda array: array + np.float32(0.5)),
    "other rows": rows("inputs.npz", lambda array: array[::-1]),
    "no answers but 0": nothing,
    "fewer answers": rows("expected.npz", lambda array: array[:5]),
    "a limit that proves nothing": verdict(limit_u=1e9),
    "a verdict that did not pass": form(passed=False),
    "a half that is no model": not_a_model,
    "rows in no archive": no_archive,
    "slices that prove nothing": verdict(min_slice_sqnr_db=-100.0),
    "a signal to noise that proves nothing": verdict(min_sqnr_db=-100.0),
}


@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED)
def test_a_proof_that_was_changed_is_refused(half: Path, change: Callable[[Path], Any]) -> None:
    change(half)
    # numpy leaves an archive open that it cannot read
    code, said = (verified if change is no_archive else verified_here)(half)
    assert code == 3 and said.startswith("not verified: "), said


# Numbers that only a run of the half shows; `halfeven verify` runs it too.
SHOWN_BY_A_RUN = (
    "a weight",
    "all weights",
    "a weight that is not finite",
    "another operation",
    "other answers",
)
SHOWN_BY_A_RUN += ("other rows", "fewer answers", "a half that is no model", "rows in no archive")
SHOWN_BY_A_RUN += ("no answers but 0", "a verdict that did not pass", "another function")


@pytest.mark.parametrize("name", [name for name in TAMPERED if name not in SHOWN_BY_A_RUN])
def test_halfeven_itself_refuses_what_digests_and_the_manifest_show(half: Path, name: str) -> None:
    TAMPERED[name](half)
    with pytest.raises(HalfevenError):
        check_digests(half, proof_of(half))


@pytest.mark.parametrize(
    "limit",
    [
        {"max_error_u": 1e3}, {"min_slice_sqnr_db": -1000.0}, {"min_sqnr_db": -1000.0}, {"max_flips": 1.0},
        {"max_kl_nats": 9.0}, {"max_ties": 0.6}, {"max_swaps": 1.0}, {"min_top10_overlap": 0.0},
    ],
)  # fmt: skip
def test_limits_of_the_signature_that_prove_nothing_are_refused(half: Path, limit: dict[str, float]) -> None:
    path = proof_folder(half) / "spec.json"
    spec = json.loads(path.read_text())
    path.write_text(json.dumps(spec | {"parity": spec["parity"] | limit}))
    again(half)
    named_again(half)
    with pytest.raises(ParityRefused, match=r"which proves nothing: expected at most (64u, and|0\.5)"):
        check_digests(half, proof_of(half))


def test_a_large_half_names_its_weights_so_that_a_signature_of_it_covers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_files, "SELF_CONTAINED_BELOW", 256)
    monkeypatch.setattr(large_files, "_SMALL", 64)
    half, rows_given = tmp_path / "net.fp16.onnx", onnx_net.samples(tmp_path / "x.npz")
    write_half(onnx_net.written(tmp_path / "net.onnx"), half, Options(samples=rows_given))
    check_digests(half, proof_of(half))
    assert verified_here(half)[0] == 0
    data = half.with_suffix(".data")
    data.write_bytes(
        bytes((data.read_bytes()[0] ^ 1,)) + data.read_bytes()[1:]
    )  # within the limits of the gate
    shutil.copyfile(data, proof_folder(half) / data.name)
    again(half)
    with pytest.raises(ParityRefused, match="names other files, than the half does"):
        check_digests(half, proof_of(half))
    assert "names other files, than the half does" in verified_here(half)[1]


def test_a_proof_names_no_digest_that_is_not_its_own_and_is_the_same_each_time(half: Path) -> None:
    """The page was written for the folder of `halfeven export`, whose half has other metadata."""
    proof = proof_folder(half)
    named = re.findall(r"`([0-9a-f]{64})`", (proof / "README.md").read_text())
    assert named and {*named} <= {*json.loads((proof / "manifest.json").read_text())["files"].values()}
    for name in ("inputs.npz", "expected.npz"):
        with zipfile.ZipFile(proof / name) as file:
            assert {member.date_time[0] for member in file.infolist()} == {1980}


def test_of_integers_most_are_those_of_fp32_whatever_the_proof_says() -> None:
    found = runpy.run_path(str(VERIFIER))
    fp32 = np.arange(10)
    found["check_output"]("class", fp32 + (fp32 < 2), fp32, {"tied": 3}, 2.0**-11)
    for wrong, tied in ((4, 3), (6, 10**9)):
        with pytest.raises(found["Refused"], match="other integers"):
            found["check_output"]("class", fp32 + (fp32 < wrong), fp32, {"tied": tied}, 2.0**-11)


def test_answers_of_fp32_that_any_half_would_give_show_nothing() -> None:
    """As the gate has it: one output may be 0 throughout, beside another one."""
    found = runpy.run_path(str(VERIFIER))
    zeros, some = np.zeros((4, 2), np.float32), np.full((4, 2), 0.5, np.float32)
    found["check_shown"]({"scores": some, "mask": zeros, "class": np.zeros(4, np.int64)})
    found["check_shown"]({"class": np.zeros(4, np.int64)})
    for answers in (
        {"mask": zeros},
        {"scores": np.full_like(some, np.nan), "mask": zeros - 1e10 * (some == np.arange(2))},
        {"scores": some, "energy": some * 1e12},
        {"scores": some, "boxes": np.zeros((0, 4), np.float32)},
    ):
        with pytest.raises(found["Refused"], match="proves nothing"):
            found["check_shown"](answers)


def test_the_two_names_of_the_domain_of_onnx_are_one(tmp_path: Path) -> None:
    module = runpy.run_path(str(VERIFIER))
    node = onnx.helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")
    ends = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "net", ends[:1], ends[1:])
    path = tmp_path / "net.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("ai.onnx", 18)]), path)
    assert module["Model"](path)({"x": np.array([-1, 2], np.float32)})["y"].tolist() == [0, 2]


def test_an_output_that_is_left_out_takes_no_place_among_the_answers(tmp_path: Path) -> None:
    module = runpy.run_path(str(VERIFIER))
    sizes = {"x": (3, 1, 2), "w": (1, 15, 2), "r": (1, 15, 5)}
    arrays = {name: np.random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    node = onnx.helper.make_node("GRU", [*sizes], ["", "last"], hidden_size=5)
    x = onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes["x"])
    last = onnx.helper.make_tensor_value_info("last", TensorProto.FLOAT, [1, 1, 5])
    weights = [numpy_helper.from_array(arrays[name], name) for name in "wr"]
    graph = onnx.helper.make_graph([node], "net", [x], [last], weights)
    opsets = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "net.onnx")
    found = module["Model"](tmp_path / "net.onnx")({"x": arrays["x"]})["last"]
    np.testing.assert_allclose(found, onnx_net.answers(tmp_path / "net.onnx", arrays["x"]), atol=1e-5)


def test_an_operation_that_the_verifier_lacks_is_named(tmp_path: Path) -> None:
    module = runpy.run_path(str(VERIFIER))
    node = onnx.helper.make_node("FusedMatMul", ["x", "x"], ["y"], name="product", domain="com.microsoft")
    ends = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "xy"]
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "net", ends[:1], ends[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets), tmp_path / "net.onnx")
    with pytest.raises(module["Refused"], match="does not run FusedMatMul 'product'"):
        module["Model"](tmp_path / "net.onnx")({"x": np.zeros((2, 2), np.float32)})
