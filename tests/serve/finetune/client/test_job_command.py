"""``halfeven finetune`` against a small server that speaks the job API and follows a script."""

import io
import json
import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadInput, CannotServe, NotReady, TooLarge
from halfeven.serve.finetune.client import remote as client
from halfeven.serve.finetune.client.dry_run import dry_run_exit_code, dry_run_sentences
from halfeven.serve.finetune.client.job_command import (
    PATIENCE_S,
    POLL_S,
    create_job,
    described,
    exit_code,
    fine_tune,
    measured,
    sentence_of,
)
from halfeven.serve.finetune.client.remote import JOBS, Remote
from halfeven.serve.finetune.jobs.trial_run import LIMIT_REACHED, TOO_SLOW
from rich.console import Console

from tests.serve.finetune.client.scripted import Answer, Clock, Script, speaking, state, succeeded


def failed(code: str, message: str, **more: Any) -> Answer:
    return state("failed", error={"code": code, "message": message, "param": None}, **more)


@dataclass
class Run:
    facts: dict[str, Any]
    said: list[str]
    shown: str


def run(script: Script, file: Path, clock: Clock | None = None, terminal: bool = True, **options: Any) -> Run:
    clock, said = clock or Clock(), []
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with speaking(script) as url:
        facts = fine_tune(
            url,
            "digits",
            file,
            notify=said.append,
            console=screen,
            clock=lambda: clock.now,
            sleep=clock.sleep,
            **options,
        )
    assert isinstance(screen.file, io.StringIO)
    return Run(facts, said, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue()))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Random bytes of more than two chunks."""
    file = tmp_path / 'da"ta\n.safetensors'
    file.write_bytes(np.random.default_rng().bytes(2**21 + 77))
    return file


def test_the_metrics_are_shown_before_and_after() -> None:
    def scored(**metrics: float | None) -> dict[str, Any]:
        return {"held_out": {"logits": {"metrics": metrics}}}

    gate = {
        "active": scored(f1=0.086, auroc=None),
        "forms": {"torch": scored(f1=0.978, auroc=0.99), "original": {}},
    }
    words = measured(gate)
    assert (
        words
        == "; on the held-out rows f1 of 'logits' 0.086 → 0.978; on the held-out rows auroc of 'logits' – → 0.99"
    )
    assert measured(None) == measured({"passed": True}) == ""


def test_what_is_remarkable_about_the_data_is_written_at_once(data: Path) -> None:
    status, job = state("queued")
    assert isinstance(job, dict)
    job["halfeven"]["findings"] = ["the rows to train on lack 2 of the 10 classes"]
    assert (
        "note: the rows to train on lack 2 of the 10 classes"
        in run(Script(creation=[(status, job)]), data).said
    )


def test_the_file_arrives_byte_for_byte_and_the_job_names_it(data: Path) -> None:
    script = Script()
    ended = run(script, data, suffix="mine", seed=3, hyperparameters={"n_epochs": 2, "batch_size": None})
    (body,) = script.bodies("POST", "/v1/files")
    (headers,) = script.headers("POST", "/v1/files")
    boundary = headers["content-type"].partition("boundary=")[2].encode()
    parts = body.split(b"--" + boundary)
    assert b'name="purpose"' in parts[1] and parts[1].strip().endswith(b"fine-tune")
    head, _, content = parts[2].partition(b"\r\n\r\n")
    assert b'filename="da%22ta%0A.safetensors"' in head
    assert content == data.read_bytes() + b"\r\n"
    assert parts[3] == b"--\r\n" and len(parts) == 4
    (created,) = script.bodies("POST", JOBS)
    expected = {"model": "digits", "training_file": "file-1", "suffix": "mine", "seed": 3}
    assert json.loads(created) == {**expected, "hyperparameters": {"n_epochs": 2}}
    assert ended.facts["fine_tuned_model"] == "digits@2"
    assert exit_code(ended.facts) == 0


def test_a_validation_file_is_sent_too(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    other.write_bytes(b"")
    script = Script()
    run(script, data, validation=other)
    assert len(script.bodies("POST", "/v1/files")) == 2
    assert json.loads(script.bodies("POST", JOBS)[0])["validation_file"] == "file-1"


def test_the_numbers_of_the_running_job_are_shown_and_so_is_each_stage_after_it(data: Path) -> None:
    progress = {
        "step": 41,
        "total_steps": 120,
        "loss": 0.61234,
        "scale": 32768.0,
        "skipped": 3,
        "eta_seconds": 62,
    }
    line = described(state("running", progress=progress)[1])  # type: ignore[arg-type]
    numbers = "step 41/120 · loss 0.6123 · scale 32768 · skipped 3 · 1 min 02 s left"
    assert line == ("training", numbers, 41, 120)
    done = {**progress, "step": 120, "eta_seconds": None}
    last = [state("running", "proving", progress=done), succeeded()]
    proving = run(Script(states=[state("running", progress=progress), *last]), data)
    assert numbers in proving.shown and "training" in proving.shown
    assert "proving" in proving.shown.partition(numbers)[2]
    assert described(last[0][1])[:2] == ("proving", "step 120/120 · loss 0.6123 · scale 32768 · skipped 3")  # type: ignore[arg-type]


def test_without_a_terminal_each_stage_and_each_tenth_of_the_steps_is_a_line(data: Path) -> None:
    at = [{"step": step, "total_steps": 100, "loss": 1.0} for step in (0, 3, 7, 10, 15, 100)]
    training = [state("running", progress=progress) for progress in at]
    last = [state("running", "proving", progress=at[-1]), succeeded()]
    lines = run(Script(states=[*training, *last]), data, terminal=False).shown.splitlines()
    assert [line.partition(" ·")[0] for line in lines[:2]] == ["sending", "queued"]
    assert [line.partition(" ·")[0] for line in lines[2:]] == [
        "training: step 0/100",
        "training: step 10/100",
        "training: step 100/100",
        "proving: step 100/100",
        "succeeded",
    ]


def test_what_is_on_the_screen_in_the_end_is_the_last_state(data: Path) -> None:
    progress = {"step": 120, "total_steps": 120, "loss": None, "scale": 1.0, "skipped": 99}
    ended = run(Script(states=[failed("SCALE_COLLAPSE", "at its floor", progress=progress)]), data)
    assert "failed" in ended.shown and "loss – · scale 1 · skipped 99" in ended.shown


@pytest.mark.parametrize("passed", [False, None])
def test_a_job_that_parity_or_the_gate_refused_ends_with_exit_3_and_the_gates_numbers(
    data: Path, passed: bool | None
) -> None:
    gate = None if passed is None else {"passed": False, "tolerance": 0.02}
    code = "PARITY_REFUSED" if passed is None else "WHATEVER_THE_GATE_SAYS"
    ended = run(Script(states=[state("running"), failed(code, "accuracy fell", gate=gate)]), data)
    assert exit_code(ended.facts) == 3
    assert ended.facts["gate"] == gate
    assert "accuracy fell" in sentence_of(ended.facts)


def test_a_held_job_ends_with_exit_3_and_says_what_to_do(data: Path) -> None:
    promotion = {
        "state": "held",
        "code": "NO_JUDGING_SET",
        "message": "digits@2 is held: give a validation file",
    }
    _, job = succeeded()
    assert isinstance(job, dict)
    held = {**job, "halfeven": {**job["halfeven"], "promotion": promotion}}
    ended = run(Script(states=[(200, held)]), data)
    assert exit_code(ended.facts) == 3
    assert ended.facts["promotion"] == promotion
    assert sentence_of(ended.facts).startswith("digits@2 is held: give a validation file; its page: http")


@pytest.mark.parametrize(("code", "expected"), [("BAD_DATA", 2), ("OUT_OF_MEMORY", 1), ("SCALE_COLLAPSE", 1)])
def test_other_failures_end_with_2_for_the_data_and_1_for_the_rest(
    data: Path, code: str, expected: int
) -> None:
    assert exit_code(run(Script(states=[failed(code, "no")]), data).facts) == expected


@pytest.mark.parametrize(
    "reply",
    [
        {"type": "about:blank", "status": 400, "detail": "rows 4, 9: not finite", "code": "bad_samples"},
        {"error": {"message": "rows 4, 9: not finite", "type": "invalid_request_error"}},
        {"error": "rows 4, 9: not finite"},
        b"rows 4, 9: not finite",
    ],
)
def test_a_refused_upload_ends_with_the_servers_own_words(data: Path, reply: object) -> None:
    script = Script(upload=(400, reply))
    with pytest.raises(BadInput, match="refused with 400: rows 4, 9: not finite"):
        run(script, data)
    assert not script.bodies("POST", JOBS), "no job without its file"


@pytest.mark.parametrize("size", [100, 2**24])
def test_a_server_that_refuses_before_it_has_read_the_file_is_still_heard(tmp_path: Path, size: int) -> None:
    file = tmp_path / "data.npz"
    file.write_bytes(b"x" * size)
    script = Script(upload=(413, {"detail": "at most 10 bytes"}), reads_uploads=False)
    with pytest.raises(TooLarge, match="at most 10 bytes"):
        run(script, file)


def test_a_refused_job_ends_with_the_servers_own_words(data: Path) -> None:
    script = Script(creation=[(400, {"detail": "learning_rate: expected 0 < x <= 1, got 7"})])
    with pytest.raises(BadInput, match="learning_rate"):
        run(script, data, hyperparameters={"learning_rate": 7})


def test_creating_again_after_a_lost_answer_uses_the_same_key(data: Path) -> None:
    script = Script(creation=[(0, b""), state("queued")])
    run(script, data)
    keys = [headers["idempotency-key"] for headers in script.headers("POST", JOBS)]
    assert len(keys) == 2 and len(set(keys)) == 1 and keys[0]


def test_a_server_that_reads_a_job_s_files_for_long_is_waited_for_and_not_called_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[tuple[float, str]]()

    def silent(url: str, body: bytes, headers: dict[str, str], timeout_s: float, *_: object) -> None:
        asked.append((timeout_s, headers.get("idempotency-key", "")))
        raise TimeoutError("timed out")

    monkeypatch.setattr(client, "answer_to", silent)
    remote = Remote("http://127.0.0.1:1")
    with pytest.raises(NotReady, match=r"no answer from .* within 1500 s; the job may still be created"):
        create_job(remote, {}, lambda seconds: None)
    assert len(asked) == 3 and len(set(asked)) == 1, "the same wish"
    with pytest.raises(NotReady, match=r"within 10 s; the server is busy, or cannot be reached"):
        remote.job("ftjob-1")


def interrupting(at: int) -> Clock:
    def interrupt(count: int) -> None:
        if count == at:
            raise KeyboardInterrupt

    return Clock(interrupt)


def test_ctrl_c_asks_the_server_to_cancel_and_says_so(data: Path) -> None:
    script = Script(states=[state("running")])
    ended = run(script, data, interrupting(at=3))
    assert len(script.bodies("POST", f"{JOBS}/ftjob-1/cancel")) == 1
    assert any("cancel job ftjob-1" in sentence for sentence in ended.said)
    assert ended.facts["status"] == "cancelled"
    assert exit_code(ended.facts) == 1


def test_a_job_that_does_not_stop_is_told_as_still_running_and_not_waited_for_without_end(data: Path) -> None:
    script = Script(states=[state("running")], cancelled=state("running"))
    ended = run(script, data, interrupting(at=1))
    assert ended.facts["status"] == "running"
    assert "still running" in ended.said[-1]
    assert exit_code(ended.facts) == 1


def test_a_job_that_succeeded_while_it_was_being_cancelled_is_told_as_it_is(data: Path) -> None:
    ended = run(Script(states=[state("running")], cancelled=succeeded()), data, interrupting(at=1))
    assert exit_code(ended.facts) == 0


@pytest.mark.slow
def test_a_server_that_is_away_for_a_moment_does_not_end_the_watching(data: Path) -> None:
    away = [(0, b"")] * (int(PATIENCE_S / POLL_S) - 2)
    ended = run(Script(states=[state("running"), *away, state("running"), *away, succeeded()]), data)
    assert exit_code(ended.facts) == 0


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_key_s_limit_or_a_server_that_refuses_for_a_moment_ends_no_watching(
    data: Path, status: int
) -> None:
    busy = (status, {"title": "busy", "detail": "too many requests; ask again later"})
    script = Script(creation=[busy, state("queued")], states=[state("running"), busy, busy, succeeded()])
    assert exit_code(run(script, data).facts) == 0
    with pytest.raises(NotReady, match=f"refused with {status}: too many requests"):
        run(Script(states=[state("running"), busy]), data)


@pytest.mark.slow
def test_a_server_that_stays_away_ends_the_watching_and_names_the_job(data: Path) -> None:
    clock = Clock()
    with pytest.raises(NotReady, match="ftjob-1 may still run"):
        run(Script(states=[state("running"), (0, b"")]), data, clock)
    assert PATIENCE_S <= clock.now < PATIENCE_S + 2


def test_not_following_returns_at_once_with_0(data: Path) -> None:
    clock = Clock()
    script = Script()
    ended = run(script, data, clock, follow=False)
    assert ended.facts["status"] == "queued" and clock.slept == 0
    assert exit_code(ended.facts, follow=False) == 0
    assert exit_code(ended.facts, follow=True) == 1


def test_a_folder_of_pictures_is_sent_as_a_tar(tmp_path: Path) -> None:
    script, folder = Script(), tmp_path / "insects"
    for name in ("ant/1.png", "bee/2.jpg", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    run(script, folder)
    (body,) = script.bodies("POST", "/v1/files")
    start = body.index(b"\r\n\r\n", body.index(b'filename="insects.tar"')) + 4
    with tarfile.open(fileobj=io.BytesIO(body[start:])) as archive:
        assert archive.getnames() == ["ant/1.png", "bee/2.jpg"]


def test_links_to_pictures_and_to_folders_of_them_are_sent_as_pictures(tmp_path: Path) -> None:
    stored, folder = tmp_path / "stored", tmp_path / "insects"
    (folder / "ant").mkdir(parents=True)
    stored.mkdir()
    (stored / "1.png").write_bytes(b"picture")
    (folder / "ant/hard.png").hardlink_to(stored / "1.png")
    (folder / "ant/other.png").hardlink_to(stored / "1.png")
    (folder / "ant/soft.png").symlink_to(stored / "1.png")
    (folder / "bee").symlink_to(stored)
    (stored / "endless").symlink_to(stored)
    script = Script()
    run(script, folder)
    (body,) = script.bodies("POST", "/v1/files")
    start = body.index(b"\r\n\r\n", body.index(b'filename="insects.tar"')) + 4
    with tarfile.open(fileobj=io.BytesIO(body[start:])) as archive:
        sent = {one.name: one.isfile() for one in archive}
    assert sent == dict.fromkeys(("ant/hard.png", "ant/other.png", "ant/soft.png", "bee/1.png"), True)


def test_a_missing_file_and_a_folder_without_pictures_are_named_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    script = Script()
    with pytest.raises(BadInput, match="no such file"):
        run(script, tmp_path / "nothing.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(BadInput, match="cannot be read: not a regular file"):
        run(script, tmp_path / "pipe.npz")
    with pytest.raises(BadInput, match="is a folder without pictures"):
        run(script, tmp_path)
    assert script.asked == []


@pytest.mark.parametrize(
    "url",
    ["ftp://here", "127.0.0.1:8000", "http://", "http://here:port", "http://[", "http://a..b:1", "file:///x"],
)
def test_a_url_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(BadInput, match="--url"):
        Remote(url)


def test_a_user_in_the_url_is_not_taken_for_a_part_of_the_host() -> None:
    with speaking(Script(states=[(200, {"id": "x"})])) as url:
        assert Remote(url.replace("//", "//user:word@")).job("x") == {"id": "x"}


def test_something_else_at_that_address_is_not_taken_for_a_job() -> None:
    with (
        speaking(Script(states=[(200, b"<html>hello</html>")])) as url,
        pytest.raises(CannotServe, match="halfeven server"),
    ):
        Remote(url).job("x")
    with (
        speaking(Script(states=[(500, {"detail": "internal error"})])) as url,
        pytest.raises(CannotServe, match="500"),
    ):
        Remote(url).job("x")


def test_a_dry_run_is_shown_with_its_findings_and_ends_as_the_job_would() -> None:
    trial = {"total_steps": 300, "seconds_per_step": 0.02, "estimated_seconds": 8.5, "parameters": 90}
    parts = {"steps": 6.0, "evaluations": 0.5, "conversion, as of the last job": 2.0}
    trial |= {"precision": "bf16", "estimated_parts": parts, "conversion_known": True}
    trial |= {"peak_memory_bytes": 400 << 20, "peak_device_bytes": None}
    findings = [{"code": "SMALL_GUARD", "message": "1e-08 vanishes"}]
    sound = {"valid": True, "findings": findings, "rows": {"training": 158, "held_out": 20}, "trial": trial}
    assert dry_run_sentences(sound).splitlines() == [
        "SMALL_GUARD: 1e-08 vanishes",
        "158 rows, 20 held out; 90 parameters that learn",
        "300 steps of 0.02 s in bf16; the job takes about 8.5 s (steps 6 s, evaluations 0.5 s, conversion, as of the "
        "last job 2 s); 400 MiB of memory",
    ]
    unknown = {**sound, "trial": {**trial, "conversion_known": False}}
    assert "), and the conversion: no job of this model has shown how long; " in dry_run_sentences(unknown)
    memory = {
        **sound,
        "valid": False,
        "trial": None,
        "error": {"code": "OUT_OF_MEMORY", "message": "too large"},
    }
    assert dry_run_sentences(memory).splitlines()[1:] == ["the job would fail: OUT_OF_MEMORY: too large"]
    slow = {**memory, "valid": None, "error": {"code": TOO_SLOW, "message": LIMIT_REACHED}}
    assert f"it is not known if the job would fail: TOO_SLOW: {LIMIT_REACHED}" in dry_run_sentences(slow)
    rows = {**memory, "error": {"code": "BAD_DATA", "message": "no rows"}}
    assert [dry_run_exit_code(one) for one in (sound, memory, slow, rows)] == [0, 1, 1, 2]
