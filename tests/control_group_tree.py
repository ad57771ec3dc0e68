"""Folders that look like ``/proc`` and ``/sys/fs/cgroup`` of a machine or container, for tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

UNIFIED = "28 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def of_version_1(controllers: str, mounted: str = "/") -> str:
    """The line of mountinfo of a hierarchy of version 1. ``mounted``: which of its paths is mounted."""
    return f"33 28 0:31 {mounted} /sys/fs/cgroup/{controllers} rw shared:14 - cgroup cgroup rw,{controllers}"


def control_groups(root: Path, own: Sequence[str], mounts: Sequence[str], files: Mapping[str, str]) -> Path:
    """``own``: the lines of ``/proc/self/cgroup``; ``mounts``: those of mountinfo; ``files``: their text, by their path
    below ``/sys/fs/cgroup``. Gives ``root``."""
    process = root / "proc" / "self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text("".join(f"{line}\n" for line in own))
    (process / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root
