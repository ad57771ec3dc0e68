"""A newcomer's mistakes, with the command line itself: each message says what was wrong, what came, and what to do."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from halfeven.serve.bench.callers import served_version
from halfeven.serve.cli.demo import await_port
from halfeven.serve.cli.main import app
from typer.testing import CliRunner

from tests.model_folders import LINEAR, tensor, write_folder
from tests.patience import PATIENCE_S
from tests.server_process import serve_command, server_environment

pytestmark = pytest.mark.slow  # each starts the command in a process


def halfeven(*words: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """A store that was empty when its server started, the address, and what the server said then."""
    where = tmp_path_factory.mktemp("serving")
    store, log = where / "store", where / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(serve_command(store), stdout=file, stderr=file, env=server_environment())
    try:
        url = f"http://127.0.0.1:{await_port(process, log)}"
        code, _, reply = halfeven(
            "convert", write_folder(where / "net", LINEAR), "--store", store, "--form", "torch"
        )
        assert code == 0, reply
        deadline = time.monotonic() + PATIENCE_S
        while served_version(int(url.rpartition(":")[2]), "net") is None:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield store, url, log.read_text()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_a_server_on_an_empty_store_says_what_to_do_next(serving: tuple[Path, str, str]) -> None:
    store, _, reply = serving
    assert f"the store {store} has no model yet" in reply
    for way in (f"halfeven convert FOLDER --store {store}", "--models DIR", "halfeven demo"):
        assert way in reply


def test_json_by_input_name_is_predicted_as_the_help_says(
    serving: tuple[Path, str, str], tmp_path: Path
) -> None:
    url = serving[1]
    rows = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
    answers = []
    for name, message in (("named", {"x": rows.tolist()}), ("rows", {"instances": rows.tolist()})):
        (tmp_path / f"{name}.json").write_text(json.dumps(message))
        code, reply, fault = halfeven("predict", "net", tmp_path / f"{name}.json", "--url", url, "--json")
        assert code == 0, fault
        answers.append(json.loads(reply.splitlines()[-1]))
    (output,) = answers[0]["outputs"]
    assert (output["name"], output["shape"]) == ("y", [2, 3])
    np.testing.assert_allclose(np.reshape(output["data"], (2, 3)), answers[1]["predictions"], atol=1e-3)
    code, _, fault = halfeven(
        "predict", "net", tmp_path / "named.json", "--url", url, "--out", tmp_path / "y.npz"
    )
    assert code == 0 and np.load(tmp_path / "y.npz")["y"].shape == (2, 3), fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"z": [[1, 2, 3, 4]]}', "takes the inputs 'x' FP32 [-1, 4]; got ['z']"),
        ('{"x": [[1, 2, 3, "a"]]}', "'x'[0][3]: expected a number for FP32"),
        ('{"x": [[1, 2, 3]]}', "Expected [-1,4], got [1,3]"),
        ("[[1, 2, 3, 4]]", 'expected {"INPUT": nested lists, …} or {"instances": [...]}'),
    ],
)
def test_json_that_does_not_fit_is_refused_with_what_the_model_takes(
    text: str, words: str, serving: tuple[Path, str, str], tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text(text)
    code, _, fault = halfeven("predict", "net", tmp_path / "x.json", "--url", serving[1])
    assert code == 2 and words in fault


IMPORTS = f"import mylib.layers\n{LINEAR}"


def test_a_rollback_with_nothing_older_is_a_conflict_on_both_roads(serving: tuple[Path, str, str]) -> None:
    store, url, _ = serving
    answer = httpx.post(f"{url}/v1/models/net/rollback")
    assert answer.status_code == 409 and "no version before 1" in answer.json()["detail"]
    code, _, fault = halfeven("rollback", "net", "--store", store)
    assert code == 2 and "no version before 1" in fault


def test_a_wrong_input_is_named_with_model_toml(tmp_path: Path) -> None:
    for name, datatype, width in (("shape", "FP32", 5), ("dtype", "INT64", 4)):
        folder = write_folder(tmp_path / name, LINEAR, inputs=[tensor("x", datatype, [-1, width])])
        code, _, fault = halfeven("convert", folder, "--store", tmp_path / "store", "--form", "torch")
        assert code == 4
        assert f"model.toml declares: 'x' {datatype} [-1,{width}] (tried with [3, {width}])" in fault
        assert f"correct it under [[inputs]] in {folder}/model.toml" in fault
        assert "half dtype written into the code" not in fault


def test_an_import_that_fails_names_path_and_what_was_searched(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "models" / "net", IMPORTS)
    code, _, fault = halfeven("convert", folder, "--store", tmp_path / "store", "--form", "torch")
    assert code == 4 and "No module named 'mylib'" in fault
    assert f"looked for in {folder}" in fault and 'path = [".."]' in fault
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib" / "layers.py").write_text("")
    code, _, fault = halfeven("convert", folder, "--store", tmp_path / "store", "--form", "live")
    assert code == 4 and f'it lies in {tmp_path}: write path = ["../.."]' in fault


def test_an_import_that_a_package_refuses_by_itself_is_given_in_its_own_words(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", f"raise ImportError('this package needs another')\n{LINEAR}")
    code, _, fault = halfeven("convert", folder, "--store", tmp_path / "store", "--form", "torch")
    assert code == 4 and "ImportError: this package needs another" in fault
    assert "looked for in" not in fault and "ended its process" not in fault


def test_other_slips_say_what_was_expected(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", LINEAR, outputs=[tensor("y", "FP32", [-1, 7])])
    slips = {
        ("convert", tmp_path / "nothing"): "a model folder of this machine; nothing is downloaded",
        ("convert", folder / "model.py"): "expected a folder with a model.toml",
        ("convert", folder, "--form", "torch"): "the model gives FP32 [-1,3]: write that under [[outputs]]",
        ("promote", "net"): "expected NAME@VERSION",
        (
            "rollback",
            "net",
        ): f"no model 'net' in the store {tmp_path / 'store'}",  # the folder may be another one
        ("tune", "net"): f"no model 'net' in the store {tmp_path / 'store'}",
    }
    for words, sentence in slips.items():
        code, _, fault = halfeven(*words, "--store", tmp_path / "store")
        assert code == 2 and sentence in fault, fault
    assert "has no model yet; `halfeven convert FOLDER" in " ".join(
        halfeven("models", "--store", tmp_path / "store")[1].split()
    )
