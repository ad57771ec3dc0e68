"""A roster whose models note the phases of their answers on the current span, whichever protocol asks."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from opentelemetry.context import Context, get_current

from ...models.spec import ModelSpec
from ..batching.interface import (
    NO_TERMS,
    Answer,
    ControlledRoster,
    IndexEntry,
    LoadConfig,
    PreparedVersion,
    Served,
    ServedName,
    Statistics,
    Submit,
    Terms,
)
from .request_spans import RequestSpans


class TracedRoster:
    """``roster`` with spans; what is not about requests is handed on."""

    def __init__(self, roster: ControlledRoster, spans: RequestSpans) -> None:
        self._roster, self._spans = roster, spans

    def find(self, name: str, version: str | None = None) -> Served:
        return _TracedModel(self._roster.find(name, version), self._spans)

    def all(self) -> Sequence[ServedName]:
        return self._roster.all()

    @property
    def ready(self) -> bool:
        return self._roster.ready

    @property
    def lost(self) -> str | None:
        return self._roster.lost

    @property
    def leaving(self) -> bool:
        return self._roster.leaving

    def not_ready_reasons(self, reaches: Callable[[str], bool] = lambda _: True) -> list[str]:
        return self._roster.not_ready_reasons(reaches)

    def load(self, name: str, config: LoadConfig | None = None) -> None:
        self._roster.load(name, config)

    def unload(self, name: str) -> None:
        self._roster.unload(name)

    def index(self) -> Sequence[IndexEntry]:
        return self._roster.index()


class _TracedModel:
    def __init__(self, served: Served, spans: RequestSpans) -> None:
        self._served, self._spans = served, spans

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        parent, submitted_ns = get_current(), time.time_ns()
        future = self._served.submit(arrays, rows, terms)
        if future.done():  # answered at once: its callbacks would run after the request's span has ended
            self._note(submitted_ns, parent, future)
        else:
            future.add_done_callback(partial(self._note, submitted_ns, parent))
        return future

    def _note(self, submitted_ns: int, parent: Context, future: asyncio.Future[Answer]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._spans.phases(future.result(), submitted_ns, parent)

    @property
    def name(self) -> str:
        return self._served.name

    @property
    def spec(self) -> ModelSpec:
        return self._served.spec

    @property
    def batcher(self) -> Submit:
        return self._served.batcher

    @property
    def prepared(self) -> PreparedVersion:
        return self._served.prepared

    def statistics(self) -> Statistics:
        return self._served.statistics()
