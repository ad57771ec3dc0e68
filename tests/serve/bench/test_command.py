"""``halfeven bench`` from the command line against a real server: figures, report, and exit codes."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import Overloaded
from halfeven.serve.bench.benched_model import bodies, find
from safetensors.numpy import save_file

from tests.command_line import run
from tests.serve.conftest import FakeRoster

QUICK = ("--seconds", 0.4, "--warmup", 0.1)


def bench(server: str, name: str, *words: object) -> dict[str, Any]:
    code, facts, shown = run("bench", f"http://{server}", name, *QUICK, *words)
    assert code == 0, shown
    return facts


@pytest.mark.slow
def test_a_second_of_closed_and_open_loop_ends_with_figures_that_agree_with_the_server(
    server: str, roster: FakeRoster
) -> None:
    code, facts, shown = run(
        "bench",
        f"http://{server}",
        "double",
        "--seconds",
        1,
        "--warmup",
        0,
        "--concurrency",
        "1,4",
        "--rate",
        50,
    )
    assert code == 0, shown
    assert [stage["load"] for stage in facts["stages"]] == ["closed", "closed", "open"]
    for stage in facts["stages"]:
        assert stage["ok"] == stage["sent"] > 0
        assert stage["statuses"] == {"200": stage["ok"]}
        spread = stage["latency_ms"]
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["p99.9"] <= spread["max"]
        assert stage["server_timing_ms"]["queue"]["p50"] == pytest.approx(1.5)
        assert stage["server_timing_ms"]["compute"]["p50"] == pytest.approx(2.25)
        assert stage["answered_by"] == [{"version": "3", "precision": "fp16", "count": stage["ok"]}]
        assert stage["generator"]["cpu_s_per_1000"] > 0
    # The first.
    assert sum(stage["sent"] for stage in facts["stages"]) == len(roster.models["double"].rows) - 1


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["binary", "json"])
@pytest.mark.parametrize("name", ["double", "pair"])
def test_inputs_are_made_from_the_models_own_description(
    server: str, roster: FakeRoster, name: str, wire: str
) -> None:
    sizes = ("--shape", "ids=5", "--shape", "mask=5") if name == "pair" else ()
    facts = bench(server, name, "--concurrency", 2, "--wire", wire, "--rows", 3, *sizes)
    assert facts["stages"][0]["statuses"].keys() == {"200"}
    assert set(roster.models[name].rows) == {3}
    assert facts["stages"][0]["rows_per_second"] == pytest.approx(3 * facts["stages"][0]["per_second"])


def test_both_wires_carry_the_same_rows_of_a_file_and_every_row_has_its_turn(
    server: str, tmp_path: Path
) -> None:
    rows = np.random.default_rng(3).random((6, 4), np.float32)
    save_file({"x": rows}, tmp_path / "rows.safetensors")
    subject = find(f"http://{server}", "double", (), ())
    binary = bodies(subject, 2, "binary", tmp_path / "rows.safetensors")
    plain = bodies(subject, 2, "json", tmp_path / "rows.safetensors")
    sent = [
        np.frombuffer(body[int(head["Inference-Header-Content-Length"]) :], np.float32)
        for body, head in binary
    ]
    np.testing.assert_array_equal(np.concatenate(sent), rows.ravel())
    reply = [json.loads(body)["inputs"][0]["data"] for body, _ in plain]
    np.testing.assert_array_equal(np.array(reply, np.float32).ravel(), rows.ravel())
    target = subject.target(binary)
    assert [request.endswith(body) for request, (body, _) in zip(target.requests, binary, strict=True)] == [
        True
    ] * 3


@pytest.mark.slow
def test_the_report_stands_alone_and_draws_every_stage(
    server: str, roster: FakeRoster, tmp_path: Path
) -> None:
    page = tmp_path / "bench.html"
    bench(server, "double", "--concurrency", "1,2", "--rate", 50, "--report", page)
    text = page.read_text()
    assert text.count("<path d=") == 2 * 3 + 1  # two figures, and the mark of the page
    assert all(name in text for name in ("closed 1", "closed 2", "open 50/s", "p99.9", "fp16"))
    assert "http://" not in text.replace(f"http://{server}", "")
    assert "<script" not in text
    parser = HTMLParser()
    parser.feed(text)
    parser.close()


@pytest.mark.slow
def test_refusals_are_figures_and_only_a_stage_without_any_good_answer_is_a_failure(
    server: str, roster: FakeRoster
) -> None:
    served = roster.models["double"]
    asked = served.submit

    def every_third(*arguments: Any, **more: Any) -> Any:
        served.refusal = None if len(served.rows) % 3 else Overloaded("the queue is full", 2.0)
        if served.refusal is not None:
            served.rows.append(0)
            raise served.refusal
        return asked(*arguments, **more)

    served.rows.append(1)
    served.submit = every_third  # type: ignore[method-assign]
    stage = bench(server, "double", "--concurrency", 2)["stages"][0]
    assert stage["refused"]["count"] == stage["statuses"]["503"] > 0
    assert stage["statuses"]["200"] > stage["statuses"]["503"]
    assert stage["refused"]["retry_after"] == {"2": stage["refused"]["count"]}
    assert "queue is full" in stage["messages"]["503"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("SERVER", "nosuch"), "unknown model"),
        (("ftp://127.0.0.1", "double"), "expected http"),
        (("SERVER", "double", "--concurrency", "1,zero"), "--concurrency"),
        (("SERVER", "double", "--concurrency", "100000"), "--concurrency"),
        (("SERVER", "double", "--concurrency", "0.5"), "expected whole numbers"),
        (("SERVER", "double", "--concurrency", ""), "--concurrency"),
        (("SERVER", "double", "--rate", "-5"), "--rate"),
        (("SERVER", "double", "--rate", "1e8"), "up to 1,000,000"),
        (("SERVER", "double", "--seconds", "inf"), "--seconds inf"),
        (("SERVER", "double", "--wire", "grpc"), "--wire"),
        (("SERVER", "double", "--rows", "0"), "--rows"),
        (("SERVER", "pair"), "set with --shape"),  # the server's own words: its length is at most 6
        (("SERVER", "double", "--shape", "y=3"), "has the inputs"),
        (("SERVER", "double", "--shape", "x=3"), "the model has"),
        (("SERVER", "double", "--shape", "x=big"), "--shape"),
        (("SERVER", "double", "--header", "no colon"), "--header"),
        (("SERVER", "double", "--seconds", "0"), "--seconds"),
        (("http://[::1", "double"), "expected http://HOST:PORT"),
        (("http://localhost:abc", "double"), "expected http://HOST:PORT"),
        (("SERVER", "double", "--data", "/nonexistent.npz"), "nonexistent.npz"),
    ],
)
def test_what_cannot_be_measured_is_exit_2_with_the_reason(
    server: str, roster: FakeRoster, words: tuple[str, ...], message: str
) -> None:
    code, facts, shown = run("bench", *(word.replace("SERVER", f"http://{server}") for word in words))
    assert (code, facts["status"]) == (2, "failed")
    assert message in shown


def test_a_header_goes_with_every_request(server: str, roster: FakeRoster) -> None:
    subject = find(f"http://{server}", "double", (), ("Authorization: Bearer key", "X-Two:2"))
    target = subject.target(bodies(subject, 1, "binary", None))
    head = target.requests[0].partition(b"\r\n\r\n")[0]
    assert b"\r\nAuthorization: Bearer key\r\nX-Two: 2" in head
