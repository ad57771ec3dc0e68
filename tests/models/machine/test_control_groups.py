"""The memory that is free is what all processes of a container leave of its limit, and at most the machine's."""

import sys
from pathlib import Path

import pytest
from halfeven.models.machine.control_groups import free_bytes

from tests.control_group_tree import UNIFIED, control_groups, of_version_1

MIB = 1 << 20
V1 = "memory/box/memory"


def stat(name: str, mib: int) -> str:
    return f"anon 5\n{name} {mib * MIB}\nactive_file 7"


@pytest.mark.parametrize(
    ("own", "mount", "files", "free"),
    [
        pytest.param("0::/box", UNIFIED, {}, 900, id="no group"),
        pytest.param("0::/box", UNIFIED, {"box/memory.max": "max", "box/memory.current": "1"}, 900, id="no limit"),
        pytest.param(
            "0::/box",
            UNIFIED,
            {
                "box/memory.max": str(400 * MIB),
                "box/memory.current": str(350 * MIB),
                "box/memory.stat": stat("inactive_file", 30),
            },
            80,
            id="beside others",
        ),
        pytest.param(
            "0::/a/b",
            UNIFIED,
            {
                "a/b/memory.max": str(400 * MIB),
                "a/b/memory.current": str(100 * MIB),
                "a/memory.max": str(800 * MIB),
                "a/memory.current": str(790 * MIB),
            },
            10,
            id="in a fuller group",
        ),
        pytest.param(
            "0::/box", UNIFIED, {"box/memory.max": str(4 * MIB), "box/memory.current": str(5 * MIB)}, 0, id="used up"
        ),
        pytest.param(
            "4:memory:/box",
            of_version_1("memory"),
            {
                f"{V1}.limit_in_bytes": str(400 * MIB),
                f"{V1}.usage_in_bytes": str(300 * MIB),
                f"{V1}.stat": stat("total_inactive_file", 50),
            },
            150,
            id="version 1",
        ),
        pytest.param(
            "4:memory:/box",
            of_version_1("memory"),
            {f"{V1}.limit_in_bytes": str(2**63 - 4096), f"{V1}.usage_in_bytes": str(300 * MIB)},
            900,
            id="version 1 without a limit",
        ),
    ],
)  # fmt: skip
def test_what_other_processes_of_the_container_use_is_not_free(
    own: str, mount: str, files: dict[str, str], free: int, tmp_path: Path
) -> None:
    root = control_groups(tmp_path, [own], [mount], files)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 2 kB\nMemAvailable:  {900 * 1024} kB\nHugePages_Total: 0\n"
    )
    assert free_bytes(root) == free * MIB


def test_a_system_that_does_not_tell_has_enough(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == sys.maxsize
