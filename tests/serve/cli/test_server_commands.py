"""The commands that ask and order a running server, with a real one."""

import json
from collections.abc import Iterator
from pathlib import Path

import halfeven as he
import numpy as np
import pytest
from halfeven.models.errors import NotReady
from halfeven.serve.access.client_key import VARIABLE
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.cli import server_commands
from halfeven.serve.cli.main import app
from torch import nn
from typer.testing import CliRunner

from tests.command_line import run

pytestmark = pytest.mark.slow  # two conversions and a server


def shown(*words: object) -> str:
    return " ".join(CliRunner().invoke(app, [str(word) for word in words]).stdout.split())


@pytest.fixture
def served(tmp_path: Path, plain_setup: None) -> Iterator[tuple[Path, str, str]]:
    """A store with two versions of ``net``, its server, and a key of that."""
    store, file = tmp_path / "store", tmp_path / "keys"
    x = np.random.normal(size=(32, 4)).astype(np.float32)
    for level in ("O1", "O3"):
        he.convert(nn.Linear(4, 3), samples={"x": x}, name="net", level=level).save(store)
    key, _ = KeyFile(file).add("me", ["manage", "infer", "train"])
    with he.serve(store, port=0, key_file=file) as server:
        yield store, server.url, key


def test_a_server_that_is_not_ready_is_shown_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(url: str, *_: object, **__: object) -> tuple[dict[str, str], bytes]:
        if url.endswith("/ready"):
            raise NotReady("the server refused with 503: not ready: models are being made ready")
        answers = {"index": [{"name": "net"}], "stats": {"model_stats": []}, "net": {"loaded": []}}
        found = answers.get(url.rpartition("/")[2], {"name": "halfeven", "version": "0.1.0"})
        return {}, json.dumps(found).encode()

    monkeypatch.setattr(server_commands, "ask", ask)
    code, facts, _ = run("status")
    assert code == 1 and not facts["ready"] and "being made ready" in facts["not_ready"]
    assert "net: not loaded" in shown("status")


def test_a_running_server_is_asked_and_ordered(
    served: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url, key = served
    monkeypatch.setenv(VARIABLE, "")  # restored at the end: --key sets it
    code, facts, _ = run("jobs", "--url", url)
    assert code == 2 and "401" in facts["error"] and "--key-file" in facts["error"]
    (tmp_path / "key").write_text(f"{key}\n")
    with monkeypatch.context() as alone:
        alone.setenv(VARIABLE, "")
        assert run("jobs", "--url", url, "--key-file", tmp_path / "key")[1]["jobs"] == []
    assert run("jobs", "--url", url, "--key", key)[0] == 0
    assert "no fine-tuning job yet" in shown("jobs", "--url", url)

    code, facts, _ = run("status", "--url", url)
    assert code == 0 and facts["ready"] and not facts["not_ready"]
    (active,) = facts["models"]["net"]["loaded"]
    assert (active["version"], active["precision"], active["requests"]) == (2, "fp16", 0)
    words = shown("status", "--url", url)
    assert "net@2 is served in fp16: form = 'torch' asks for it" in words
    versions = run("models", "--store", store)[1]["models"]["net"]
    assert [one["served"] for one in versions] == [
        None, {"precision": "fp16", "form": "torch", "device": "cpu"}
    ]  # fmt: skip
    assert "fp16 torch cpu" in shown("models", "--store", store)

    for role in ("canary", "shadow"):
        code, facts, _ = run(role, "net@1", 10, "--url", url)
        assert code == 0 and {one["version"] for one in facts["loaded"]} == {1, 2}
        assert f"the {role} of net has ended" in shown(role, "net", "--url", url)
        assert run(role, "net@1", "--url", url)[0] == run(role, "net@7", 5, "--url", url)[0] == 2
    assert run("cancel", "ftjob-none", "--url", url)[0] == 2

    assert shown("unload", "net", "--url", url) == "net is unloaded"
    assert "net: not loaded" in shown("status", "--url", url)
    assert shown("load", "net", "--url", url) == "net is loaded"
    assert run("load", "nothing", "--url", url)[0] == 2
