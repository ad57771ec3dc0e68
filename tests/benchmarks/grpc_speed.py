"""gRPC beside HTTP on the smallest model, in one run: requests per second of 32 callers, and what one caller waits for.

    python -m tests.benchmarks.grpc_speed [--rounds 6] [--seconds 2]

One server speaks both. The callers are tasks of this process that send bytes made beforehand and do not read the
answers' tensors: raw HTTP/1.1 over kept connections, and calls of `grpc.aio` over channels of their own. The two are
asked in turn. The last line on stdout is JSON: medians over the rounds; times in microseconds.
"""

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import numpy as np
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from halfeven.serve.grpc.messages import SERVICE, message

from tests.benchmarks.fixed_batch import wait_until_ready
from tests.benchmarks.one_caller import request
from tests.benchmarks.server_process import free_port, process
from tests.benchmarks.workloads import write_folder

CALLERS = 32
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)")
Ask = Callable[[], Awaitable[None]]
Caller = Callable[[AsyncExitStack, int], Awaitable[Ask]]


async def over_http(stack: AsyncExitStack, port: int) -> Ask:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    sent = request()

    async def ask() -> None:
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert head.startswith(b"HTTP/1.1 200") and length, head
        await reader.readexactly(int(length[1]))

    return ask


async def over_grpc(stack: AsyncExitStack, port: int) -> Ask:
    # All channels to one address would share a connection without this option.
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    await stack.enter_async_context(channel)
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
    rows = np.random.default_rng(7).standard_normal((1, 64), np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64]}
    made = message("ModelInferRequest")(
        model_name="tiny", inputs=[tensor], raw_input_contents=[rows.tobytes()]
    )
    sent = made.SerializeToString()

    async def ask() -> None:
        await call(sent)

    return ask


async def measured(caller: Caller, port: int, callers: int, seconds: float) -> tuple[float, float]:
    """Requests per second of so many callers, and the median microseconds of an answer."""
    took: list[float] = []
    async with AsyncExitStack() as stack:
        asks = [await caller(stack, port) for _ in range(callers)]
        for ask in asks:  # connections are set up
            await ask()
        began = time.perf_counter()
        ends = began + seconds

        async def again_and_again(ask: Ask) -> None:
            while (since := time.perf_counter()) < ends:
                await ask()
                took.append((time.perf_counter() - since) * 1e6)

        await asyncio.gather(*map(again_and_again, asks))
        return len(took) / (time.perf_counter() - began), statistics.median(took)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--seconds", type=float, default=2.0)
    given = options.parse_args()
    rates: dict[str, list[float]] = {"http": [], "grpc": []}
    waits: dict[str, list[float]] = {"http": [], "grpc": []}
    with tempfile.TemporaryDirectory() as folder:
        where, http, grpc_port = Path(folder), free_port(), free_port()
        convert(write_folder(where, "tiny", "torch", "O0"), Store(where / "store"), Options(forms=("torch",)))
        command = ["halfeven.serve.cli.main", "serve", "--store", "store", "--device", "cpu"]
        with process([*command, "--grpc-port", str(grpc_port)], where, http):
            roads: dict[str, tuple[Caller, int]] = {"http": (over_http, http), "grpc": (over_grpc, grpc_port)}
            wait_until_ready(http)
            for _ in range(given.rounds):
                for name, (caller, port) in roads.items():
                    waits[name].append(asyncio.run(measured(caller, port, 1, given.seconds))[1])
                    rates[name].append(asyncio.run(measured(caller, port, CALLERS, given.seconds))[0])
    found = {name: {"rate_of_32": round(statistics.median(rates[name])),
                    "p50_of_one_us": round(statistics.median(waits[name]))} for name in rates}  # fmt: skip
    ratio = statistics.median(g / h for h, g in zip(rates["http"], rates["grpc"], strict=True))
    later = statistics.median(g - h for h, g in zip(waits["http"], waits["grpc"], strict=True))
    print(json.dumps({**found, "rate_ratio": round(ratio, 3), "later_us": round(later)}))


if __name__ == "__main__":
    main()
