"""The published schemas of a proof's three files: what the code writes fits, and what lacks a part of it does not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.conversion.for_device import planned_for
from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.half_files.half_file import proof_folder
from halfeven.exporters.on_device.environment import environment
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.manifest import FORMAT
from halfeven.models.store.store import Store

from tests.exporters.half_files.onnx_net import samples, written
from tests.model_folders import samples_of, write_folder

pytestmark = pytest.mark.slow  # conversions
# A net that computes in FP32 by itself behind its first layer.
ISLAND = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x)
        with torch.autocast("cuda", enabled=False):
            hidden = hidden.float() @ self.last.weight.float().T @ self.last.weight.float()
        return self.last(torch.tanh(hidden))

def build():
    return Net()
"""
# Every key of [parity] that limits the gate.
LIMITS = {
    "max_error_u": 5.0, "min_sqnr_db": 50.0, "min_slice_sqnr_db": 28.0, "max_flips": 0.01, "max_kl_nats": 0.001,
    "max_ties": 0.1, "max_swaps": 0.1, "min_top10_overlap": 0.9, "unstable": "accept",
}  # fmt: skip
SCHEMAS = Path(__file__).parents[3] / "docs" / "schemas"
FILES = ("manifest", "parity", "precision")


def schema(name: str) -> dict[str, Any]:
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text())


def check(folder: Path) -> None:
    for name in FILES:
        known, found = schema(name), json.loads((folder / f"{name}.json").read_text())
        jsonschema_rs.validate(known, found)
        assert not [*undescribed(found, known, known)], name


def undescribed(found: Any, known: dict[str, Any], root: dict[str, Any], place: str = "") -> Iterator[str]:
    """The places of the keys that a schema does not name. An object of which it names no key may have any."""
    if "$ref" in known:
        known = root["$defs"][known["$ref"].rpartition("/")[2]]
    if isinstance(found, list):
        for one in found:
            yield from undescribed(one, known.get("items", {}), root, f"{place}[]")
    elif isinstance(found, dict) and {"properties", "additionalProperties"} & known.keys():
        for key, value in found.items():
            inner = known.get("properties", {}).get(key, known.get("additionalProperties"))
            if inner is None:
                yield f"{place}.{key}"
            else:
                yield from undescribed(value, inner, root, f"{place}.{key}")


@pytest.mark.parametrize("name", FILES)
def test_a_schema_has_a_stable_id_with_the_format_of_the_files(name: str) -> None:
    jsonschema_rs.meta.validate(schema(name))
    assert schema(name)["$id"] == f"urn:halfeven:{name}:{FORMAT}"


def lacking(document: Any, known: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """The document without each of the keys that the schema needs, in turn."""
    for key in known.get("required", ()):
        yield f"{place}.{key}", {other: document[other] for other in document if other != key}
        inner = known["properties"][key]
        for where, changed in lacking(document[key], inner, f"{place}.{key}"):
            yield where, document | {key: changed}


def test_the_proof_of_a_half_fits_and_every_part_of_it_is_needed(half: Path) -> None:
    check(proof_folder(half))
    for name in FILES:
        known, found = schema(name), json.loads((proof_folder(half) / f"{name}.json").read_text())
        for place, changed in lacking(found, known):
            assert not jsonschema_rs.is_valid(known, changed), f"{name}{place}"
    parity = json.loads((proof_folder(half) / "parity.json").read_text())
    parity["forms"]["onnx"]["outputs"][0]["limit_u"] = "4"
    assert not jsonschema_rs.is_valid(schema("parity"), parity)


@pytest.mark.parametrize(("level", "loud"), [("O1", 1.0), ("O3", 1e5), ("O0", 1.0)])
def test_versions_of_a_store_fit_proven_refused_and_in_fp32(tmp_path: Path, level: str, loud: float) -> None:
    rows = samples(tmp_path / "x.npz")
    options = Options(samples=rows, level=level)
    check(convert(written(tmp_path / "net.onnx", loud), Store(tmp_path / "store"), options).version.folder)


@pytest.mark.parametrize(
    "settings",
    [{"form": "live"}, {"precision": {"dtype": "bf16"}}, {"parity": LIMITS}],
    ids=lambda one: next(iter(one)),
)
def test_versions_of_modules_fit_live_bf16_with_other_limits_and_planned_again(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    store, rows = Store(tmp_path / "store"), samples_of({"x": [4]}, 24, 1)
    version = convert(
        write_folder(tmp_path / "net", ISLAND, samples=rows, **settings), store, Options()
    ).version
    check(version.folder)
    if "parity" in settings:  # what else is made of a version: its proof awaits promotion
        check(planned_for(version, store, torch.device("cpu"), lambda _: None).folder)


@pytest.mark.parametrize("cudnn", [91900, None])
def test_the_environment_of_a_proof_on_cuda_fits(
    half: Path, cudnn: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    for name in ("manifest", "parity"):
        found = json.loads((proof_folder(half) / f"{name}.json").read_text())
        jsonschema_rs.validate(schema(name), found | {"environment": environment("cuda:0")})


def test_a_verdict_on_answers_that_cannot_be_compared_fits() -> None:
    spec = ModelSpec("net", (), (TensorSpec("y", "FP32", (Dim(), Dim(3))),), 4)
    trial = Trial((0, 1), {"y": np.ones((2, 3), np.float32)}, {"other": np.ones((2, 3), np.float32)})
    report = judge(spec, "fp16", [trial]).to_json()
    assert not report["passed"] and report["outputs"] == []
    jsonschema_rs.validate(schema("parity"), {"environment": {"device": "cpu"}, "forms": {"onnx": report}})
