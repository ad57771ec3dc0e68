"""A child that is forked from a process with torch in it is, seen from inside and from outside, a fresh interpreter."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import preloaded
from tests.patience import PATIENCE_S
from tests.slow import one_in_turn

NAME = "forked_here"
CHILD = """
import gc, json, os, resource, signal, sys, threading
import torch, numpy
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "path": sys.path, "flags": str(sys.flags), "name": __name__,
    "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(), "environment": dict(os.environ),
    "parent": os.getppid(), "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "descriptors": [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")],
    "ours": [name for name in sys.modules if name.split(".")[0] in ("halfeven", "tests")],
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))], "collects": gc.isenabled(),
    "command": sys.orig_argv, "shown": open("/proc/self/cmdline").read().rstrip("\\0"),
    "writes": [sys.stdout.encoding, sys.stdout.line_buffering, sys.dont_write_bytecode],
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)],
    "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_DATA, resource.RLIMIT_NOFILE)],
    "nice": os.nice(0), "threads of torch": torch.get_num_threads(),
    "said": sys.stdin.readline(),
}), flush=True)
sys.exit(7)
"""
SERVER = """
import os, subprocess, sys
command = [sys.executable, "-PB", "-m", "of_a_job"]
for environment in (os.environ, {**os.environ, "PYTHONHASHSEED": "1"}):
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, process_group=0) as child:
        sys.stdout.write(child.communicate()[0].decode())
    assert child.returncode == 0
print(os.getpid())
"""


@pytest.fixture(scope="module", autouse=True)
def preloaded_here() -> Iterator[None]:
    """The processes that fork for these tests alone; the first child of the one that most tests ask has been."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preloaded, "_parents", {})
        patch.setattr(preloaded, "FORKED", {NAME})
        yield
        for parent in filter(None, preloaded._parents.values()):
            parent.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preloaded")


@pytest.fixture
def place(folder: Path) -> Path:
    """A folder with a module of a name that is forked."""
    (folder / f"{NAME}.py").write_text(CHILD)
    return folder


@pytest.fixture
def prepared(place: Path) -> Path:
    """The folder of `place` after a first child: further children like it are forked."""
    (place / f"{NAME}.py").write_text("")
    started(place).communicate(b"", timeout=PATIENCE_S)
    (place / f"{NAME}.py").write_text(CHILD)
    return place


def started(place: Path, *arguments: str, **more: Any) -> "subprocess.Popen[bytes]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-PB", "-m", NAME, *arguments]
    # C's own environment is passed on where none is given, and readline has written sizes of the terminal there.
    more["env"] = {**more.get("env", os.environ), "PYTHONPATH": str(place)}
    return preloaded.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, **more)


def seen_from_inside(place: Path, **more: Any) -> dict[str, Any]:
    child = started(place, "one", "two", **more)
    said, _ = child.communicate(b"hello\n", timeout=PATIENCE_S)
    assert child.returncode == 7, said.decode()
    return json.loads(said)


def forks() -> int:
    """The number of processes that fork."""
    return sum(parent is not None for parent in preloaded._parents.values())


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    "more", one_in_turn([{"start_new_session": True, "cwd": "/"}, {"process_group": 0}], 0), ids=str
)
def test_a_forked_child_is_as_a_fresh_one(
    more: dict[str, Any], prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cwd" not in more:
        monkeypatch.chdir(prepared)
    monkeypatch.setenv("SAID_TO_THE_CHILD", "as it is")
    forked = seen_from_inside(prepared, **more)
    assert forks() == 1
    monkeypatch.setattr(preloaded, "FORKED", set())
    fresh = seen_from_inside(prepared, **more)
    assert {name: (fresh[name], forked[name]) for name in fresh if fresh[name] != forked[name]} == {}
    assert fresh["ours"] == [] and fresh["argv"][1:] == ["one", "two"]


@pytest.mark.slow
def test_an_exception_ends_it_as_it_ends_a_fresh_interpreter(prepared: Path) -> None:
    (prepared / f"{NAME}.py").write_text("def f():\n    raise ValueError('no')\nf()\n")
    child = started(prepared)
    said, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 1 and said.decode().endswith("ValueError: no\n")


@pytest.mark.slow(seconds=4)
def test_it_is_killed_and_waited_for_as_any_child(prepared: Path) -> None:
    (prepared / f"{NAME}.py").write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\n")
    child = started(prepared, process_group=0)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    assert child.poll() is None
    os.killpg(child.pid, signal.SIGKILL)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    child.communicate()


@pytest.mark.slow
def test_a_forked_server_forks_the_children_of_its_jobs_and_they_are_its_own(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prepared / f"{NAME}.py").write_text(SERVER)
    (prepared / "of_a_job.py").write_text("import os, sys\nprint('torch' in sys.modules, os.getppid())\n")
    monkeypatch.setattr(preloaded, "SERVER", NAME)
    monkeypatch.setattr(preloaded, "FORKED", {NAME, "of_a_job"})
    said, _ = started(prepared).communicate(timeout=PATIENCE_S)
    forked, fresh, own = said.decode().splitlines()
    assert (forked, fresh) == (f"True {own}", f"False {own}")


@pytest.mark.slow
def test_no_two_children_draw_the_same_random_numbers(prepared: Path) -> None:
    (prepared / f"{NAME}.py").write_text(
        "import torch, numpy\nprint(torch.rand(1).item(), numpy.random.rand())\n"
    )
    drawn = [started(prepared).communicate(timeout=PATIENCE_S)[0].split() for _ in range(2)]
    assert len({number for numbers in drawn for number in numbers}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "ONEDNN_MAX_CPU_ISA"])
def test_an_environment_that_says_something_else_to_the_start_is_another_kind(
    name: str, prepared: Path
) -> None:
    (prepared / f"{NAME}.py").write_text("")
    before = forks()
    for value in ("1", "2"):
        started(prepared, env={**os.environ, name: value}).communicate(b"", timeout=PATIENCE_S)
    assert forks() == before


@pytest.mark.slow
def test_what_an_order_cannot_say_is_a_fresh_interpreter(prepared: Path) -> None:
    (prepared / f"{NAME}.py").write_text("import os\nprint(os.umask(0o77))\n")
    assert started(prepared, umask=0o70).communicate(b"", timeout=PATIENCE_S)[0] == b"%d\n" % 0o70
    with pytest.raises(FileNotFoundError):
        started(prepared, cwd=prepared / "missing")


@pytest.mark.slow
def test_the_process_that_forks_ends_with_the_one_that_asked(prepared: Path) -> None:
    (prepared / f"{NAME}.py").write_text("")
    started(prepared).communicate(b"", timeout=PATIENCE_S)
    (kind, parent), *_ = ((kind, parent) for kind, parent in preloaded._parents.items() if parent is not None)
    assert parent is not None and parent.process is not None
    parent.end()
    assert parent.process.returncode == 0
    del preloaded._parents[kind]
