"""A version is trained again from what its lineage records: the same weights, or the reason why not."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from halfeven.models.errors import BadInput
from halfeven.models.store.store import Store
from halfeven.serve.cli.main import app
from halfeven.serve.finetune.jobs import reproducing
from halfeven.serve.finetune.jobs.reproducing import DataGone, reproduce, sentence_of
from typer.testing import CliRunner

pytestmark = pytest.mark.slow(seconds=10)  # a job with its processes


@pytest.fixture
def store(trained: Store, tmp_path: Path) -> Store:
    return Store(Path(copytree(trained.root, tmp_path / "store")))


def rows_file(store: Store) -> Path:
    """The rows to train on; the held-out ones are fewer."""
    return max((store.root / "files").iterdir(), key=lambda path: path.stat().st_size)


def of_lineage(store: Store, **changed: Any) -> None:
    """Write other facts into the lineage of version 2."""
    path = store.root / "models/net/2/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["lineage"] |= changed
    path.write_text(json.dumps(manifest))


def test_without_its_rows_it_says_so_and_the_command_trains_it_again_from_a_file_to_the_same_weights(
    store: Store, tmp_path: Path
) -> None:
    version, kept = store.version("net", 2), rows_file(store).rename(tmp_path / "rows.safetensors")
    with pytest.raises(DataGone, match="not in the store any more, so it cannot be trained again"):
        reproduce(store, version, None, None, lambda line: None)
    (tmp_path / "other").write_bytes(b"other rows")
    with pytest.raises(BadInput, match="expected the file with SHA-256"):
        reproduce(store, version, tmp_path / "other", None, lambda line: None)
    words = ["reproduce", "net@2", "--store", str(store.root), "--data", str(kept), "--json"]
    done = CliRunner().invoke(app, words)
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["equal"], facts["differences"]) == (0, True, [])
    assert facts["trained"] == version.manifest["lineage"]["weights"]
    assert store.numbers("net") == [1, 2], "nothing is published"


def test_with_another_seed_on_record_the_weights_differ_and_it_says_what_differs(store: Store) -> None:
    lineage = store.version("net", 2).manifest["lineage"]
    of_lineage(store, seed=8, trained_with={**lineage["trained_with"], "torch": "1.0"})
    facts = reproduce(store, store.version("net", 2), None, None, lambda line: None)
    assert not facts["equal"] and "torch was 1.0 and is" in facts["differences"][0]
    assert "has other weights" in sentence_of(facts) and "torch was 1.0" in sentence_of(facts)


def test_rows_that_were_changed_in_the_store_are_not_taken(store: Store) -> None:
    rows_file(store).write_bytes(b"changed")
    with pytest.raises(DataGone, match="does not hold the rows"):
        reproduce(store, store.version("net", 2), None, None, lambda line: None)


def test_a_version_that_was_converted_has_no_training_to_repeat(store: Store) -> None:
    with pytest.raises(BadInput, match="net@1 was not fine-tuned here"):
        reproduce(store, store.version("net", 1), None, None, lambda line: None)


def test_the_bound_on_its_rows_is_that_of_a_server_with_the_same_settings(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, size = store.version("net", 2), rows_file(store).stat().st_size
    with pytest.raises(BadInput, match=r"the rows of net@2 cannot be read: .*HALFEVEN_MAX_UPLOAD_MIB"):
        reproduce(store, version, None, None, lambda line: None, max_bytes=size - 1)
    asked: list[Any] = []
    facts = {"equal": True, "version": "net@2", "trained": "d"}
    monkeypatch.setattr(reproducing, "reproduce", lambda *given: asked.append(given[-1]) or facts)
    for mib, gib in (("8192", 8), ("1", 4)):
        monkeypatch.setenv("HALFEVEN_MAX_UPLOAD_MIB", mib)
        assert CliRunner().invoke(app, ["reproduce", "net@2", "--store", str(store.root)]).exit_code == 0
        assert asked.pop() == gib << 30
