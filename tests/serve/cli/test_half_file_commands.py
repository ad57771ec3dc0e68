"""``halfeven fp16``, ``verify``, ``lock`` and ``check``: their answers and exit codes."""

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from halfeven.exporters.half_files import lock_file

from tests.command_line import run
from tests.exporters.half_files.onnx_net import samples, written

pytestmark = pytest.mark.slow  # conversions


def test_a_half_is_written_and_verified_and_a_changed_one_is_not(tmp_path: Path) -> None:
    net, out, rows = written(tmp_path / "net.onnx"), tmp_path / "net.fp16.onnx", samples(tmp_path / "x.npz")
    code, facts, said = run("fp16", net, "-o", out, "--samples", rows)
    assert code == 0 and facts["verdict"] == "equal" and facts["file"] == str(out)
    code, facts, said = run("verify", out)
    assert code == 0 and facts["status"] == "equal" and facts["digests"] == "as proven"
    code, facts, _ = run("verify", out, "--card")
    assert code == 0 and hashlib.sha256(out.read_bytes()).hexdigest() in facts["card"]
    assert "| verdict | Equal on 12 of your samples" in facts["card"]
    out.write_bytes(out.read_bytes() + b"\n")
    code, facts, said = run("verify", out)
    assert code == 3 and "is not the file that was proven" in said


def test_without_a_proven_half_no_file_is_written_and_the_exit_code_is_3(tmp_path: Path) -> None:
    net, out = written(tmp_path / "net.onnx"), tmp_path / "out.onnx"
    code, facts, said = run("fp16", net, "-o", out, "--level", "O0")
    assert code == 3 and facts["verdict"] == "fp32" and facts["file"] is None
    assert not out.exists() and "earlier run" not in said


def test_a_run_without_a_proven_half_leaves_that_of_an_earlier_run_and_says_so(tmp_path: Path) -> None:
    net, out = written(tmp_path / "net.onnx"), tmp_path / "out.onnx"
    assert run("fp16", net, "-o", out, "--samples", samples(tmp_path / "x.npz"))[0] == 0
    before = out.read_bytes()
    code, facts, said = run("fp16", net, "-o", out, "--level", "O0")
    assert code == 3 and facts["file"] is None and out.read_bytes() == before
    assert "out.onnx is the half of an earlier run and was not changed: this run does not prove it" in said


def action(lock: Path) -> int:
    """The exit code of the GitHub Action's own step."""
    *_, step = yaml.safe_load((Path(__file__).parents[3] / "action.yml").read_text())["runs"]["steps"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= dict.fromkeys(step["env"], "false") | {"LOCK": str(lock)}
    return subprocess.run(["bash", "-e", "-c", step["run"]], env=environment, check=False).returncode


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_action_installs_what_is_missing_and_no_other_version_of_what_is_there(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    install, _ = yaml.safe_load((root / "action.yml").read_text())["runs"]["steps"]
    script(
        tmp_path / "python",
        f"""
        case "$*" in
          *"import halfeven"*) exit 1;;
          *"pip list"*) echo onnxruntime==1.29.0;;
          *"pip install -c"*) cat "$5" "$7"; echo ;;
          *"pip install --no-deps"*) echo "without the rest: $5";;
          *) exec {sys.executable} "$@";;
        esac""",
    )
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_ACTION_PATH": str(root)}
    done = subprocess.run(
        ["bash", "-e", "-c", install["run"]], env=environment, check=True, capture_output=True, text=True
    )
    first, *asked, last = filter(None, done.stdout.splitlines())
    assert first == "onnxruntime==1.29.0" and last == f"without the rest: {root}"
    core = tomllib.loads((root / "pyproject.toml").read_text())["dependency-groups"]["core"]
    assert asked == [each for each in core if not each.startswith("onnxruntime")] and len(asked) < len(core)


def test_another_environments_python_is_the_file_that_was_named_without_this_ones_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "python", 'echo "{\\"halves\\": [], \\"path\\": \\"$PYTHONPATH\\"}"')
    script(tmp_path / "other", "echo {not JSON")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/of/this/one")
    monkeypatch.setattr(lock_file, "read_lock", lambda _: [])
    started = subprocess.run
    seen = list[str]()

    def watched(*given: Any, **options: Any) -> Any:
        done = started(*given, **options)
        seen.append(done.stdout)
        return done

    monkeypatch.setattr(subprocess, "run", watched)
    code, facts, _ = run("check", "--against-env", "./python")
    assert code == 0 and facts["halves"] == [] and json.loads(seen[-1])["path"] == ""
    code, _, said = run("check", "--against-env", "./other")
    assert code == 2 and "its halfeven does not check these halves" in said


def test_a_lock_holds_until_the_half_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock_holds: Callable[..., None]
) -> None:
    monkeypatch.setattr(lock_file, "slower", lambda *_: "")
    net, out, rows = written(tmp_path / "net.onnx"), tmp_path / "net.fp16.onnx", samples(tmp_path / "x.npz")
    lock = tmp_path / "halfeven.lock"
    run("fp16", net, "-o", out, "--samples", rows)
    code, facts, _ = run("lock", out, "-o", lock)
    assert code == 0 and [half["target"] for half in facts["halves"]] == ["net.fp16.onnx"]
    code, _, said = run("lock", out, "-o", tmp_path / "none" / "halfeven.lock")
    assert code == 2 and "expected a file in a folder that is there" in said
    code, facts, _ = run("check", "--lock", lock)
    assert code == 0 and facts["holds"] and facts["halves"][0]["changes"] == []
    code, facts, _ = run("check", "--lock", lock, "--against-env", sys.executable)
    assert code == 0 and facts["holds"]
    assert action(lock) == 0
    lock_holds(lock)
    code, _, said = run("check", "--lock", lock, "--against-env", tmp_path / "no-python")
    assert code == 2 and "expected the python of an environment" in said
    run("fp16", net, "-o", out, "--samples", rows, "--keep", "first_product")
    code, facts, _ = run("check", "--lock", lock)
    assert code == 3 and [change["kind"] for change in facts["halves"][0]["changes"]] == ["file"]
    assert action(lock) == 3
    with pytest.raises(pytest.fail.Exception, match="does not hold"):
        lock_holds(lock)
