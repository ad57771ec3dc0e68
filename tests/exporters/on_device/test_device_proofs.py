"""A kept proof holds for the half that was proven, its weights included."""

from pathlib import Path

import torch
from halfeven.exporters.gate.verdict import OutputVerdict, ParityReport
from halfeven.exporters.on_device.device_proofs import keep_proof, kept_proof, proofs_of
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import LIVE, Store, Version

CPU = torch.device("cpu")
X, Y = (TensorSpec(name, "FP32", (Dim(), Dim(4, 4))) for name in "xy")
SPEC = ModelSpec("net", (X,), (Y,))
REPORT = ParityReport(
    "fp16", 2**-11, 8, (1,), (OutputVerdict("y", "tensor", "FP32", 4.0, 56.0, 30.0, 1.0, 60.0),)
)


def published(store: Path, **files: str) -> Version:
    with Store(store).draft("net") as draft:
        draft.write_json("spec.json", SPEC.to_json())
        for name, text in files.items():
            (draft.folder / name.replace("_", ".")).write_text(text)
        return draft.publish(LIVE, {"half": "fp16"})


def test_a_proof_of_a_large_half_does_not_hold_for_other_weights(tmp_path: Path) -> None:
    """The file of the graph is the same; the weights lie in a second file."""
    first = published(tmp_path / "first", half_onnx="graph", half_onnx_data="weights")
    other = published(tmp_path / "other", half_onnx="graph", half_onnx_data="others")
    keep_proof(first, "onnx", "half.onnx", CPU, REPORT)
    (note,) = first.folder.parent.glob("proofs-*.json")
    (other.folder.parent / note.name).write_text(note.read_text())
    assert kept_proof(first, "onnx", "half.onnx", CPU) is not None
    assert kept_proof(other, "onnx", "half.onnx", CPU) is None


def test_a_proof_of_a_half_in_one_file_names_the_digest_of_that_file(tmp_path: Path) -> None:
    """Proofs that an earlier release kept still hold."""
    version = published(tmp_path, half_onnx="graph and weights")
    keep_proof(version, "onnx", "half.onnx", CPU, REPORT)
    assert [proof.digest for proof in proofs_of(version)] == [version.manifest["files"]["half.onnx"]]
