"""One store with its servers, and what was acknowledged to callers: it must be so after any fault."""

import hashlib
import json
import shutil
import time
from pathlib import Path
from random import Random

from halfeven.models.store.store import Store

from tests.chaos.callers import Callers, infer
from tests.chaos.converted import copied
from tests.chaos.invariants import violations
from tests.chaos.publishing import publish_again
from tests.chaos.servers import Server, Zygote

BOUNDARY = "chaos"


class World:
    """``live``: the versions of ``net`` that may be active now: several where an order was not acknowledged."""

    def __init__(self, zygote: Zygote, folder: Path, seed: int) -> None:
        self.zygote, self.folder, self.chance = zygote, folder, Random(seed)
        self._converted = copied(folder / "converted").root
        self.store = Store(Path(shutil.copytree(self._converted, folder / "store")))
        self.live, self.files, self.jobs = {2}, dict[str, str](), set[str]()
        self.asked = list[Callers]()
        self.server = self.start()
        self.rows: dict[str, tuple[list[float], list[float]]] = {}
        for name in ("net", "other"):
            row = [self.chance.uniform(-2, 2) for _ in range(4)]
            status, _, answer = infer(self.server, name, row)
            assert status == 200, answer
            self.rows[name] = row, answer

    def start(self, **environment: str) -> Server:
        self.server = Server(self.zygote, self.store.root, self.folder, **environment)
        self.server.wait_ready()
        return self.server

    def recover(self) -> None:
        """A server on the store as it was converted, where a fault has left none."""
        if self.server.ended is not None:
            self.begin_again()
            self.start()

    def begin_again(self) -> None:
        """The store as it was converted; nothing was acknowledged."""
        self.server.kill()
        shutil.rmtree(self.store.root)
        shutil.copytree(self._converted, self.store.root)
        self.live, self.files, self.jobs = {2}, {}, set()

    def callers(self) -> Callers:
        self.asked.append(Callers(self.server, self.rows))
        return self.asked[-1]

    def lost(self) -> str:
        """A sentence with the number of requests that got no answer because their server was killed meanwhile."""
        lost, answered = sum(one.lost for one in self.asked), sum(one.statuses.total() for one in self.asked)
        return f"{lost} of {lost + answered} requests were lost with their connection"

    def pause(self, most_s: float) -> None:
        """Wait for a random time, at most ``most_s`` seconds."""
        time.sleep(self.chance.uniform(0, most_s))

    def violations(self) -> list[str]:
        """The violations of the running server, for which no file was damaged."""
        found = violations(self.server, self.store, self.rows)
        number = self.store.live_number("net")
        if number not in self.live:
            found.append(f"net@{number} is active, acknowledged was one of {sorted(self.live)}")
        self.live = {number or 0}
        for id, sha256 in self.files.items():
            status, content = self.server.call("GET", f"/v1/files/{id}/content")
            if status != 200 or hashlib.sha256(content).hexdigest() != sha256:
                found.append(f"the file {id} was acknowledged, and is answered with {status}")
        for id in self.jobs:
            status, _ = self.server.call("GET", f"/v1/fine_tuning/jobs/{id}")
            if status != 200:
                found.append(f"the job {id} was acknowledged, and is answered with {status}")
        return found

    # Acts of callers and operators. Each may end with OSError or HTTPException where the server is killed meanwhile.

    def promote(self) -> int:
        number = self.chance.choice(self.store.numbers("net"))
        before, self.live = self.live, self.live | {number}
        status, body = self.server.order("/v1/models/net/promote", {"version": number})
        assert status in (200, 409, 500, 503, 507), body
        self.live = {number} if status == 200 else before
        return status

    def upload(self, size: int = 20_000) -> int:
        content = self.chance.randbytes(size)
        status, body = self.server.call("POST", "/v1/files", *form_of(content))
        assert status in (200, 507, 500, 503), body
        if status == 200:
            self.files[json.loads(body)["id"]] = hashlib.sha256(content).hexdigest()
        return status

    def order_canary(self) -> int:
        asked = {"version": 1, "percent": self.chance.choice((0, 50))}
        status, body = self.server.order("/v1/models/net/canary", asked)
        assert status in (200, 400, 500, 503, 507), body
        return status

    def reload(self) -> int:
        rows = json.dumps({"max_batch_size": self.chance.randint(1, 8)})
        return self.server.order("/v2/repository/models/net/load", {"parameters": {"config": rows}})[0]

    def publish(self) -> int:
        """A version more, made active by another process's order, as `halfeven convert` does."""
        version = publish_again(self.store, "net", "net")
        self.live |= {version.number}
        self.store.promote(version)
        self.live = {version.number}
        return version.number


def form_of(content: bytes) -> tuple[bytes, dict[str, str]]:
    """The body and headers of an upload."""
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n',
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="rows.npz"\r\n\r\n',
    ]
    head = b"".join(part % BOUNDARY.encode() for part in parts)
    body = head + content + b"\r\n--%b--\r\n" % BOUNDARY.encode()
    return body, {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
