"""Requests per second of texts of different lengths: with ``[batching] lengths`` and without, in turns in one process.

    python -m tests.benchmarks.length_buckets [NET …] [--lengths uniform short ends] [--rounds 5] [--seconds 4]
                                              [--callers 32] [--out FILE.json]

Nets: ``micro`` (2 blocks of 64), ``tiny`` (2 of 128), ``mini`` (6 of 384), ``base`` (12 of 768): BERT of `transformers`
with random weights. Each is converted at O0, which proves the lengths too, and its FP32 original answers callers
of the batcher that ask again at once, each request one row of 8 to 128 ids. Lengths: ``uniform``; ``short``, as
questions and chat are (log-normal, median 20); ``ends``, half of 8 to 16 and half of 112 to 128. The first round warms
up. Answers are compared with those of the row alone; the noise is that of the original in FP64.

Processor milliseconds are those of this process: the callers take less than 0.02 of them for a request. ``ids`` are
those of a mean request, and ``ids_run`` those of a mean row as it was run. ``times`` are requests per second, and
``processor_times`` the processor's time of a request, which a busy machine changes less.
"""

import argparse
import asyncio
import json
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.inputs.samples import stored_samples
from halfeven.exporters.on_device.reprove import reference_run_of
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.load import load_original
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.store.store import Store, Version
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.interface import PreparedVersion

NETS = {"micro": (2, 64), "tiny": (2, 128), "mini": (6, 384), "base": (12, 768)}
SHORTEST, LONGEST, SIZES = 8, 128, (8, 16, 32, 48, 64, 80, 96, 112, 128)
_MODEL = """
import torch
from transformers import BertConfig, BertModel

def build():
    torch.manual_seed(0)
    return BertModel(BertConfig(num_hidden_layers={blocks}, hidden_size={width}, intermediate_size={wide},
                                num_attention_heads={heads}, attn_implementation="sdpa"))
"""
_TOML = """
name = "net"
source = "model.py:build"
max_batch_size = 32
[[inputs]]
name = "input_ids"
datatype = "INT64"
shape = [-1, "length=8..128"]
[[inputs]]
name = "attention_mask"
datatype = "INT64"
shape = [-1, "length=8..128"]
[[outputs]]
name = "last_hidden_state"
datatype = "FP32"
shape = [-1, "length", {width}]
[[outputs]]
name = "pooler_output"
datatype = "FP32"
shape = [-1, {width}]
[batching]
lengths = {sizes}
"""
Arrays = list[np.ndarray]


class Counting:
    """An engine that counts the rows that it runs and their ids."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.rows, self.ids = engine, 0, 0

    def run(self, inputs: Any) -> Arrays:
        self.rows += sum(map(len, inputs[0]))
        self.ids += sum(array.size for array in inputs[0])
        return self._engine.run(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(slots=True)
class Side:
    """A batcher with what it answered in each round: requests, seconds, processor seconds."""

    batcher: Batcher
    engine: Counting
    rounds: list[tuple[int, float, float]] = field(default_factory=list)

    @classmethod
    def of(cls, spec: ModelSpec, device: DeviceThread, engine: Engine) -> "Side":
        counting = Counting(engine)
        return cls(Batcher(spec, device, PreparedVersion("1", "", "fp32", cast(Engine, counting))), counting)

    def per_second(self) -> list[float]:
        """The requests per second of each round but the first."""
        return [requests / seconds for requests, seconds, _ in self.rounds[1:]]

    def processor_ms(self) -> list[float]:
        return [1e3 * seconds / requests for requests, _, seconds in self.rounds[1:]]


def version_of(net: str, folder: Path) -> Version:
    blocks, width = NETS[net]
    (folder / "model.py").write_text(
        _MODEL.format(blocks=blocks, width=width, wide=4 * width, heads=width // 64)
    )
    (folder / "model.toml").write_text(_TOML.format(width=width, sizes=list(SIZES)))
    return convert(folder, Store(folder / "store"), Options(("torch",), "O0")).version


def _uniform(random: np.random.Generator, number: int) -> np.ndarray:
    return random.integers(SHORTEST, LONGEST, number, endpoint=True)


def _short(random: np.random.Generator, number: int) -> np.ndarray:
    return np.clip(random.lognormal(np.log(20), 0.7, number).astype(int), SHORTEST, LONGEST)


def _ends(random: np.random.Generator, number: int) -> np.ndarray:
    low, high = (
        random.integers(8, 16, number, endpoint=True),
        random.integers(112, 128, number, endpoint=True),
    )
    return np.where(random.random(number) < 0.5, low, high)


LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "uniform": _uniform,
    "short": _short,
    "ends": _ends,
}


def requests(lengths: str, number: int = 997) -> list[Arrays]:
    random = np.random.default_rng(0)
    sizes = LENGTHS[lengths](random, number)
    return [[random.integers(0, 30000, (1, size)), np.ones((1, size), np.int64)] for size in sizes]


async def one_round(side: Side, asked: Sequence[Arrays], callers: int, seconds: float) -> None:
    numbers, answered = count(), 0
    begun, spent = time.perf_counter(), time.process_time()

    async def caller() -> None:
        nonlocal answered
        while time.perf_counter() - begun < seconds:
            await side.batcher.submit(asked[next(numbers) % len(asked)], 1)
            answered += 1

    await asyncio.gather(*(caller() for _ in range(callers)))
    side.rounds.append((answered, time.perf_counter() - begun, time.process_time() - spent))


async def answers(side: Side, asked: Sequence[Arrays]) -> list[Arrays]:
    return [one.outputs for one in await asyncio.gather(*(side.batcher.submit(one, 1) for one in asked))]


def furthest(spec: ModelSpec, engine: Engine, asked: Sequence[Arrays], came: Sequence[Arrays]) -> float:
    """The largest difference from the row alone, as a share of the output's largest value."""
    worst = 0.0
    alone = [engine.run([(array,) for array in one]) for one in asked]
    for output in range(len(spec.outputs)):
        largest = max(float(np.abs(one[output]).max()) for one in alone)
        pairs = zip(alone, came, strict=True)
        worst = max(
            worst, *(float(np.abs(one[output] - other[output]).max()) / largest for one, other in pairs)
        )
    return worst


async def measured(
    net: str, all_lengths: Sequence[str], rounds: int, seconds: float, callers: int
) -> list[dict[str, Any]]:
    """A row of the table for each of ``all_lengths``."""
    with tempfile.TemporaryDirectory() as scratch:
        version = version_of(net, Path(scratch))
        spec, device = version.spec(), DeviceThread()
        assert spec.batching.lengths == SIZES, version.manifest["notes"]
        run = reference_run_of(version, "fp16", torch.device("cpu"), stored_samples(version))
        noise = {name: noise.numbers["error"] for name, noise in run.noise.items()}
        engine = load_original(version, "torch", torch.device("cpu"), CpuSetup(torch.get_num_threads()))
        device.start()
        rows = []
        for lengths in all_lengths:
            plain = replace(spec, batching=replace(spec.batching, lengths=()))
            joined, today = sides = [Side.of(one, device, engine) for one in (spec, plain)]
            asked = requests(lengths)
            came = await answers(joined, asked[:64])
            furthest_apart = await device_call(
                device, lambda asked=asked, came=came: furthest(spec, engine, asked[:64], came)
            )
            for _ in range(rounds + 1):
                for side in sides:
                    await one_round(side, asked, callers, seconds)
            rows.append(
                _row(net, lengths, joined, today, asked)
                | {"furthest_from_alone": furthest_apart, "noise": noise}
            )
            for side in sides:
                await side.batcher.drain()
        device.stop(30)
    return rows


def _row(net: str, lengths: str, joined: Side, today: Side, asked: Sequence[Arrays]) -> dict[str, Any]:
    speeds, costs = (
        [list(way(side)) for side in (joined, today)] for way in (Side.per_second, Side.processor_ms)
    )
    return {
        "net": net,
        "lengths": lengths,
        "joined_per_second": [round(one, 1) for one in speeds[0]],
        "today_per_second": [round(one, 1) for one in speeds[1]],
        "times": round(statistics.median(map(operator.truediv, *speeds)), 2),
        "processor_times": round(statistics.median(map(operator.truediv, costs[1], costs[0])), 2),
        "processor_ms": [round(statistics.median(one), 3) for one in costs],
        "rows_a_batch": [_rows_a_batch(side) for side in (joined, today)],
        "ids": round(statistics.mean(one[0].size for one in asked), 1),
        "ids_run": [round(side.engine.ids / side.engine.rows, 1) for side in (joined, today)],
    }


async def device_call(device: DeviceThread, call: Any) -> Any:
    return await asyncio.wrap_future(device.call(call))


def _rows_a_batch(side: Side) -> float:
    found = side.batcher.all_counters()[0]
    return round(found.rows / max(found.executions, 1), 2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.length_buckets")
    parser.add_argument("nets", nargs="*", default=["micro", "tiny"], choices=[*NETS, []], metavar="NET")
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--out", type=Path, help="results.json")
    asked = parser.parse_args()
    rows = []
    for net in asked.nets:
        found = asyncio.run(measured(net, asked.lengths, asked.rounds, asked.seconds, asked.callers))
        rows += found
        for row in found:
            print(json.dumps(row), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
