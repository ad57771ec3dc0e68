"""The number of cores, by given control groups and affinities; nothing else in the product counts them."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from halfeven.models.capture.capture import _run_child
from halfeven.models.machine.usable_cores import Cores, cores_here, prepare_libraries, quota_in, usable_cores

from tests.control_group_tree import UNIFIED, control_groups, of_version_1
from tests.house_sources import ROOT, nodes_with

CPU, NESTED = "cpu,cpuacct", "/a.slice/b.service"
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert quota_in(tmp_path) is None
    assert quota_in(control_groups(tmp_path, ["0::/"], [UNIFIED], {"cgroup.procs": ""})) is None


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({NESTED: "max 100000"}, None),
        ({NESTED: "50000 100000"}, 0.5),
        ({NESTED: "30000 20000"}, 1.5),
        ({NESTED: "400000 100000", "/a.slice": "150000 100000", "": "900000 100000"}, 1.5),
        ({NESTED: "max 100000", "/a.slice": "max 100000", "": "100000 100000"}, 1.0),
        ({"/other.slice": "10000 100000", "/a.slice/b.service/inside": "10000 100000"}, None),
        ({NESTED: "unreadable"}, None),
        ({NESTED: "100000 0"}, None),
    ],
)
def test_of_version_2_the_tightest_group_around_the_process_counts(
    limits: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    files = {f"{group}/cpu.max".lstrip("/"): text for group, text in limits.items()}
    assert quota_in(control_groups(tmp_path, [f"0::{NESTED}"], [UNIFIED], files)) == quota


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({NESTED: (-1, 100000)}, None),
        ({NESTED: (25000, 50000)}, 0.5),
        ({NESTED: (-1, 100000), "/a.slice": (150000, 100000), "": (-1, 100000)}, 1.5),
        ({NESTED: (800000, 100000), "": (200000, 100000)}, 2.0),
    ],
)
def test_of_version_1_the_hierarchy_of_the_processor_counts(
    limits: dict[str, tuple[int, int]], quota: float | None, tmp_path: Path
) -> None:
    own = ["9:name=systemd:/", "4:memory:/elsewhere", f"2:{CPU}:{NESTED}", "0::/init.scope"]
    files = {f"memory/elsewhere/{QUOTA}": "1000", f"memory/elsewhere/{PERIOD}": "100000"}
    for group, (most, period) in limits.items():
        files |= {f"{CPU}{group}/{QUOTA}": str(most), f"{CPU}{group}/{PERIOD}": str(period)}
    mounts = [of_version_1("memory"), of_version_1(CPU)]
    assert quota_in(control_groups(tmp_path, own, mounts, files)) == quota


def test_where_both_versions_are_mounted_the_tighter_limit_counts(tmp_path: Path) -> None:
    unified = "30 28 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    own, mounts = [f"1:{CPU}:/box", "0::/box"], [of_version_1(CPU), unified]
    files = {f"{CPU}/box/{QUOTA}": "300000", f"{CPU}/box/{PERIOD}": "100000"}
    assert quota_in(control_groups(tmp_path / "1", own, mounts, files)) == 3.0
    files["unified/box/cpu.max"] = "120000 100000"
    assert quota_in(control_groups(tmp_path / "2", own, mounts, files)) == 1.2


@pytest.mark.parametrize(
    ("path", "mounted"),
    [("/", "/"), ("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/../..", "/"), ("/", "/docker/abc")],
    ids=["own namespace", "path of the host", "whole tree", "outside of the namespace", "other root"],
)
@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_what_is_mounted_is_its_own_group(
    version: int, path: str, mounted: str, tmp_path: Path
) -> None:
    below = path.lstrip("/") if (path, mounted) == ("/docker/abc", "/") else ""
    if version == 2:
        own, mount = f"0::{path}", UNIFIED.replace(" / /sys", f" {mounted} /sys")
        files = {str(Path(below) / "cpu.max"): "50000 100000"}
    else:
        own, mount = f"3:{CPU}:{path}", of_version_1(CPU, mounted)
        files = {str(Path(CPU, below, QUOTA)): "50000", str(Path(CPU, below, PERIOD)): "100000"}
    assert quota_in(control_groups(tmp_path, [own], [mount], files)) == 0.5


def test_a_group_of_another_mount_is_not_taken_for_the_own_one(tmp_path: Path) -> None:
    other = "40 28 0:26 /other /sys/fs/cgroup/of-another rw - cgroup2 cgroup2 rw"
    files = {"of-another/cpu.max": "10000 100000", "box/cpu.max": "200000 100000"}
    assert quota_in(control_groups(tmp_path, ["0::/box"], [other, UNIFIED], files)) == 2.0


def test_a_mount_point_with_a_space_in_its_name_is_found(tmp_path: Path) -> None:
    mount = UNIFIED.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/a\040b")
    assert quota_in(control_groups(tmp_path, ["0::/"], [mount], {"a b/cpu.max": "70000 100000"})) == 0.7


@pytest.mark.parametrize(
    ("cores", "usable", "words"),
    [
        (Cores(4, 4, None), 4, "4 cores"),
        (Cores(4, None, None), 4, "4 cores"),
        (Cores(1, 1, None), 1, "1 core"),
        (Cores(4, 3, None), 3, "3 cores (4 online, affinity 3)"),
        (Cores(4, 4, 1.5), 2, "2 cores (4 online, affinity 4, cgroup quota 1.5)"),
        (Cores(4, 4, 0.5), 1, "1 core (4 online, affinity 4, cgroup quota 0.5)"),
        (Cores(8, 2, 3.0), 2, "2 cores (8 online, affinity 2, cgroup quota 3)"),
        (Cores(2, None, 1.0), 1, "1 core (2 online, cgroup quota 1)"),
        (Cores(2, 2, 0.01), 1, "1 core (2 online, affinity 2, cgroup quota 0.01)"),
    ],
)
def test_affinity_and_quota_limit_the_cores_and_a_part_of_one_counts(
    cores: Cores, usable: int, words: str
) -> None:
    assert (cores.usable, str(cores)) == (usable, words)


def test_the_affinity_of_this_process_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert cores_here(tmp_path) == Cores(16, 3, None)
    box = control_groups(tmp_path, ["0::/"], [UNIFIED], {"cpu.max": "110000 100000"})
    assert cores_here(box) == Cores(16, 3, 1.1)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores_here(box) == Cores(16, None, 1.1)
    assert usable_cores() >= 1


@pytest.mark.parametrize(
    ("cores", "before", "after"),
    [
        (Cores(4, 4, 0.5), None, "1"),
        (Cores(4, 4, 2.5), None, "3"),
        (Cores(4, 4, 2.5), "8", "8"),
        (Cores(4, 2, None), None, None),  # libraries see the affinity by themselves
        (Cores(4, 4, 6.0), None, None),
    ],
)
def test_libraries_are_told_of_a_quota_and_the_users_own_number_stays(
    cores: Cores, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfeven.models.machine.usable_cores.cores_here", lambda: cores)
    environment = {} if before is None else {"OMP_NUM_THREADS": before}
    prepare_libraries(environment)
    assert environment.get("OMP_NUM_THREADS") == after


@pytest.mark.slow
def test_the_command_line_tells_libraries_of_a_quota_before_they_start_their_threads() -> None:
    """The process has the quota of half a core in the place of its own."""
    program = """
import sys
from halfeven.models.machine import usable_cores
usable_cores.cores_here = lambda: usable_cores.Cores(64, 64, 0.5)
from halfeven.serve.cli import main
assert not {"numpy", "torch", "onnxruntime", "pyarrow"} & {*sys.modules}
main.app = lambda: None
main.main()
import torch
print(torch.get_num_threads())
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout == "1\n", done.stderr


CHILD = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1]).with_name("result.json").write_text(json.dumps({**os.environ}))
"""


def test_the_child_that_captures_is_told_whoever_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfeven.models.machine.usable_cores.cores_here", lambda: Cores(64, 64, 1.5))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "telling.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert _run_child("telling", tmp_path, tmp_path)["OMP_NUM_THREADS"] == "2"


# The source of the product: no other file counts cores.

COUNTS_CORES = {
    "cpu_count", "process_cpu_count", "sched_getaffinity", "SC_NPROCESSORS_ONLN", "SC_NPROCESSORS_CONF"
}  # fmt: skip
THE_ONE = ROOT / "models" / "machine" / "usable_cores.py"


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    return node.id if isinstance(node, ast.Name) else str(getattr(node, "value", ""))


def calls(*names: str) -> Iterator[tuple[str, ast.Call, set[str | None]]]:
    """Each call of a function of these names in the product, with its place and its keywords."""
    for file, node in nodes_with(*names):
        if isinstance(node, ast.Call) and name_of(node.func) in names:
            where = f"{file.relative_to(ROOT)}:{node.lineno}"
            yield where, node, {keyword.arg for keyword in node.keywords}


@pytest.mark.slow
def test_no_other_file_of_the_product_counts_cores() -> None:
    named = (ast.Attribute, ast.Name, ast.alias, ast.Constant)
    nodes = nodes_with(*COUNTS_CORES)
    found = {file for file, node in nodes if isinstance(node, named) and name_of(node) in COUNTS_CORES}
    assert found == {THE_ONE}, "take the number from models/machine/usable_cores.py"


@pytest.mark.slow
def test_no_pool_takes_its_size_from_the_machine() -> None:
    """Pools without a number take one thread or process for each core, whatever the quota is."""
    pools = list(calls("ThreadPoolExecutor", "ProcessPoolExecutor", "Pool", "ThreadPool"))
    assert pools
    assert [where for where, call, named in pools if not call.args and "max_workers" not in named] == []


@pytest.mark.slow
def test_every_session_of_onnx_runtime_is_given_its_number_of_threads() -> None:
    """ONNX Runtime's own number, 0, stands for the cores of the machine: it sees no quota."""
    files = {where.partition(":")[0] for where, _, _ in calls("SessionOptions")}
    assert len(files) > 5
    given = {
        str(file.relative_to(ROOT))
        for file, node in nodes_with("intra_op_num_threads")
        if isinstance(node, ast.Assign) and name_of(node.targets[0]) == "intra_op_num_threads"
    }
    assert files <= given
    bare = [where for where, call, _ in calls("InferenceSession") if len(call.args) < 2]
    assert bare == []
