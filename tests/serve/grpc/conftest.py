"""The gRPC server beside the HTTP one, over the same roster."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.certificates import Certificates
from halfeven.serve.grpc.grpc_server import GrpcServer
from halfeven.serve.http.connection.polite_server import PoliteServer
from halfeven.serve.http.inference import Inference
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.limits.request_limits import DEFAULTS, RequestLimits
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront
from halfeven.serve.http.server_load import ServerLoad

from tests.serve.conftest import HISTORY, FakeRoster, make_roster, started

MOST = 256 * 1024  # bytes of a message


@dataclass
class Both:
    """The two addresses of one server, ``host:port``, and what is behind them."""

    roster: FakeRoster
    front: InferFront
    grpc: str
    http: str
    server: PoliteServer


Start = Callable[..., Both]


@contextmanager
def serving(
    access: AccessControl | None = None,
    certificates: Certificates | None = None,
    bounds: ServerBounds | None = None,
    seconds: int = 1,
    load: ServerLoad | None = None,
    limits: RequestLimits = DEFAULTS,
) -> Iterator[Both]:
    roster = make_roster()
    inference = Inference(roster)
    app = build_app(roster, lambda: b"", HISTORY, "triton", max_body_bytes=MOST, inference=inference)
    wait_s = bounds.seconds if bounds else 30
    front = InferFront(app, roster, MOST, wait_s, inference, access=access, bounds=bounds, load=load)
    beside = GrpcServer(front, roster, "127.0.0.1", 0, "triton", certificates, limits)
    with started(front, seconds=seconds, beside=beside) as server:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Both(roster, front, f"127.0.0.1:{beside.port}", f"127.0.0.1:{port}", server)


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts a server, which ends with the test."""
    with ExitStack() as stack:
        yield lambda **more: stack.enter_context(serving(**more))
