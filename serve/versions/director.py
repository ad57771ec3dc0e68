"""An operator's orders about versions: promote, roll back, set a canary or a shadow. Each method blocks until the order
takes effect; its result is durable."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from ...exporters.report.version_facts import facts_of
from ...models.errors import BadInput, Conflict, HalfevenError, NotReady
from ...models.store.store import LIVE, Version
from .orders import events, newest_events
from .roster import Roster
from .store_writer import Role
from .traffic.loaded_version import LoadedVersion
from .traffic.served import ServedModel, takes_requests_of


class Director:
    """Every method raises UnknownName for a model or version that is not there."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._store = roster.store

    def promote(self, name: str, version: int) -> dict[str, Any]:
        """Make this version the active one; a canary or the previous version is not loaded again.

        Raises Conflict for a refused version. Where the version cannot serve here, the reason is raised and nothing
        has changed.
        """
        with self._roster.working(name):
            wanted = self._live(name, version)
            loaded = self._roster.loaded_version_for(wanted) if self._roster.served(name) else None
            with self._roster.closing_unused(loaded):
                self._roster.writer.promote(name, wanted.number)
                self._roster.decisions.record(name, "promoted", f"{wanted} was promoted")
                if loaded is not None:
                    self._roster.activate(loaded)
            if loaded is None:
                self._follow(name, wanted)
            return self.describe(name)

    def roll_back(self, name: str) -> dict[str, Any]:
        """Make the newest live version before the active one active; at once where it is still loaded.

        Raises Conflict where there is none.
        """
        with self._roster.working(name):
            version = self._store.version(name, self._roster.writer.roll_back(name))
            self._roster.decisions.record(name, "rolled_back_by_hand", f"rolled back to {version}")
            self._follow(name, version)
            return facts_of(version)

    def canary(self, name: str, version: int | None, percent: float) -> dict[str, Any]:
        """From now on ``percent`` of the requests (by their id) go to this version; no version or 0 ends the canary.

        Raises BadInput for a percentage outside of 0 to 100, for the active version, and for another signature.
        """
        with self._ordering(name, "canary", version, percent) as (served, loaded):
            served.set_canary(loaded, percent)
        return self.describe(name)

    def shadow(self, name: str, version: int | None, percent: float) -> dict[str, Any]:
        """From now on this version answers ``percent`` of the answered requests too; no version or 0 ends the
        shadow."""
        with self._ordering(name, "shadow", version, percent) as (served, loaded):
            served.set_shadow(loaded, percent)
        return self.describe(name)

    def describe(self, name: str) -> dict[str, Any]:
        """The loaded versions with label, share and figures, as JSON; none where the name is not loaded."""
        served = self._roster.served(name)
        if served is None:
            self._store.known(name)
        described = {"name": name, "live": self._store.live_number(name)}
        fault = self._roster.fault(name)
        loaded = served.describe() if served is not None else []
        return described | {"loaded": loaded} | ({"fault": fault} if fault else {})

    def created(self, name: str) -> int:
        """The time when the model's live version was made, in seconds since 1970; 0 where nothing says so."""
        number = self._store.live_number(name) if self._store.numbers(name) else None
        with suppress(HalfevenError, KeyError, ValueError, TypeError):
            if number is not None:
                made = self._store.version(name, number).manifest["created"]
                return int(datetime.fromisoformat(made).timestamp())
        return 0

    def drift(self, name: str) -> dict[str, Any]:
        """The live parity of each loaded version that is a half, from samples of its requests."""
        served = self._serving(name)
        found = [(loaded, loaded.drift) for loaded in served.loaded_versions()]
        return {
            "model": name,
            "versions": [
                {"version": loaded.number, "precision": loaded.prepared.precision, **drift.numbers()}
                for loaded, drift in found
                if drift is not None
            ],
        }

    def events(self, name: str, most: int) -> list[dict[str, Any]]:
        """The events of one model, the newest first."""
        self.describe(name)
        return events(self._store, name, most)

    def newest_events(self, names: Iterable[str], most: int) -> list[dict[str, Any]]:
        """The events of several models, the newest first."""
        return newest_events(self._store, names, most)

    @contextmanager
    def _ordering(
        self, name: str, role: Role, version: int | None, percent: float
    ) -> Iterator[tuple[ServedModel, LoadedVersion | None]]:
        """Load the ordered version, write the order to the store, then let the block carry it out."""
        if not 0.0 <= percent <= 100.0:
            raise BadInput(f"percent = {percent!r}: expected a share from 0 (which ends the {role}) to 100")
        with self._roster.working(name):
            served = self._serving(name)
            loaded = None
            if version is not None and percent > 0.0:
                loaded = self._roster.loaded_version_for(self._fitting(served, version, role))
            with self._roster.closing_unused(loaded):
                self._roster.writer.order(name, role, loaded.number if loaded is not None else None, percent)
                yield served, loaded
            self._roster.tidy()
            sentence = f"the {role} was ended" if loaded is None else f"{loaded} is the {role}, {percent:g} %"
            self._roster.decisions.record(name, role, sentence, {"version": version, "percent": percent})

    def _fitting(self, served: ServedModel, version: int, role: str) -> Version:
        wanted, stable = self._live(served.name, version), served.traffic.stable
        if wanted.number == stable.number:
            raise BadInput(f"{wanted} is active: a {role} is another version")
        spec = wanted.spec()
        mine, theirs = stable.version.spec(), spec
        if not takes_requests_of(mine, theirs):
            raise BadInput(
                f"{wanted} has other inputs or outputs than {stable}: the same request cannot be put to both; "
                "promote it instead"
            )
        return wanted

    def _live(self, name: str, version: int) -> Version:
        self._store.known(name)
        wanted = self._store.version(name, version)
        if wanted.status != LIVE:
            raise Conflict(f"{wanted} was refused by the parity gate and is never made active")
        return wanted

    def _serving(self, name: str) -> ServedModel:
        served = self._roster.find(name)
        assert isinstance(served, ServedModel)
        return served

    def _follow(self, name: str, version: Version) -> None:
        """Make the version that the alias names active. Raises NotReady where it could not be made active."""
        self._roster.follow(name, anew=True)
        if fault := self._roster.fault(name, version.number):
            raise NotReady(f"{version} is what the store names, but it could not be made active: {fault}")
