"""The one table: each error of ours has a status, an exit code and a body; a stranger's does not speak."""

import errno
import json
from pathlib import Path

import pytest
from halfeven.models import errors
from halfeven.models.store.store import Store
from halfeven.serve.finetune.jobs.choices.hyperparameter_table import bad
from halfeven.serve.http.error_mapping import (
    NotOffered,
    SlowBody,
    body_of,
    exit_code_of,
    hidden_folders,
    message_of,
    retry_after_of,
    status_of,
    without_folders,
)


def descendants(kind: type[Exception]) -> list[type[Exception]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in descendants(child))]


EXPECTED = {
    errors.BadInput: (400, 2),
    errors.BadFolder: (400, 2),
    errors.BadSamples: (400, 2),
    errors.BadRequest: (400, 2),
    errors.BadSetting: (400, 2),
    errors.TooLarge: (413, 2),
    errors.UnknownName: (404, 2),
    errors.Conflict: (409, 2),
    errors.Unauthenticated: (401, 2),
    errors.Forbidden: (403, 2),
    errors.KeyLimitReached: (429, 1),
    NotOffered: (501, 2),
    SlowBody: (408, 2),
    errors.CannotConvert: (422, 4),
    errors.CaptureFailed: (422, 4),
    errors.ExportFailed: (422, 4),
    errors.OutOfTime: (422, 4),
    errors.ParityRefused: (422, 3),
    errors.StoreError: (500, 1),
    errors.DamagedFile: (500, 1),
    errors.StoreUnusable: (500, 2),
    OSError: (500, 2),
    errors.CannotServe: (503, 1),
    errors.Overloaded: (503, 1),
    errors.NotReady: (503, 1),
    errors.EngineFailed: (500, 1),
    KeyError: (500, 1),
    KeyboardInterrupt: (500, 1),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_error_has_its_status_and_its_exit_code(kind: type[BaseException]) -> None:
    error = kind("words")
    assert (status_of(error), exit_code_of(error)) == EXPECTED[kind]


def test_every_leaf_of_the_tree_has_a_code_of_its_own_and_both_bodies() -> None:
    kinds = [kind for kind in descendants(errors.HalfevenError) if kind.__module__.startswith("halfeven")]
    codes = [kind("").code for kind in kinds if issubclass(kind, errors.HalfevenError)]
    assert len(set(codes)) == len(codes) > 15
    for kind in kinds:
        v2, _ = body_of(kind("what was wrong"), "/v2/models/m")
        assert json.loads(v2) == {"error": "what was wrong"}
        problem, content_type = body_of(kind("what was wrong"), "/v1/models/m")
        assert content_type == "application/problem+json"
        assert json.loads(problem)["detail"] == "what was wrong"
        assert json.loads(problem)["status"] == status_of(kind(""))


def test_the_protocol_s_form_is_for_its_paths_only() -> None:
    error = errors.UnknownName("x")
    assert body_of(error, "/v2")[1] == body_of(error, "/v2/x")[1] == "application/json"
    assert body_of(error, "/v2x")[1] == "application/problem+json"


def test_a_stranger_s_error_is_not_shown_to_callers() -> None:
    for path in ("/v2/models", "/v1/models"):
        body, _ = body_of(KeyError("/secret/path"), path)
        assert b"secret" not in body and b"bug in halfeven" in body


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/srv/my-store/models/net/3/half.pt2 is damaged", "half.pt2 is damaged"),
        ("failed to load 'net', '/srv/x.json': gone", "failed to load 'net', 'x.json': gone"),
        ("see GET /v1/models/net/versions and /v2/health/ready", None),
        ("expected image/png, or https://host/a/b; 3/4 of …/infer, /metrics", None),
    ],
)
def test_a_message_names_files_and_not_their_folders(text: str, shown: str | None) -> None:
    assert json.loads(body_of(errors.DamagedFile(text), "/v2/x")[0])["error"] == (shown or text)


def test_only_a_full_queue_says_when_to_come_back_in_whole_seconds() -> None:
    assert retry_after_of(errors.Overloaded("full", 2.1)) == 3
    assert retry_after_of(errors.Overloaded("full", 0.001)) == 1
    assert retry_after_of(errors.NotReady("starting")) is None
    assert retry_after_of(KeyError()) is None


def test_a_message_that_quotes_an_endless_name_is_cut() -> None:
    body, _ = body_of(errors.BadRequest("no input " + "x" * 10**6), "/v2/models")
    assert body.startswith(b'{"error":"no input xxx') and len(body) < 5000


@pytest.mark.parametrize("length", [201, 100_000])
def test_a_long_name_does_not_come_back_whole(length: int) -> None:
    for name in ("x" * length, "a b " * length, "é" * length):
        said = message_of(errors.UnknownName(f"Request for unknown model: '{name}' is not found"))
        assert len(said) < 300 and said.startswith("Request for unknown model: '") and "…" in said
        body, _ = body_of(bad(name, "unknown"), "/v1/fine_tuning/jobs")
        assert len(body) < 10_000, "the parameter's name comes back too"
    said = message_of(errors.BadInput(f"the caller's text: {'word ' * 100}and the model's end"))
    assert said.endswith("and the model's end"), "apostrophes quote nothing"


def test_a_sentence_of_another_protocol_names_the_models_that_its_reader_may_see() -> None:
    error = errors.UnknownName.of_model(
        "doubel", ["double", "secret"], "Request for unknown model: '{}' is not found"
    )
    said = message_of(error, lambda model: model == "double")
    assert said == "Request for unknown model: 'doubel' is not found: it has ['double']"
    assert message_of(error) == "Request for unknown model: 'doubel' is not found"


def test_a_store_that_was_named_from_the_servers_folder_is_not_told_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UnknownName) as refused:
        Store(Path("data/production/models")).rollback("net")
    assert message_of(refused.value) == "no model 'net' in the store"


@pytest.mark.parametrize("root", ["/store", "/srv/models/digits-of-ann", "/srv/my models/store"])
def test_no_part_of_the_store_s_folder_is_told(root: str) -> None:
    error = errors.UnknownName.of_model("net", ["other"], f"no model '{{}}' in the store {root}")
    assert message_of(error, lambda _: True) == "no model 'net' in the store: it has ['other']"


@pytest.mark.parametrize(
    "root", ["/store", "/srv/digits of ann/my store", "/srv/a (copy), 'old': x", f"/srv/{'long' * 60}"]
)
def test_no_part_of_a_folder_of_the_server_is_told_whatever_its_name(root: str) -> None:
    another = f"another store is {root}-2, see /v2/models/net"
    as_ever = without_folders(another)
    with hidden_folders((None, Path(root))):
        assert without_folders(another) == as_ever
        for text, expected in (
            (f"the store {root} has no model yet", "the store has no model yet"),
            (f"this server only reads the store {root}; do it", "this server only reads the store; do it"),
            (f"{root}/models/net/1/half.pt2 is damaged", "half.pt2 is damaged"),
            (f"failed to load 'net', {root}/models/net/live: gone", "failed to load 'net', live: gone"),
            (f"it lies in {root}. Convert it", "it lies in. Convert it"),
        ):
            assert without_folders(text) == message_of(errors.BadInput(text)) == expected


def test_a_full_disk_says_how_much_is_free_only_where_it_is_known_of_which_disk(tmp_path: Path) -> None:
    named = message_of(OSError(errno.ENOSPC, "full", str(tmp_path / "live")))
    of_a_handle = message_of(OSError(errno.ENOSPC, "full"))
    assert named.startswith("live cannot be written, its disk is full (") and "bytes are free there" in named
    assert of_a_handle.startswith(
        "a file of the server cannot be written, its disk is full: nothing was changed"
    )
