"""Two keys with disjoint models on one whole server: nothing of the one is told to the other, or changed by it.

Every route with every method, other spellings, versions and what a route may be given, and every call of gRPC, are
asked with the first key about the second one's model, files, jobs and events. Told is a word that is of the second key
and was not in the request itself.
"""

import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from halfeven.models.errors import EngineFailed
from halfeven.models.store.store import Store
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.keys import SCOPES, KeyFile
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord, JobRequest
from halfeven.serve.finetune.jobs.training_request import NEEDED
from halfeven.serve.grpc.calls import CALLS
from halfeven.serve.grpc.grpc_server import GrpcServer
from halfeven.serve.http.routes.infer import InferFront
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings

from tests.serve.conftest import ASKED, started
from tests.serve.http.route_table import routes
from tests.serve.versions.traffic.conftest import Versions, publish, spec
from tests.serve.versions.traffic.conftest import versions as versions
from tests.specs import tensor

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ALIASES = ("{}", "{}/", "{}?limit=2&after=nothing", "{}%20", "//localhost{}")
MINE, THEIRS, FAILING = "marten", "otter", "otterpup"  # models; the last one never becomes ready
BYTES = b"the same bytes from both"
SECONDS = 30


@dataclass(frozen=True)
class Owned:
    """The objects of one key on the server."""

    key: str
    key_id: str
    model: str
    file: str
    job: str
    idempotency_key: str


class Watched:
    """A server with two limited keys, and what each of them has."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "store")
        for name in (MINE, THEIRS, FAILING):
            published = [publish(self.store, of=spec(name=name)) for _ in range(3 if name == FAILING else 2)]
            self.store.promote(published[-1])
        self.keys = KeyFile(self.store.root / "keys.json")
        made = {name: self.keys.add(f"{name}-key", SCOPES, [name, f"{name}pup"]) for name in (MINE, THEIRS)}
        self.job_store = JobStore(self.store.root / "halfeven.db")
        (self.store.root / "files").mkdir()
        self.mine, self.theirs = (self._owned(name, *made[name]) for name in (MINE, THEIRS))
        # A file and a job from before the server had keys.
        before = self.job_store.add_file(FileRecord("file-before", "0" * 64, 9, "rows.npz", 1))
        older = JobRequest(MINE, MINE, 1, before.id, {"n_epochs": 2}, 3)
        self.older = self.job_store.create_job(older)[0].id
        self.job_store.request_pause(self.older)
        self.front, self.roster = build(read_settings(store=self.store.root, device="cpu"), self.store)

    def _owned(self, name: str, key: str, record: Any) -> Owned:
        """A file and a paused job, as the routes make them."""
        sha256 = hashlib.sha256(BYTES).hexdigest()
        (self.store.root / "files" / sha256).write_bytes(BYTES)
        named = FileRecord(f"file-of-{name}", sha256, len(BYTES), "rows.npz", 1, owner=record.id)
        file = self.job_store.add_file(named)
        asked = {"model": name, "training_file": file.id, "suffix": f"{name}-suffix"}
        request = JobRequest(
            name,
            name,
            1,
            file.id,
            {"n_epochs": 2},
            3,
            metadata={"of": f"{name}-metadata"},
            asked=asked,
            owner=record.id,
        )
        job, _ = self.job_store.create_job(request, "the same idempotency key")
        self.job_store.request_pause(job.id)
        self.job_store.record(job.id, "info", f"{name}-event")
        return Owned(key, record.id, name, file.id, job.id, "the same idempotency key")

    def words_of(self, owned: Owned) -> set[str]:
        """The words that the other key must not be told: names and identifiers, in lower case."""
        return {owned.model, owned.key_id, owned.file, owned.job.removeprefix("ftjob-")}

    def state_of(self, owned: Owned) -> Any:
        """The objects of the key, as they are stored and served."""
        model = self.store.root / "models" / owned.model
        files = {
            str(path.relative_to(model)): path.read_bytes()
            for path in sorted(model.rglob("*"))
            if path.is_file() and path.name != ".promoting"
        }
        rows = [
            self.job_store.file(owned.file),
            self.job_store.job(owned.job),
            self.job_store.events(owned.job, limit=100),
            self.job_store.replayed(
                owned.idempotency_key,
                {"model": owned.model, "training_file": owned.file, "suffix": f"{owned.model}-suffix"},
                owned.key_id,
            ),
        ]
        served = self.roster.served(owned.model)
        assert served is not None
        loaded = [(one.number, label) for one, label in served.traffic.loaded_versions().items()]
        return files, rows, loaded, {path.name for path in (self.store.root / "files").iterdir()}


@pytest.fixture
def watched(tmp_path: Path, versions: Versions) -> Iterator[tuple[Watched, str, str]]:
    """The server, its address, and its address for gRPC."""
    versions.refuse[3] = EngineFailed(f"{FAILING}: a fault that names the model")
    made = Watched(tmp_path)
    beside = GrpcServer(made.front, made.roster, "127.0.0.1", 0)
    with started(made.front, seconds=SECONDS, beside=beside) as server:
        made.roster.wait(60)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield made, f"127.0.0.1:{port}", f"127.0.0.1:{beside.port}"
    made.job_store.close()


def bodies(other: Owned) -> Iterator[str]:
    """The bodies of orders about the other key's objects."""
    yield ""
    yield "version=1&percent=50"  # a form of a page
    for asked in (
        {},
        {"model": other.model, "training_file": other.file},
        {"model": f"{other.model}@1", "training_file": other.file, "validation_file": other.file},
        {"version": 1, "percent": 50},
        {"ready": True},
        ASKED,
        {"instances": [[1, 2, 3, 4]]},
    ):
        yield json.dumps(asked)


def paths(front: InferFront, mine: Owned, other: Owned) -> Iterator[tuple[str, str]]:
    """(method, path) of every route, filled with the objects of both, in several spellings."""
    for method, route in routes(front):
        filled = {route}
        for place in dict.fromkeys(re.findall(r"\{(\w+)(?::path)?\}", route)):
            values = {
                "m": (other.model, "nothing", mine.model, FAILING),
                "v": ("1", "2", "99", "stable"),
                "id": (other.file, other.job, "nothing"),
            }.get(place, ("1",))
            pattern = re.compile(rf"\{{{place}(?::path)?\}}")
            filled = {pattern.sub(value, one) for one in filled for value in values}
        yield from ((method, path) for path in sorted(filled))


def leaked(words: set[str], asked: str, answer: str) -> set[str]:
    return {word for word in words if word in answer.lower() and word not in asked.lower()}


@contextmanager
def caller(address: str, key: str) -> Iterator[Any]:
    """A function that sends one request, as a page of the server's own does: (status, all that was answered)."""

    def ask(method: str, path: str, body: str = "", **more: str) -> tuple[int, str]:
        sent = {"authorization": f"Bearer {key}", "origin": f"http://{address}"}
        sent |= {"content-type": "application/json", **more}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        return answer.status, str(answer.headers) + answer.read().decode(errors="replace")

    with closing(http.client.HTTPConnection(address, timeout=SECONDS)) as connection:
        yield ask


@pytest.mark.slow(seconds=7)
def test_no_route_tells_or_changes_anything_of_another_key(watched: tuple[Watched, str, str]) -> None:
    server, address, _ = watched
    mine, other = server.mine, server.theirs
    before, words, leaks, probes = server.state_of(other), server.words_of(other), [], 0
    with caller(address, mine.key) as ask:
        for method, path in paths(server.front, mine, other):
            orders = list(bodies(other)) if method in ("POST", "DELETE") else [""]
            spellings = [(method, alias.format(path), body) for body in orders for alias in ALIASES[:3]]
            spellings += [(method, alias.format(path), "") for alias in ALIASES[3:]]
            spellings += [(one, path, "") for one in METHODS if one != method]
            for one, spelling, body in spellings:
                if mine.model in spelling and one != "GET":
                    continue  # an order about one's own model is carried out
                probes += 1
                status, answer = ask(one, spelling, body, **{"idempotency-key": other.idempotency_key})
                if found := leaked(words, spelling + body, answer):
                    leaks.append((one, spelling, body, status, found))
    assert leaks == []
    assert server.state_of(other) == before
    print(f"{probes} HTTP probes")
    assert probes > 2500


def _trainable(store: Store) -> str:
    """One more version of the first key's model: with files that the trainer needs."""
    of = replace(spec(name=MINE), outputs=(tensor("y", "FP32", -1, 4, kind="logits"),))
    with store.draft(MINE) as draft:
        draft.write_json("spec.json", of.to_json())
        for file in NEEDED:
            (draft.folder / file).write_bytes(b"for the trainer")
        return f"{MINE}@{draft.publish('live', {'model': MINE}).number}"


@pytest.mark.slow
def test_another_key_s_job_and_file_are_not_found_and_its_model_is_forbidden(
    watched: tuple[Watched, str, str],
) -> None:
    server, address, _ = watched
    mine, other = server.mine, server.theirs
    asked = [one for one in paths(server.front, mine, other) if other.job in one[1] or other.file in one[1]]
    asked += [
        ("GET", f"/v1/files?after={other.file}"),
        ("GET", f"/v1/fine_tuning/jobs?after={other.job}"),
    ]
    assert len(asked) >= 13
    with caller(address, mine.key) as ask:
        assert [one for one in asked if ask(*one)[0] != 404] == []
        trainable = _trainable(server.store)
        for model, file, status in (
            (trainable, other.file, 404),
            (f"{other.model}@1", mine.file, 403),
            (7, mine.file, 400),
        ):
            job = json.dumps({"model": model, "training_file": file})
            assert ask("POST", "/v1/fine_tuning/jobs", job)[0] == status
        jobs = ask("GET", "/v1/fine_tuning/jobs")[1]
        assert mine.job in jobs and server.older not in jobs


@pytest.mark.slow
def test_the_same_idempotency_key_and_the_same_bytes_do_not_meet(watched: tuple[Watched, str, str]) -> None:
    server, address, _ = watched
    mine, other = server.mine, server.theirs
    before = server.state_of(other)
    for one in (mine, other):
        job = {"model": one.model, "training_file": one.file, "suffix": f"{one.model}-suffix"}
        with caller(address, one.key) as ask:
            asked = {"idempotency-key": one.idempotency_key}
            status, answer = ask("POST", "/v1/fine_tuning/jobs", json.dumps(job), **asked)
        assert status == 200 and one.job in answer
    form = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        '--b\r\nContent-Disposition: form-data; name="expires_after[anchor]"\r\n\r\ncreated_at\r\n'
        '--b\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600\r\n'
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="rows.npz"\r\n\r\n{BYTES.decode()}\r\n--b--\r\n'
    )
    with caller(address, mine.key) as ask:
        status, answer = ask("POST", "/v1/files", form, **{"content-type": "multipart/form-data; boundary=b"})
        assert status == 200 and mine.file not in answer and other.file not in answer, "each upload is a file"
        uploaded = json.loads(answer[answer.index("{") :])["id"]
        status, answer = ask("GET", "/v1/files")
        assert status == 200 and mine.file in answer and uploaded in answer and other.file not in answer
        expiries = [
            server.job_store.file(one).expires_at is None for one in (uploaded, mine.file, other.file)
        ]
        assert expiries == [False, True, True], "each file has its own"
        status, answer = ask("DELETE", f"/v1/files/{mine.file}")
        assert status == 400 and mine.job in answer, "its own job needs it"
        assert ask("POST", f"/v1/fine_tuning/jobs/{mine.job}/cancel")[0] == 200
        assert ask("DELETE", f"/v1/files/{mine.file}")[0] == 200
    with caller(address, other.key) as ask:
        assert ask("GET", f"/v1/files/{other.file}/content")[1].endswith(BYTES.decode())
    assert server.state_of(other) == before


def test_a_key_that_is_made_under_the_name_of_a_revoked_one_sees_nothing_of_it(
    watched: tuple[Watched, str, str],
) -> None:
    server, address, _ = watched
    server.keys.revoke(f"{THEIRS}-key")
    key, _ = server.keys.add(f"{THEIRS}-key", SCOPES, [THEIRS])
    front: Any = server.front
    front.access = AccessControl(server.keys)
    with caller(address, key) as ask:
        for path in ("/v1/files", "/v1/fine_tuning/jobs"):
            status, answer = ask("GET", path)
            assert status == 200 and '"data":[]' in answer
        assert ask("GET", f"/v1/fine_tuning/jobs/{server.theirs.job}")[0] == 404


@pytest.mark.slow
def test_an_operator_s_key_sees_all_and_readiness_names_to_each_its_own(
    watched: tuple[Watched, str, str],
) -> None:
    server, address, _ = watched
    operator, _ = server.keys.add("operator", SCOPES)
    front: Any = server.front
    front.access = AccessControl(server.keys)
    server.roster._readiness.started([FAILING], [FAILING])  # as if it had been ready at the start
    seen = {}
    for name, key in (("operator", operator), ("mine", server.mine.key), ("theirs", server.theirs.key)):
        with caller(address, key) as ask:
            status, answer = ask("GET", "/v2/health/ready")
            assert status == 503
            seen[name] = FAILING in answer
    assert seen == {"operator": True, "mine": False, "theirs": True}
    with caller(address, operator) as ask:
        for path in ("/v1/files", "/v1/fine_tuning/jobs"):
            answer = ask("GET", path)[1]
            assert MINE in answer and THEIRS in answer
        assert server.older in ask("GET", "/v1/fine_tuning/jobs")[1]


@pytest.mark.slow
def test_no_call_of_grpc_tells_or_changes_anything_of_another_key(watched: tuple[Watched, str, str]) -> None:
    server, _, address = watched
    mine, other = server.mine, server.theirs
    before, words, leaks, probes = server.state_of(other), server.words_of(other), [], 0
    metadata = (("authorization", f"Bearer {mine.key}"), ("endpoint-load-metrics-format", "JSON"))
    with grpc.insecure_channel(address) as channel:
        for name, call in CALLS.items():
            for model in (other.model, "nothing", FAILING, ""):
                for version in ("", "1", "99", "stable"):
                    request = call.request()
                    for field in ("name", "model_name"):
                        if hasattr(request, field):
                            setattr(request, field, model)
                    for field in ("version", "model_version"):
                        if hasattr(request, field):
                            setattr(request, field, version)
                    probes += 1
                    asked = channel.stream_stream(f"/inference.GRPCInferenceService/{name}")
                    sent = asked(iter([request.SerializeToString()]), timeout=SECONDS, metadata=metadata)
                    try:
                        answer = b"".join(sent).decode(errors="replace")
                    except grpc.RpcError as error:
                        answer = str(error.details())
                    answer += str(sent.trailing_metadata())
                    if found := leaked(words, model, answer):
                        leaks.append((name, model, version, found))
    assert leaks == [] and server.state_of(other) == before
    print(f"{probes} gRPC probes")
    assert probes > 150
