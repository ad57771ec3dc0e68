"""The faults. Each takes a world with a running server, injects one fault, and leaves a server that runs without it;
it gives the violations that were seen."""

import http.client
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.chaos.invariants import violations
from tests.chaos.servers import moments
from tests.chaos.world import World, form_of

Fault = Callable[[World], list[str]]
NO_ANSWER = (OSError, http.client.HTTPException)


# Deaths.


def killed_during(act: Callable[[World], object], most_s: float, world: World) -> list[str]:
    """SIGKILL at a random moment of ``act``, under load; another server goes on."""
    callers = world.callers()

    def acting() -> None:
        with suppress(*NO_ANSWER):
            act(world)

    thread = threading.Thread(target=acting)
    thread.start()
    world.pause(most_s)
    callers.may_die()
    world.server.kill()
    thread.join()
    faults = callers.end()
    world.start()
    return faults + world.violations()


def killed_while_it_starts(world: World) -> list[str]:
    world.server.kill()
    dying = type(world.server)(world.zygote, world.store.root, world.folder)
    world.pause(1.5)
    dying.kill()
    world.start()
    return world.violations()


def killed_while_it_drains(world: World) -> list[str]:
    callers = world.callers()
    callers.may_die()
    world.server.send(signal.SIGTERM)
    world.pause(0.3)
    world.server.kill()
    faults = callers.end()
    world.start()
    return faults + world.violations()


def publisher_killed(world: World) -> list[str]:
    """A process that publishes is killed with its draft half written; the next start removes it."""
    pid = world.zygote.ask(publish=str(world.store.root))
    world.pause(0.05)
    os.kill(pid, signal.SIGKILL)
    world.zygote.ask(wait=pid)
    world.live |= set(world.store.numbers("net"))
    world.server.kill()
    world.start()
    return world.violations()


# Damaged files.

DAMAGES: dict[str, Callable[[Path, World], object]] = {
    "empty": lambda path, _: path.write_bytes(b""),
    "cut": lambda path, world: path.write_bytes(
        path.read_bytes()[: world.chance.randrange(path.stat().st_size)]
    ),
    "one bit": lambda path, world: path.write_bytes(_flipped(path.read_bytes(), world)),
    "noise": lambda path, world: path.write_bytes(world.chance.randbytes(path.stat().st_size)),
    "zeros": lambda path, _: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path, _: path.unlink(),
    "a folder": lambda path, _: (path.unlink(), path.mkdir()),
    "a link": lambda path, _: (path.unlink(), path.symlink_to("/etc/hostname")),
    "nested": lambda path, _: path.write_bytes(b"[" * 100_000),
    "other JSON": lambda path, world: path.write_text(
        world.chance.choice(("[]", "{}", "null", "3", '{"a": [1]}'))
    ),
}
FILES = [
    *(f"models/net/2/{name}" for name in (
        "manifest.json", "spec.json", "parity.json", "precision.json", "weights.safetensors", "samples.safetensors",
        "half.pt2", "half.onnx", "original.pt2", "original.onnx", "report.html", "source/model.toml",
    )),
    *(f"models/net/{name}" for name in (
        "live", "promotions.json", "rollout.json", "drifted-2.json", "proofs-2.json", "events.jsonl",
        "1/manifest.json",
    )),
    "models/net/tuned", "halfeven.db", "keys.json", "server.lock", "files", "jobs",
]  # fmt: skip


def _flipped(data: bytes, world: World) -> bytes:
    changed = bytearray(data)
    changed[world.chance.randrange(len(data))] ^= 1 << world.chance.randrange(8)
    return bytes(changed)


def damaged(file: str, damage: str, world: World) -> list[str]:
    """A store with one damaged file: the server starts, names it, and serves the rest."""
    world.begin_again()
    path = _present(file, world)
    DAMAGES[damage](path, world)
    try:
        server = world.start()
        if server.ended is not None:
            return _refused_to_start(world, path)
        found = violations(server, world.store, world.rows, file)
        found += _answers_to_all(world)
        return [f"{damage}: {one}" for one in found]
    finally:
        world.server.kill()


def _refused_to_start(world: World, path: Path) -> list[str]:
    said = world.server.said()
    is_plain = path.name in said and "Traceback" not in said and world.server.ended in (1, 2)
    return [] if is_plain else [f"the server did not start ({world.server.ended}): {said[-500:]}"]


READING = [
    "/v1/models", "/v1/models/net", "/v1/models/net/versions", "/v1/models/net/versions/2", "/v1/models/net/events",
    "/v1/models/net/versions/2/report", "/v1/models/net/versions/2/lineage", "/v1/models/net/versions/2/plan",
    "/v2/repository/index", "/v2/models/net", "/v2/models/net/config", "/metrics", "/healthz", "/v1/files", "/",
    "/v1/fine_tuning/jobs",
]  # fmt: skip


def _answers_to_all(world: World) -> list[str]:
    """Every page of the server is answered, and no error is called a mistake of ours."""
    found = []
    for path in READING:
        method, body = ("POST", "{}") if path == "/v2/repository/index" else ("GET", "")
        status, answer = world.server.call(method, path, body)
        if (b"internal" in answer and b'"code":"internal' in answer) or b"Traceback" in answer:
            found.append(f"{path} answers {status}: {answer[:300]!r}")
    return found


def _present(file: str, world: World) -> Path:
    """The path of a file in the store, written as a server that ran before would have; the newest one of a folder."""
    path, net = world.store.root / file, world.store.root / "models/net"
    kept = {
        "rollout.json": json.dumps({"canary": {"version": 1, "percent": 20.0}, "shadow": None}),
        "drifted-2.json": json.dumps({"device": "cpu", "reason": "far off", "at": "2026-01-01T00:00:00Z"}),
        "proofs-2.json": "[]",
        "events.jsonl": '{"kind": "promoted", "message": "it was"}\n',
        "keys.json": json.dumps({"format": 1, "keys": []}),
    }
    if path.name in kept:
        path.write_text(kept[path.name])
    elif not path.exists() or path.is_dir():
        world.start()
        world.upload()
        world.server.kill()
        if file == "models/net/tuned":
            path = next((net / "tuned").iterdir())
        elif file == "files":
            path = next(path for path in path.iterdir())
        elif file == "jobs":
            path = world.store.root / "jobs/ftjob-gone/state.json"
            path.parent.mkdir(parents=True)
            path.write_text("{}")
    if path.stat().st_size == 0:  # the lock
        path.write_bytes(b"\n")
    return path


# A full disk.

DISK_BYTES = 8 << 20


def can_mount() -> bool:
    """True if this user may mount a file system."""
    return (
        os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    )


@contextmanager
def on_small_disk(world: World) -> Iterator[Path]:
    """The store on a file system of its own, which a file fills up but for a few bytes."""
    world.begin_again()
    root = world.store.root
    kept = root.with_name("kept")
    root.rename(kept)
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(root)], check=True)
    try:
        shutil.copytree(kept, root, dirs_exist_ok=True)
        world.start()
        yield root / "ballast"
    finally:
        world.server.kill()
        subprocess.run(["umount", str(root)], check=True)
        shutil.rmtree(root)
        kept.rename(root)
        world.begin_again()
        world.start()


def fill(ballast: Path, left: int) -> None:
    """Fill the disk and leave at most ``left`` bytes."""
    with suppress(OSError), ballast.open("ab", 0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, max(0, ballast.stat().st_size - left))


def full_disk(act: Callable[[World], int], world: World, ballast: Path) -> list[str]:
    """``act`` on a disk with some room or none: refused or done; with room again it is done."""
    callers = world.callers()
    fill(ballast, world.chance.choice((0, 0, 4096, 8192, 16_384, 40_000)))
    act(world)
    found = callers.end()
    ballast.unlink()
    if (status := act(world)) not in (200, 400, 409) and act is not World.publish:
        found.append(f"with room again it is answered with {status}")
    world.server.kill()
    world.start()
    return found + world.violations()


# The clock.


def clock_jumps(seconds: float, world: World) -> list[str]:
    """The wall clock is off while the server runs, uploads, promotes and starts again."""
    clock = world.folder / "clock"
    try:
        for jump in (seconds, -seconds):
            callers = world.callers()
            clock.write_text(str(jump))
            world.upload()
            world.promote()
            found = callers.end()
            world.server.kill()
            world.start()
            if found := found + world.violations():
                return found
        return []
    finally:
        clock.unlink()


# Clients.


def client_leaves(how: str, world: World) -> list[str]:
    """A client that sends a part and vanishes, or neither sends nor reads."""
    body, headers = form_of(bytes(200_000))
    kind = headers["content-type"]
    fields = f"host: localhost\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    upload = f"POST /v1/files HTTP/1.1\r\n{fields}"
    infer = "POST /v2/models/net/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n"
    sent = {
        "head": b"POST /v2/models/net/in",
        "body": infer.encode() + b'{"inputs": [',
        "upload": upload.encode() + body,
    }
    whole = sent[how]
    before = world.server.resident_bytes
    callers = world.callers()
    sockets = []
    for _ in range(40):
        connection = socket.create_connection(("127.0.0.1", world.server.port), 20)
        connection.sendall(whole[: world.chance.randrange(1, len(whole))])
        if world.chance.random() < 0.5:  # reset, not closed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sockets.append(connection)
    for connection in sockets:
        connection.close()
    found = callers.end()
    for _ in moments():
        if not list(world.store.root.glob("files/.upload-*")):
            break
    if (grown := world.server.resident_bytes - before) > 200 << 20:
        found.append(f"40 clients that left cost {grown >> 20} MiB")
    return found + world.violations()


def kills() -> dict[str, Fault]:
    return {
        "killed during a promotion": partial(killed_during, World.promote, 0.3),
        "killed during an upload": partial(killed_during, World.upload, 0.1),
        "killed during a canary's order": partial(killed_during, World.order_canary, 0.3),
        "killed during a reload": partial(killed_during, World.reload, 0.4),
        "killed during a swap": partial(killed_during, World.publish, 1.0),
        "killed while it starts": killed_while_it_starts,
        "killed while it drains": killed_while_it_drains,
        "publisher killed": publisher_killed,
    }


def others() -> dict[str, Fault]:
    jumps = {"a day": 86_400.0, "30 years": 1e9, "an hour": 3600.0}
    return {
        **{f"the clock jumps by {name}": partial(clock_jumps, seconds) for name, seconds in jumps.items()},
        **{f"clients leave in the {how}": partial(client_leaves, how) for how in ("head", "body", "upload")},
    }


def damages() -> dict[str, Fault]:
    return {f"{file}: {how}": partial(damaged, file, how) for file in FILES for how in DAMAGES}


FULL: dict[str, Callable[[World], int]] = {
    "promote": World.promote,
    "upload": World.upload,
    "canary": World.order_canary,
    "reload": World.reload,
}
