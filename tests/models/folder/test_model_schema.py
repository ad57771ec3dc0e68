"""The JSON Schema of model.toml and its readers have one table of keys: what the readers take fits the schema (every
test that reads a folder checks it, `tests/conftest.py`), and no wrong key or word fits."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from halfeven.models.errors import BadFolder
from halfeven.models.folder.model_keys import TOP, Key, Keys
from halfeven.models.folder.package import read_folder

from tests.model_folders import write_folder
from tests.models.wrong_words import WRONG_WORDS
from tests.reference.model_schema import model_schema

ROOT = Path(__file__).resolve().parents[3]
VALIDATOR = jsonschema_rs.validator_for(model_schema())


def value_of(key: Key) -> Any:
    """The example of a key; of a table the keys that it needs."""
    if key.keys is None:
        return tomllib.loads(f"value = {key.example}")["value"]
    table = {name: value_of(one) for name, one in key.keys.items() if one.needed}
    return [table] if key.kind is list else {"critic": table} if key.named else table


def documents(keys: Keys, table: dict[str, Any], original: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key at its example, and the least document around it as JSON."""
    for name, key in keys.items():
        was = table.get(name)
        table[name] = value_of(key)
        yield name, json.dumps(original)
        if key.keys is not None:
            inside = table[name][0] if key.kind is list else table[name]
            yield from documents(key.keys, inside["critic"] if key.named else inside, original)
        table[name] = was
        if was is None:
            del table[name]


def least() -> dict[str, Any]:
    return {name: value_of(key) for name, key in TOP.items() if key.needed}


def test_the_schema_is_a_schema_and_has_a_stable_id() -> None:
    jsonschema_rs.meta.validate(model_schema())
    assert model_schema()["$id"] == "urn:halfeven:model.toml"


def test_every_key_has_an_example_that_fits_and_none_beside_it() -> None:
    original, seen = least(), 0
    for name, document in documents(TOP, original, original):
        VALIDATOR.validate(json.loads(document))
        misspelt = json.loads(document.replace(f'"{name}":', f'"{name}y":'))
        assert not VALIDATOR.is_valid(misspelt), name
        seen += 1
    assert seen > 80


def test_every_model_toml_of_the_package_and_every_part_of_one_in_the_pages_fits() -> None:
    files = sorted(ROOT.glob("models/zoo/*/model.toml"))
    blocks = re.findall(
        r"```toml\n(.*?)```", "".join(p.read_text() for p in ROOT.glob("docs/*.md")), re.DOTALL
    )
    assert len(files) > 10 and len(blocks) > 5
    for file in files:
        VALIDATOR.validate(tomllib.loads(file.read_text()))
    for data in map(tomllib.loads, blocks):
        if set(data) <= set(TOP):
            VALIDATOR.validate(least() | data)


def test_a_wrong_key_or_word_fits_neither(tmp_path: Path) -> None:
    for place, (settings, _) in enumerate(WRONG_WORDS):
        folder = write_folder(tmp_path / str(place), **{"name": "net", **settings})
        with pytest.raises(BadFolder):
            read_folder(folder)
        said = tomllib.loads((folder / "model.toml").read_text())
        if "loss" not in said.get("training", {}):  # a loss may be any function of the folder
            assert not VALIDATOR.is_valid(said), said
