"""Run Triton's perf_analyzer against a server and hold what its clients saw against what the server counted.

HALFEVEN_PERF_ANALYZER=…/perf_analyzer python -m tests.conformance.perf_analyzer 127.0.0.1:8000 digits

docs/conformance.md says where the binary comes from. Exit code 0: it measured and both sides agree.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

BINARY = os.environ.get("HALFEVEN_PERF_ANALYZER")
_SECTION = re.compile(r"^Request concurrency: (\d+)$", re.MULTILINE)
_SERVER_LATENCY = re.compile(
    r"Avg request latency: (\d+) usec \(overhead (\d+) usec \+ queue (\d+) usec \+ compute input (\d+) usec"
    r" \+ compute infer (\d+) usec \+ compute output (\d+) usec\)"
)
_WINDOWS = 3  # perf_analyzer sums so many stable windows, and each begins and ends in the middle of requests


@dataclass(frozen=True, slots=True)
class Measured:
    """One concurrency. Latencies are averages in µs; ``server_parts_us`` are its phases as it prints them."""

    concurrency: int
    client_requests: int
    client_us: int
    per_second: float
    inferences: int
    executions: int
    server_requests: int
    server_us: int
    server_parts_us: tuple[int, ...]

    def disagreements(self, rows: int = 1) -> list[str]:
        """The contradictions between the numbers of both sides, as sentences; ``rows`` per request."""
        found = []
        apart = abs(self.client_requests - self.server_requests)
        # Requests under way while the server's counters are read belong to one side only.
        if apart > max(2 * self.concurrency * _WINDOWS, 0.01 * self.client_requests):
            found.append(
                f"clients had {self.client_requests} answers, the server gave {self.server_requests}"
            )
        if self.inferences != self.server_requests * rows:
            found.append(f"{self.server_requests} requests of {rows} rows are not {self.inferences} rows")
        if not 0 < self.executions <= self.inferences:
            found.append(f"{self.executions} executions for {self.inferences} rows")
        if self.server_us > self.client_us:
            found.append(
                f"the server took {self.server_us} µs of the {self.client_us} µs that clients waited"
            )
        if abs(sum(self.server_parts_us) - self.server_us) > len(self.server_parts_us):
            found.append(f"the phases {self.server_parts_us} do not sum to {self.server_us} µs")
        return found


def measure(address: str, model: str, options: Sequence[str] = (), seconds: float = 300) -> str:
    """The output of perf_analyzer. Raises RuntimeError with that output where perf_analyzer fails."""
    if BINARY is None:
        raise RuntimeError("HALFEVEN_PERF_ANALYZER names no perf_analyzer (docs/conformance.md)")
    done = subprocess.run(
        [BINARY, "-m", model, "-u", address, *options], capture_output=True, text=True, timeout=seconds
    )
    if done.returncode != 0:
        raise RuntimeError(f"perf_analyzer ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def read(printed: str) -> list[Measured]:
    """One entry per concurrency that was measured to the end. Raises ValueError where a line is missing."""
    _, *pieces = _SECTION.split(printed)
    return [_one(int(number), text) for number, text in zip(pieces[::2], pieces[1::2], strict=True)]


def _one(concurrency: int, text: str) -> Measured:
    client, _, server = text.partition("Server:")
    latency = _SERVER_LATENCY.search(server)
    if latency is None:
        raise ValueError(f"no breakdown of the server's latency for concurrency {concurrency} in:\n{text}")
    total, *parts = map(int, latency.groups())
    return Measured(
        concurrency=concurrency,
        client_requests=_number(client, "Request count"),
        client_us=_number(client, "Avg latency"),
        per_second=float(_word(client, "Throughput")),
        inferences=_number(server, "Inference count"),
        executions=_number(server, "Execution count"),
        server_requests=_number(server, "Successful request count"),
        server_us=total,
        server_parts_us=tuple(parts),
    )


def _number(text: str, name: str) -> int:
    return int(_word(text, name))


def _word(text: str, name: str) -> str:
    found = re.search(rf"{name}: ([\d.]+)", text)
    if found is None:
        raise ValueError(f"perf_analyzer printed no '{name}' in:\n{text}")
    return found[1]


def main() -> int:
    address, model, *options = sys.argv[1:]
    printed = measure(address, model, options or ["--concurrency-range", "1:16:5"])
    print(printed)
    measured = read(printed)
    faults = [
        f"concurrency {item.concurrency}: {fault}" for item in measured for fault in item.disagreements()
    ]
    print("\n".join(faults) or "client and server agree")
    return 1 if faults or not measured else 0


if __name__ == "__main__":
    sys.exit(main())
