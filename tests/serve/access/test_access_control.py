"""Admission by key, scope, model and limits, with a file that changes while the server runs."""

import base64
import logging
from pathlib import Path

import pytest
from halfeven.models.errors import Forbidden, KeyLimitReached, NotReady, Unauthenticated
from halfeven.serve.access.access_control import LOOK_EVERY_S, NO_KEY, AccessControl
from halfeven.serve.access.keys import EVERY_MODEL, KeyFile

from tests.serve.clock import Clock

INFER, MANAGE = frozenset(("infer",)), frozenset(("manage",))


@pytest.fixture
def clock() -> Clock[float]:
    return Clock(1000.0)


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def bearer(key: str) -> str:
    return f"Bearer {key}"


def test_without_a_file_no_key_is_needed_and_the_first_key_closes_the_running_server(
    file: KeyFile, clock: Clock[float]
) -> None:
    access = AccessControl(file, clock=clock)
    opened = access.admit(None, MANAGE, EVERY_MODEL)
    assert (opened.owner, opened.owners, opened.known, opened.stands()) == ("", None, True, True)
    key, _ = file.add("ci", ["infer"])
    clock.now += LOOK_EVERY_S
    assert not opened.stands(), "what it still reads ends"
    with pytest.raises(Unauthenticated, match="needs a key"):
        access.admit(None, INFER, "digits")
    access.admit(bearer(key), INFER, "digits")


@pytest.mark.parametrize("loss", ["removed", "damaged"])
def test_a_server_that_had_keys_stays_closed_where_the_file_is_gone_or_cannot_be_read(
    file: KeyFile, clock: Clock[float], loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    key, _ = file.add("ci", ["infer"])
    kept = file.path.read_bytes()
    access = AccessControl(file, clock=clock)
    file.path.unlink()
    if loss == "damaged":
        file.path.write_text("{")
    clock.now += LOOK_EVERY_S
    with caplog.at_level(logging.ERROR), pytest.raises((Unauthenticated, NotReady)) as refused:
        access.admit(bearer(key), INFER, "digits")
    assert str(file.path) not in str(refused.value) and str(file.path) in caplog.text
    with pytest.raises((Unauthenticated, NotReady)):
        access.admit(None, INFER, "digits")
    file.path.unlink(missing_ok=True)
    clock.now += LOOK_EVERY_S
    with pytest.raises((Unauthenticated, NotReady)):
        access.admit(None, INFER, "digits")
    file.path.write_bytes(kept)
    clock.now += LOOK_EVERY_S
    access.admit(bearer(key), INFER, "digits")


def test_where_keys_are_needed_and_no_file_is_there_nothing_is_admitted(
    file: KeyFile, clock: Clock[float]
) -> None:
    access = AccessControl(file, needed=True, clock=clock)
    with pytest.raises(Unauthenticated):
        access.admit(None, INFER, "digits")


def test_a_key_is_taken_as_bearer_and_as_the_password_that_a_browser_sends(
    file: KeyFile, clock: Clock[float]
) -> None:
    key, _ = file.add("ci", ["infer"])
    access = AccessControl(file, clock=clock)
    password = base64.b64encode(f"any:{key}".encode()).decode()
    for good in (bearer(key), f"bearer   {key} ", f"Basic {password}", f"BASIC {password}"):
        access.admit(good, INFER, None)
    user = base64.b64encode(key.encode()).decode()
    wrong = ["", key, "Bearer", "Bearer ", f"Digest {key}", f"Basic {key}", "Basic ////", f"Basic {user}"]
    wrong += [
        f"Bearer {key} {key}",
        f"Bearer {key},",
        "Bearer " + "x" * 10_000_000,
        "Bearer \udcff\x00é",
        "Basic é",
    ]
    for bad in wrong:
        with pytest.raises(Unauthenticated):
            access.admit(bad, INFER, None)


def test_a_key_does_what_its_scopes_say_for_its_models_alone(file: KeyFile, clock: Clock[float]) -> None:
    every, _ = file.add("every", ["infer"])
    one, _ = file.add("one", ["infer", "manage"], ["digits"])
    access = AccessControl(file, clock=clock)
    for key, scopes, model in ((every, INFER, "x"), (every, INFER, EVERY_MODEL), (one, MANAGE, "digits")):
        access.admit(bearer(key), scopes, model)
    with pytest.raises(Forbidden, match="'every' has the scopes infer, and this needs manage"):
        access.admit(bearer(every), MANAGE, "digits")
    for model in ("other", EVERY_MODEL, "digits "):
        with pytest.raises(Forbidden, match="'one' is for digits"):
            access.admit(bearer(one), INFER, model)
    permit = access.admit(bearer(one), INFER, None)
    permit.check(INFER, "digits")
    with pytest.raises(Forbidden):
        permit.check(INFER, "other")


def test_what_needs_no_key_knows_the_callers_that_have_one(file: KeyFile, clock: Clock[float]) -> None:
    key, _ = file.add("ci", ["metrics"])
    access = AccessControl(file, clock=clock)
    said = [access.admit(sent, NO_KEY, None).known for sent in (None, "Bearer x", bearer(key))]
    assert said == [False, False, True]


def test_a_rate_admits_one_second_s_requests_at_once_and_then_as_many_as_it_says(
    file: KeyFile, clock: Clock[float]
) -> None:
    key, _ = file.add("ci", ["infer"], rate=4.0)
    access = AccessControl(file, clock=clock)
    for _ in range(4):
        access.admit(bearer(key), INFER, None)
    with pytest.raises(KeyLimitReached, match="4 requests per second") as refused:
        access.admit(bearer(key), INFER, None)
    assert refused.value.retry_after_s == pytest.approx(0.25)
    clock.now += 0.25
    access.admit(bearer(key), INFER, None)
    with pytest.raises(KeyLimitReached):
        access.admit(bearer(key), INFER, None)
    clock.now += 3600
    for _ in range(4):
        access.admit(bearer(key), INFER, None)
    with pytest.raises(KeyLimitReached):
        access.admit(bearer(key), INFER, None)


def test_requests_at_once_are_counted_until_each_has_ended_once(file: KeyFile, clock: Clock[float]) -> None:
    key, _ = file.add("ci", ["infer"], concurrency=2)
    other, _ = file.add("other", ["infer"], concurrency=2)
    access = AccessControl(file, clock=clock)
    first, _second = (access.admit(bearer(key), INFER, None) for _ in range(2))
    with pytest.raises(KeyLimitReached, match="2 at once"):
        access.admit(bearer(key), INFER, None)
    access.admit(bearer(other), INFER, None)
    first.close()
    first.close()
    access.admit(bearer(key), INFER, None)
    with pytest.raises(KeyLimitReached):
        access.admit(bearer(key), INFER, None)


def test_limits_are_kept_where_another_key_of_the_file_changes(file: KeyFile, clock: Clock[float]) -> None:
    key, _ = file.add("ci", ["infer"], concurrency=1)
    access = AccessControl(file, clock=clock)
    access.admit(bearer(key), INFER, None)
    file.add("other", ["infer"])
    clock.now += LOOK_EVERY_S
    with pytest.raises(KeyLimitReached):
        access.admit(bearer(key), INFER, None)


def test_what_closes_a_server_is_said_at_the_start_and_logged_while_it_runs(
    file: KeyFile, clock: Clock[float], caplog: pytest.LogCaptureFixture
) -> None:
    access = AccessControl(file, clock=clock)
    assert access.notice is None
    file.add("ci", ["infer"])
    clock.now += LOOK_EVERY_S
    with caplog.at_level(logging.WARNING), pytest.raises(Unauthenticated):
        access.admit(None, INFER, None)
    assert "requests need a key" in caplog.text and "has 1" in (access.notice or "")
    assert "has 1" in (AccessControl(file, clock=clock).notice or "")
    caplog.clear()
    file.revoke("ci")
    clock.now += LOOK_EVERY_S
    with caplog.at_level(logging.WARNING), pytest.raises(Unauthenticated):
        access.admit(None, INFER, None)
    for said in (caplog.text, access.notice or "", AccessControl(file, clock=clock).notice or ""):
        assert "has no key: every request is refused" in said and "remove the file and start again" in said
