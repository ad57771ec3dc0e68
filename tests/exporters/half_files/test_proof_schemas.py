"""The published schemas of a proof's three files: what the code writes fits, and what lacks a part of it does not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.half_files.half_file import proof_folder
from halfeven.models.store.manifest import FORMAT
from halfeven.models.store.store import Store

from tests.exporters.half_files.onnx_net import samples, written

pytestmark = pytest.mark.slow  # conversions
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
