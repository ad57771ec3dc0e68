"""A store that this server may read and not write: a read-only mount, or the folder of another user.

    <state>/models/<name>/<number>      a link to the version's folder in the store
    <state>/models/<name>/live          the alias, taken over whenever it moves in the store
    <state>/models/<name>/…             what the server itself keeps beside the versions: proofs of this device, figures
                                        of it, row ceilings, orders, events

So everything that is written beside a version goes into the state folder, and the versions are those of the store.
What would change the store itself (promoting, rolling back, training, converting) is refused by name.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ...models.errors import BadSetting, Conflict, DamagedFile, HalfevenError, StoreUnusable
from ...models.files.durable import replace_text
from ...models.files.stored_json import stored_bytes, stored_json
from ...models.store.store import Store
from .roster import Roster, logger
from .store_writer import StoreWriter

_ALIAS, _FOLLOWED = "live", ".live-of-the-store"
_DIGESTS = ".digests-of-the-store"  # JSON: the number of a version → its digest
_SELFTEST = "selftest.json"
_TUNED = "tuned"
# The beginnings of the names of files there that each server has of its own; the others are tunings.
_MEASURED_BY_SERVERS = ("setups-", "ceiling-")


class ReadOnlyStore(Conflict):
    """The order needs the store, which this server may not write. Give the order where the store is written."""

    code = "read_only_store"


def state_folder(store: Store, given: Path | None) -> Path | None:
    """The folder for this server's state where it does not write to the store: the given one, or one in the user's
    cache where the store may not be written. None: the store has it all. Raises StoreUnusable for a store that may not
    be read either, or that is not there and cannot be made."""
    if given is not None:
        store.check()
        return given.expanduser().resolve()
    try:
        store.check("the state of this server")
    except StoreUnusable:
        if not store.root.is_dir():
            raise
        store.check()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return cache / "halfeven" / "state" / hashlib.sha256(str(store.root).encode()).hexdigest()[:16]
    return None


class LinkedStore:
    """The store as this server sees it, in its state folder. Raises BadSetting where that may not be written, or has
    the state of another store."""

    def __init__(self, source: Store, folder: Path) -> None:
        self.source, self.store = source, Store(folder)
        self._models, self._from = folder / "models", source.root / "models"
        self._missed: set[str] = set()  # models that the last look did not find
        self._faults: dict[str, str] = {}  # by model: what the last look could not read
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            self.store.check("the state of this server")
        except (OSError, StoreUnusable) as error:
            raise BadSetting(
                f"the state folder {folder} cannot be written: {getattr(error, 'strerror', None) or error}; give "
                "--state (or HALFEVEN_STATE) a folder that this user may write"
            ) from error
        self._hold_to_one_store()

    def _hold_to_one_store(self) -> None:
        """Remove the links of an earlier start to a place where the store is no more: `follow` makes them anew. Raises
        BadSetting where the versions there were not those of this store. Their proofs, orders and figures are not
        about this store's versions of the same numbers."""
        links = [link for link in self._models.glob("*/[1-9]*") if link.is_symlink()]
        moved = [link for link in links if link.readlink() != self._from / link.parent.name / link.name]
        alike = {self._is_same(link.parent.name, link.name) for link in moved} - {None}
        if moved and alike != {True}:
            before = moved[0].readlink().parent.parent.parent
            why = (
                "whose versions are others" if False in alike else "and nothing shows that both are the same"
            )
            raise BadSetting(
                f"the state folder {self.store.root} has the state of the store {before}, and not of "
                f"{self.source.root}, {why}; give --state (or HALFEVEN_STATE) another folder, or delete this one"
            )
        for link in moved:
            link.unlink()

    def _is_same(self, name: str, number: str) -> bool | None:
        """True if a version that was followed has the same digest in the store as it is now; None where one of the two
        digests is not known."""
        known = _digests_in(self._models / name).get(number)
        try:
            return self.source.version(name, int(number)).digest == (
                known or self.store.version(name, int(number)).digest
            )
        except HalfevenError:
            return None

    def follow(self) -> None:
        """Take over what has changed in the store since. Raises OSError where the store cannot be listed."""
        if not self._from.is_dir():
            return  # the store is away: what is known of it stays
        _take_over(self.source.root / _SELFTEST, self.store.root / _SELFTEST)
        names = self.source.names()
        faults = dict[str, str]()
        for name in names:
            try:
                self._follow_model(name)
            except (OSError, HalfevenError) as error:  # of one model; the others are followed
                faults[name] = str(error)
                if self._faults.get(name) != faults[name]:
                    logger.error("%s cannot be read from the store: %s", name, error)
        self._faults = faults
        gone = {folder.name for folder in self._models.iterdir()} - set(names)
        for name in gone & self._missed:  # a folder that is replaced by renaming is missed by one look
            shutil.rmtree(self._models / name, ignore_errors=True)
        self._missed = gone

    def _follow_model(self, name: str) -> None:
        here, there = self._models / name, self._from / name
        here.mkdir(exist_ok=True)
        numbers = set(map(str, self.source.numbers(name)))
        for link in here.iterdir():
            if link.is_symlink() and link.name not in numbers:
                link.unlink()
        for number in numbers:
            with suppress(FileExistsError):
                (here / number).symlink_to(there / number, target_is_directory=True)
        self._note_digests(name, numbers)
        self._follow_alias(there / _ALIAS, here)
        for file in there.iterdir():
            if not file.name.startswith(".") and file.name != _ALIAS:
                _take_over(file, here / file.name)
        if (tuned := there / _TUNED).is_dir():
            self._follow_tuned(tuned, here / _TUNED)

    def _note_digests(self, name: str, numbers: set[str]) -> None:
        """Note the digest of each version, by which the store is recognised where it is mounted elsewhere."""
        known, noted = _digests_in(self._models / name), dict[str, str]()
        for number in numbers:
            with suppress(DamagedFile):
                noted[number] = known.get(number) or self.source.version(name, int(number)).digest
        if noted != known:
            replace_text(self._models / name / _DIGESTS, json.dumps(noted))

    def _follow_tuned(self, there: Path, here: Path) -> None:
        """Take over what was measured, and a tuning whenever it is made anew: what this server corrected in one that it
        has stays so until then."""
        here.mkdir(exist_ok=True)
        for file in there.iterdir():
            if not file.name.startswith("."):
                is_tuning = not file.name.startswith(_MEASURED_BY_SERVERS)
                _take_over(file, here / file.name, again=is_tuning)

    def _follow_alias(self, alias: Path, here: Path) -> None:
        """The alias is taken over when it moves: a version that this server itself took back stays so until then."""
        followed = here / _FOLLOWED
        text = stored_bytes(alias).decode(errors="replace") if alias.exists() else ""
        if followed.exists() and followed.read_text(errors="replace") == text:
            return
        if text:
            replace_text(here / _ALIAS, text)
        else:
            (here / _ALIAS).unlink(missing_ok=True)
        replace_text(followed, text)


def _digests_in(folder: Path) -> dict[str, str]:
    """The digests that were noted of a model's versions, by number; none where the file is damaged or not there."""
    try:
        found = stored_json(folder / _DIGESTS)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _take_over(file: Path, target: Path, again: bool = False) -> None:
    """Copy a file of the store beside the links, once: proofs and figures that were made before. From then on this
    server's own is kept there. ``again``: also where the store's was written later than this server's."""
    if not file.is_file() or file.is_symlink():
        return
    written_ns = file.stat().st_mtime_ns
    if target.exists() and not (again and written_ns > target.stat().st_mtime_ns):
        return
    replace_text(target, stored_bytes(file).decode(errors="replace"))
    # The store's own time: the clock of the machine that writes it may be behind.
    os.utime(target, ns=(written_ns, written_ns))


class ReadOnlyRoster(Roster):
    """A roster over the linked store, which is followed before each look."""

    def follow_store(self, linked: LinkedStore) -> "ReadOnlyRoster":
        self._linked = linked
        return self

    def look(self) -> None:
        try:
            self._linked.follow()
        except (OSError, HalfevenError) as error:
            logger.error(
                "the store %s cannot be followed; looking again: %s", self._linked.source.root, error
            )
        super().look()


class StateWriter(StoreWriter):
    """Writes orders and events into the state folder; refuses what moves the store's alias."""

    def __init__(self, linked: LinkedStore) -> None:
        super().__init__(linked.store)
        self._root = linked.source.root

    def promote(self, name: str, number: int) -> NoReturn:
        raise self._refusal(f"{name}@{number} is not promoted")

    def promote_over(self, name: str, current: int | None, number: int, by: str) -> NoReturn:
        raise self._refusal(f"{name}@{number} is not promoted")

    def roll_back(self, name: str) -> NoReturn:
        raise self._refusal(f"'{name}' is not rolled back")

    def _refusal(self, what: str) -> ReadOnlyStore:
        return ReadOnlyStore(f"{what}: {needs_the_store(self._root)}")


def needs_the_store(root: Path) -> str:
    """The sentence that says why an order is refused, and what to do."""
    return (
        f"this server only reads the store {root.absolute()}; do it where the store may be written (`halfeven "
        "promote`, `rollback`, `finetune`, `convert` with --store), and this server follows"
    )
