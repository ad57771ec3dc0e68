"""The server's life: start the device, follow the store, answer; then refuse, finish, stop."""

import asyncio
import errno
import fcntl
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import uvicorn
from fastapi import FastAPI

from ..models.engines.device_choice import resolve_device
from ..models.engines.true_fp32 import use_true_fp32
from ..models.errors import BadSetting, HalfevenError, StoreUnusable
from ..models.order.one_order import one_order
from ..models.order.order_settings import order_bounds
from ..models.store.reserve import keep_reserve
from ..models.store.store import Store
from .access.certificates import Certificates
from .access.keys import Owners
from .address import address
from .batching.counters import Phase
from .batching.device import DeviceThread
from .batching.place import Place
from .dashboard.facts import Behind
from .dashboard.routes import add_pages
from .endpoint.endpoint_process import close_all, started
from .finetune.data.files import UPLOADS, Files
from .finetune.data.kept_files import KeptFiles
from .finetune.jobs.records.database import DATABASE
from .finetune.jobs.records.job_store import JobStore
from .finetune.jobs.records.job_types import JobRow
from .finetune.jobs.supervisor import Supervisor, jobs_at_once, trainer_memory
from .finetune.jobs.training_request import TrainingPlace
from .finetune.jobs.trial_run import TrialRuns
from .finetune.web.api import SHOWN_JOBS, router
from .finetune.web.refused import refuse_training
from .http.connection.hot_protocol import HotProtocol
from .http.connection.polite_server import Beside, PoliteServer
from .http.error_mapping import hidden_folders
from .http.inference import Inference
from .http.limits.bounds import ServerBounds
from .http.limits.connections import Connections, backlog_of, connection_limit, raise_descriptor_limit
from .http.limits.memory_budget import MemoryBudget, default_limit
from .http.page_headers import PageHeaders
from .http.routes.app import build_app
from .http.routes.infer import InferFront
from .http.routes.metrics import RolloutCollector, metrics_text, new_registry
from .http.routes.versions import history_of
from .http.routes.versions import router as rollout_router
from .http.server_load import LoadCollector, ServerLoad
from .settings import Settings
from .tracing.otel_environment import provider_from, traces_wanted
from .versions.director import Director
from .versions.loading.release import give_back_freed, one_heap
from .versions.read_only_store import LinkedStore, ReadOnlyRoster, StateWriter, needs_the_store, state_folder
from .versions.roster import Roster
from .versions.traffic.loaded_version import LoadedVersion
from .versions.traffic.rules import TrialRules

if TYPE_CHECKING:
    from .grpc.grpc_server import GrpcServer

logger = logging.getLogger("halfeven")
Notify = Callable[[str], None]


def build(settings: Settings, store: Store) -> tuple[InferFront, Roster]:
    """The ASGI application (its lifespan starts and stops the roster) and the roster behind it.

    Raises BadSetting, StoreUnusable.
    """
    state = state_folder(store, settings.state)
    with ExitStack() as opened:  # is closed here where something raises, else by the lifespan
        opened.enter_context(hidden_folders((store.root, state, settings.keys.path.parent)))
        if state is not None:
            return _build_read_only(settings, LinkedStore(store, state), opened)
        return _build(settings, store, opened)


def _build(settings: Settings, store: Store, opened: ExitStack) -> tuple[InferFront, Roster]:
    store.root.mkdir(parents=True, exist_ok=True)
    place = place_of(settings)
    roster = Roster(store, place, rules_of(settings), required=settings.required)
    opened.enter_context(alone_with(store))
    keep_reserve(store.root)
    job_store = opened.enter_context(closing(JobStore(store.root / DATABASE)))
    newest = partial(job_store.jobs, None, SHOWN_JOBS, None)
    app, front = application(settings, roster, job_store.count_by_status, newest)
    opened.callback(close_all, app.state.endpoints)
    files = Files(store.root / UPLOADS, settings.limits.upload_bytes, most_bytes=settings.limits.files_bytes)
    kept = KeptFiles(job_store, files)
    device, kind, threads = str(place.device), place.device.type, settings.trainer_threads
    at_once, leaving = jobs_at_once(settings, kind), lambda: roster.leaving
    memory = trainer_memory(settings, kind, at_once)
    training = TrainingPlace(device, threads, settings.trainer_priority, memory, settings.trainer_processes)
    supervisor = Supervisor(job_store, kept, store, roster, place, training, at_once)
    trials = TrialRuns(job_store, files, store, device, threads, trainer_memory(settings, kind), leaving)
    app.include_router(router(job_store, kept, store, supervisor.wake, leaving, trials.run))
    app.router.lifespan_context = _lifespan(roster, opened.pop_all(), settings.shutdown_seconds, supervisor)
    return front, roster


def _build_read_only(settings: Settings, linked: LinkedStore, opened: ExitStack) -> tuple[InferFront, Roster]:
    """The front door and the roster of a server over a store that is only read: nothing is trained, and no alias
    moves."""
    logger.warning("the store %s is only read; state is kept in %s", linked.source.root, linked.store.root)
    opened.enter_context(alone_with(linked.store))
    writer, place = StateWriter(linked), place_of(settings)
    roster = ReadOnlyRoster(linked.store, place, rules_of(settings), writer, settings.required)
    app, front = application(settings, roster.follow_store(linked), dict)
    opened.callback(close_all, app.state.endpoints)
    refuse_training(app, f"nothing is trained here: {needs_the_store(linked.source.root)}")
    app.router.lifespan_context = _lifespan(roster, opened.pop_all(), settings.shutdown_seconds)
    return front, roster


def place_of(settings: Settings, at_rest: Callable[[], object] = give_back_freed) -> Place:
    """The device with its thread, which is not started yet. ``at_rest`` as `DeviceThread` takes it."""
    use_true_fp32()
    device = resolve_device(settings.device)
    nice = settings.compute_nice if device.type == "cpu" else 0
    thread = DeviceThread(str(device), nice=nice, at_rest=at_rest)
    return Place(device, thread, settings.fallback == "fp32", settings.rescue)


def application(
    settings: Settings,
    roster: Roster,
    jobs_by_status: Callable[[], Mapping[str, int]],
    jobs: Callable[[Owners], Sequence[JobRow]] = lambda _: (),
) -> tuple[FastAPI, InferFront]:
    """Every route but those of fine-tuning, and what stands in front of them. The caller sets the lifespan."""
    director = Director(roster)
    written: dict[str, Phase] = {}
    limits = settings.limits
    bounds, load = _bounds(settings), ServerLoad(lambda: _loaded(roster))
    registry = new_registry(
        lambda: _loaded(roster), lambda: {name: written[name] for name in list(written) if roster.knows(name)}
    )
    registry.register(RolloutCollector(roster.all, roster.decisions))
    registry.register(LoadCollector(load, bounds, lambda: roster.ready, jobs_by_status))
    inference_of, front_of = _traced()
    inference = inference_of(roster, settings.triton_strict, written)
    history = history_of(roster.store, director.roll_back)
    access, guard = settings.access, settings.guard
    app = build_app(
        roster,
        lambda: metrics_text(registry),
        history,
        settings.name_on_the_wire,
        max_body_bytes=limits.body_bytes,
        body_timeout_s=limits.arrival_seconds,
        as_triton=settings.triton_strict,
        root_path=settings.root_path,
        inference=inference,
        # Their processes are started last: nothing below raises, and the caller ends them.
        endpoints=started(settings.endpoint_places, settings.endpoint_seconds, settings.endpoint_memory_mib),
    )
    app.include_router(rollout_router(director))
    behind = Behind(roster, director, history, access, jobs, time.monotonic(), settings.root_path)
    add_pages(app, behind, inference, limits.body_bytes, limits.arrival_seconds)
    front = front_of(
        PageHeaders(app),
        roster,
        limits.body_bytes,
        limits.arrival_seconds,
        inference,
        guard,
        bounds,
        access,
        load,
    )
    return app, front


def _loaded(roster: Roster) -> list[LoadedVersion]:
    return [one for served in roster.all() for one in served.loaded_versions()]


def _traced() -> tuple[Callable[..., Inference], Callable[..., InferFront]]:
    """The makers of the inference and the front, which write spans where the OTEL_… variables ask for traces.

    Raises BadSetting as `provider_from`.
    """
    if not traces_wanted(os.environ):
        return Inference, InferFront
    provider = provider_from(os.environ)
    # OpenTelemetry is an optional dependency.
    from .tracing.traced_front import RequestSpans, TracedFront, TracedInference

    spans = RequestSpans(provider.get_tracer("halfeven"))
    return partial(TracedInference, spans), partial(TracedFront, spans)


def rules_of(settings: Settings) -> TrialRules:
    return TrialRules(
        keep_previous_s=settings.keep_previous_seconds,
        faults=settings.watch_faults,
        fault_share=settings.watch_fault_share,
        slower=settings.watch_slower,
        parity_sample=settings.parity_sample,
        drift_over=settings.drift_over,
        drift_of=settings.drift_of,
        keep_drifted=settings.keep_drifted,
    )


def serve(settings: Settings, store: Store, notify: Notify) -> None:
    """Serve until a signal comes. Raises BadSetting where the address cannot be had."""
    certificates = settings.certificates
    one_heap()
    raise_descriptor_limit()
    if settings.models is not None:
        convert_all(settings.models, store, notify)
    app, roster = build(settings, store)
    config = http_config(settings, app, certificates)
    beside = grpc_beside(settings, app, roster, certificates)
    server = _Announcing(config, settings.drain_seconds, roster, notify, beside)
    server.run()


def http_config(settings: Settings, app: InferFront, certificates: Certificates | None) -> uvicorn.Config:
    """The configuration of uvicorn for HTTP."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=cast(type[HotProtocol], partial(HotProtocol, root_path=settings.root_path)),
        ws="none",  # else uvicorn would hand the connection over to whatever library is installed
        backlog=backlog_of(app.bounds.connections.limit),
        proxy_headers=False,  # the caller's address is not used here
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=settings.limits.idle_seconds,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
    )
    if certificates is not None:
        config.load()
        config.ssl = certificates.server_context()
    return config


def grpc_server() -> type["GrpcServer"]:
    """Raises BadSetting where grpcio is not installed."""
    try:
        from .grpc.grpc_server import GrpcServer  # grpcio is 20 MB that a server without gRPC does not need
    except ImportError as error:
        raise BadSetting(
            f"--grpc-port needs grpcio, which cannot be imported ({error}): pip install 'halfeven[grpc]'"
        ) from error
    return GrpcServer


def grpc_beside(
    settings: Settings, front: InferFront, roster: Roster, certificates: Certificates | None
) -> Beside | None:
    """The gRPC server that the settings ask for."""
    if settings.grpc_port is None:
        return None
    named = settings.name_on_the_wire
    return grpc_server()(
        front, roster, settings.host, settings.grpc_port, named, certificates, settings.limits
    )


def convert_all(folder: Path, store: Store, notify: Notify) -> None:
    """Convert every model folder below ``folder``; one that cannot be converted is reported and left out."""
    from ..exporters.conversion.convert import (  # 25 MB that a server without --models does not need
        Options,
        convert,
    )

    if not folder.is_dir():
        raise BadSetting(f"--models {folder}: there is no such folder")
    for path in sorted(p.parent for p in folder.glob("*/model.toml")):
        try:
            with one_order(order_bounds()):
                converted = convert(path, store, Options(), notify)
            notify(f"{converted.version} is {converted.version.status}: {converted.facts['reason']}")
        except (HalfevenError, OSError) as error:  # a full disk: what the store has is served
            notify(f"{path.name}: {error}")


class _Announcing(PoliteServer):
    """Announces the address once it listens: with port 0 the system chooses the port."""

    def __init__(
        self,
        config: uvicorn.Config,
        grace_s: float,
        roster: Roster,
        notify: Notify,
        beside: Beside | None = None,
    ) -> None:
        super().__init__(config, grace_s, roster.leave, beside=beside)
        self._roster = roster
        self._notify = notify

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "http" if self.config.ssl is None else "https"
            if self.beside is not None:
                self._notify(f"halfeven listens for gRPC on {address(host, self.beside.port)}")
            self._notify(f"halfeven listens on {scheme}://{address(host, port)}")
            asyncio.get_running_loop().run_in_executor(None, notify_active, self._roster, self._notify)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.grace_s:
            self._notify(
                f"halfeven is shutting down: not ready from now on, it still answers for {self.grace_s:g} s, then "
                "it finishes the requests under way; a second signal ends the wait"
            )
        await super().shutdown(sockets)


def notify_active(roster: Roster, notify: Notify) -> None:
    """Wait for the models that were in the store at the start, and name those that are active."""
    roster.wait()
    for served in roster.all():
        prepared = served.prepared
        active = f"{served.name}@{prepared.version} is active: {prepared.precision}, {prepared.engine.form}"
        notify(f"{active} on {prepared.engine.device} ({prepared.reason})")
    for fault in roster.not_ready_reasons():
        notify(f"not ready: {fault}")
    if not (store := roster.store).names():
        notify(
            f"the store {store.root} has no model yet: `halfeven convert FOLDER --store {store.root}` puts one "
            "there, and this server takes it up by itself; `halfeven serve --models DIR` converts every model "
            "folder in DIR; `halfeven demo` shows the whole way"
        )


def alone_with(store: Store) -> IO[bytes]:
    """The store's lock, held while the file is open: its database has one writer, its jobs one supervisor."""
    path = store.root / "server.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.fdopen(os.open(path, flags, 0o644), "r+b", buffering=0)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise StoreUnusable(
            f"the store's lock {path} cannot be opened: {reason}; remove it, or choose another --store"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise BadSetting(
            f"another server has the store {store.root}: stop it, or choose another --store or --state"
        ) from None
    return lock


def _lifespan(
    roster: Roster, opened: ExitStack, seconds: float, supervisor: Supervisor | None = None
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """``opened``: the lock, the database and the endpoints of the server, which are closed at its end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with opened:
            roster.start()
            if supervisor is not None:
                supervisor.start()
            yield
            if supervisor is not None:
                await asyncio.to_thread(supervisor.stop, seconds)
            await roster.stop(seconds)

    return lifespan


def _bounds(settings: Settings) -> ServerBounds:
    """Raises BadSetting for more connections than this process may have."""
    limits = settings.limits
    # The connections of gRPC have the same limit once more, and so have TLS handshakes under way.
    each = 1 + (settings.grpc_port is not None) + (settings.tls_cert is not None)
    return ServerBounds(
        limits.arrival_seconds,
        MemoryBudget(limits.in_flight_bytes or default_limit()),
        Connections(connection_limit(limits.connections, each)),
    )
