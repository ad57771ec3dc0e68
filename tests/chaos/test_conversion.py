"""A conversion that is killed, or whose disk is full: the store is whole, and the next conversion works."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from halfeven.models.store.store import LIVE, Store

from tests.chaos.converted import copied
from tests.chaos.faults import can_mount, fill
from tests.chaos.servers import Zygote, zygote
from tests.model_folders import samples_of, tensor, write_folder
from tests.slow import drawn

pytestmark = [pytest.mark.slow(seconds=40), pytest.mark.together("conversions that end early")]
POINTS = 20


class Converting:
    """Conversions of one model into one store. Its half is an ONNX file: no other process captures it."""

    def __init__(self, own: Zygote, folder: Path) -> None:
        self._zygote, self._log = own, folder / "log"
        self.store = copied(folder)
        self._folder = folder / "net"

    def change(self) -> None:
        """Other samples: the next conversion makes a new version."""
        outputs = [tensor("y", "FP32", [-1, 3], kind="logits")]
        samples = samples_of({"x": (4,)}, 32)
        write_folder(self._folder, outputs=outputs, samples=samples, max_batch_size=8, source="net.onnx")
        shutil.copy(self.store.version("net", 1).file("original.onnx"), self._folder / "net.onnx")

    def go(self, at: int = 0) -> int:
        """Convert; gives the exit code, -9 where it killed itself before the change of this number."""
        asked = {"folder": str(self._folder), "store": str(self.store.root), "log": str(self._log), "at": at}
        return self._zygote.ask(wait=self._zygote.ask(convert=asked))

    def is_active_when_converted_again(self, after: list[int], before: list[int]) -> None:
        """A version that was published, and whose conversion ended then, is not forgotten by the next one."""
        if after != before:
            assert self.go() == 0, self.said()
            assert self.whole() == after and self.store.live_number("net") == after[-1]

    def said(self) -> str:
        return self._log.read_text()

    def changes(self) -> int:
        """The number of changes that the last conversion made; that conversion was not killed."""
        return int(self.said().split()[-1])

    def whole(self) -> list[int]:
        """The versions of a store that another process opens; all of them are whole, and the active one is there."""
        store = Store(self.store.root)
        numbers = store.numbers("net")
        for number in numbers:
            version = store.version("net", number)
            assert version.status == LIVE
            assert all(version.bytes(file) is not None for file in version.manifest["files"]), (
                "held to digests"
            )
        assert store.live_number("net") in numbers
        return numbers

    def drafts(self) -> list[Path]:
        net = self.store.root / "models/net"
        return [*net.glob(".draft-*"), *net.glob(".*.unfinished")]


@pytest.fixture(scope="module")
def forking() -> Iterator[Zygote]:
    with zygote() as own:
        yield own


def test_a_conversion_killed_at_any_of_20_points_leaves_a_store_that_is_whole(
    forking: Zygote, tmp_path: Path
) -> None:
    converting = Converting(forking, tmp_path)
    converting.change()
    assert converting.go() == 0, converting.said()
    changes, before = converting.changes(), converting.whole()
    assert changes >= POINTS
    for point in drawn(2, range(POINTS)):
        at = 1 + point * (changes - 1) // (POINTS - 1)
        converting.change()
        assert converting.go(at) == -9, converting.said()
        after = converting.whole()
        assert after[: len(before)] == before and len(after) <= len(before) + 1, f"killed before change {at}"
        converting.is_active_when_converted_again(after, before)
        before = after
    converting.change()
    assert converting.go() == 0 and converting.drafts() == []
    assert converting.store.live_number("net") == converting.whole()[-1]


@pytest.mark.skipif(not can_mount(), reason="this user may not mount a small file system to fill")
def test_a_conversion_on_a_disk_that_gets_full_says_so_and_publishes_nothing(
    forking: Zygote, tmp_path: Path
) -> None:
    converting = Converting(forking, tmp_path)
    root, kept = converting.store.root, tmp_path / "kept"
    root.rename(kept)
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(root)], check=True)
    try:
        shutil.copytree(kept, root, dirs_exist_ok=True)
        ballast, before = root / "ballast", converting.whole()
        room = sum(path.stat().st_size for path in (root / "models/net/1").rglob("*"))
        for eighths in drawn(2, range(8)):
            converting.change()
            fill(ballast, room * eighths // 8)
            code, after = converting.go(), converting.whole()
            if code == 0:  # the files of this version are smaller
                assert after == [*before, before[-1] + 1]
                before = after
            else:
                assert code == 2 and "No space left on device" in converting.said(), converting.said()
                assert "Traceback" not in converting.said() and converting.drafts() == []
                fill(ballast, room)
                converting.is_active_when_converted_again(after, before)
                before = after
        ballast.unlink()
        converting.change()
        assert converting.go() == 0 and converting.whole() == [*before, before[-1] + 1]
    finally:
        subprocess.run(["umount", str(root)], check=True)
