"""Four processors as given facts: how long each form takes in each setup. Nothing here asks the machine it runs on.

An engine of a fake processor moves a clock by hand and never sleeps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, combinations
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines import engine
from halfeven.models.engines.cpu.setup import (
    BRIEF_SPINNING,
    NO_SPINNING,
    PACKED_CONVOLUTIONS,
    PACKED_PRODUCTS,
    SHARED_ROWS,
    WITHOUT_LOCK,
    CpuSetup,
)
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.batching.interface import PreparedVersion, ServableForm
from halfeven.serve.versions.loading import candidate_forms, cpu_choice, useful_rows
from halfeven.serve.versions.loading.tuned import Way

CPU = torch.device("cpu")
TORCH = (PACKED_CONVOLUTIONS, PACKED_PRODUCTS, WITHOUT_LOCK)
ONNX = (BRIEF_SPINNING, NO_SPINNING)
SPEC = ModelSpec(
    "net", (TensorSpec("x", "FP32", (Dim(), Dim(4, 4))),), (TensorSpec("y", "FP32", (Dim(),)),), 32
)


@dataclass(frozen=True, eq=False)
class Processor:
    """``factors``: of a form's and of a pass's time. ``row_s``, ``batch_s``: of the plain FP32 program on one core."""

    name: str
    factors: dict[str, float]
    cores: int = 4
    row_s: float = 2e-3
    batch_s: float = 4e-3

    def units(self) -> list[str]:
        """The half types that it multiplies itself: those whose programs are faster than in FP32."""
        return [kind for kind in ("bf16", "fp16") if self.factors.get(f"torch {kind}", 1.0) < 1.0]

    def seconds(self, way: Way, rows: int) -> float:
        product = (self.batch_s + self.row_s * rows) * self.factors.get(f"{way.form} {way.precision}", 1.0)
        for name in way.setup.passes:
            product *= self.factors.get(name, 1.0)
        return product / (1 + 0.8 * (max(way.threads, 1) - 1))


AVX2 = Processor(
    "AVX2",
    {
        PACKED_CONVOLUTIONS: 8.0, PACKED_PRODUCTS: 0.9, WITHOUT_LOCK: 0.9,
        "onnx fp32": 0.6, "torch bf16": 6.0, "torch fp16": 30.0, "onnx fp16": 1.4,
    },
)  # fmt: skip
AVX512 = Processor(
    "AVX-512",
    {
        PACKED_CONVOLUTIONS: 0.5, PACKED_PRODUCTS: 0.7, WITHOUT_LOCK: 0.95,
        "onnx fp32": 0.8, "torch bf16": 3.0, "torch fp16": 30.0, "onnx fp16": 1.4,
    },
)  # fmt: skip
BF16 = Processor(
    "AVX-512 with bf16",
    {
        PACKED_CONVOLUTIONS: 0.9, PACKED_PRODUCTS: 0.6, WITHOUT_LOCK: 0.95,
        "onnx fp32": 0.8, "torch bf16": 0.45, "torch fp16": 30.0, "onnx fp16": 1.4,
    },
)  # fmt: skip
AMX = Processor(
    "FP16 and AMX",
    {
        PACKED_CONVOLUTIONS: 0.9, PACKED_PRODUCTS: 0.6, WITHOUT_LOCK: 1.2,
        "onnx fp32": 0.8, "torch bf16": 0.3, "torch fp16": 0.25, "onnx fp16": 1.4,
    },
)  # fmt: skip
PROCESSORS = (AVX2, AVX512, BF16, AMX)


def by_chance(chance: Random) -> Processor:
    """A processor that nobody has seen: passes and forms gain or lose by chance, and one pass may lose much."""
    factors = {name: chance.choice([0.5, 0.7, 0.9, 1.0]) for name in (PACKED_PRODUCTS, WITHOUT_LOCK, *ONNX)}
    factors |= {chance.choice([PACKED_PRODUCTS, WITHOUT_LOCK]): chance.choice([0.9, 1.2])}
    factors |= {
        PACKED_CONVOLUTIONS: chance.choice([0.5, 0.9, 1.0, 8.0]),
        "onnx fp32": chance.choice([0.6, 0.8, 1.2]),
    }
    factors |= {
        "torch bf16": chance.choice([0.3, 0.5, 0.8, 3.0]),
        "torch fp16": chance.choice([0.25, 1.5, 30.0]),
    }
    factors |= {"onnx fp16": chance.choice([0.5, 1.4, 10.0])}
    row_s, batch_s = chance.choice([1.2e-3, 3e-3, 6e-3]), chance.choice([1e-4, 1e-3, 4e-3])
    return Processor("by chance", factors, chance.choice([1, 2, 4]), row_s, batch_s)


FORMS = (("torch", "fp32"), ("onnx", "fp32"), ("torch", "bf16"), ("torch", "fp16"), ("onnx", "fp16"))


def possible(form: str, setup: CpuSetup) -> set[str]:
    """The passes that an engine of the form allows, as the real ones do."""
    if form == "onnx":
        return {*ONNX} if setup.threads != 1 else set()
    shared = WITHOUT_LOCK in setup.passes and setup.threads > 1
    return {*TORCH, SHARED_ROWS} if shared else {*TORCH}


def ways(processor: Processor, forms: Sequence[tuple[str, str]] = FORMS) -> Iterator[Way]:
    """Every way that there is."""
    for form, precision in forms:
        names = TORCH if form == "torch" else ONNX
        for passes in chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)):
            for threads in (1, processor.cores):
                if (setup := CpuSetup(threads, frozenset(passes))).only(possible(form, setup)) == setup:
                    yield Way(form, precision, setup)


@dataclass(eq=False)
class World:
    """A processor, its clock, and the engines that are loaded on it.

    ``noise`` gives the factor of the next run. ``queue``: what the device ran, in order, as (way, rows, seconds).
    """

    processor: Processor
    now: float = 0.0
    noise: Callable[[], float] = lambda: 1.0
    crowded: float = 0.0
    load_s: float = 0.0  # of an engine
    runs: list[tuple[Way, int, float]] = field(default_factory=list)
    loaded: list["Engine"] = field(default_factory=list)
    most_loaded: int = 0
    possible: Callable[[str, CpuSetup], set[str]] = possible

    device = CPU
    rescue = True
    apart = False

    def clock(self) -> float:
        return self.now

    def call(self, run: Callable[[], Any]) -> Any:
        return run()

    @property
    def thread(self) -> Any:
        return SimpleNamespace(native_id=None, asleep=True)

    def seconds(self, engine: Any, parts: Any) -> float:
        """The seconds of a batch, as `cpu_choice.batch_seconds` takes them."""
        began = self.now
        engine.run(parts)
        return self.now - began

    def seconds_on_core(self, run: Callable[[], object]) -> float:
        began = self.now
        run()
        return self.now - began

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The choices of a load measure by this clock, on these cores."""
        for module in (cpu_choice, candidate_forms, useful_rows):
            monkeypatch.setattr(module, "seconds_on_core", self.seconds_on_core)
        for module in (cpu_choice, candidate_forms):
            monkeypatch.setattr(module, "Crowding", self.crowding)
        monkeypatch.setattr(cpu_choice, "usable_cores", lambda: self.processor.cores)
        monkeypatch.setattr(cpu_choice, "_SPINNING_ENDS_SECONDS", 0.0)

    def crowding(self, at_once: bool = True) -> Any:
        return SimpleNamespace(
            disturbance=lambda: self.crowded, share=lambda: self.crowded, counted=nullcontext
        )

    def engine(self, form: str, precision: str, setup: CpuSetup) -> "Engine":
        made = Engine(self, form, precision, setup.only(self.possible(form, setup)))
        self.now += self.load_s
        self.loaded.append(made)
        self.most_loaded = max(self.most_loaded, len(self.loaded))
        return made

    def servable(self, forms: Sequence[tuple[str, str]] = FORMS) -> list[ServableForm]:
        def of(form: str, precision: str) -> ServableForm:
            return ServableForm(
                form,
                precision,
                f"sha of {form} {precision}",
                1000,
                lambda setup: self.engine(form, precision, setup),
            )

        return [of(*kind) for kind in forms]

    def prepared(self, way: Way, forms: Sequence[tuple[str, str]] = FORMS, rows: int = 0) -> PreparedVersion:
        engine = self.engine(way.form, way.precision, way.setup)
        return PreparedVersion(
            "1",
            "sha",
            way.precision,
            engine,
            "made up",
            useful_rows=rows,
            setup=engine.setup,
            forms=self.servable(forms),
        )


@dataclass(eq=False)
class Engine(engine.Engine):
    world: World
    form: str
    precision: str
    setup: CpuSetup
    device: str = "cpu"
    in_flight: int = 1
    closed: bool = False

    def __post_init__(self) -> None:
        self.possible = self.world.possible(self.form, self.setup)

    @property
    def way(self) -> Way:
        return Way(self.form, self.precision, self.setup)

    def run(self, parts: Any) -> list[np.ndarray]:
        assert not self.closed, "run after close"
        rows = sum(len(part) for part in parts[0])
        seconds = self.world.processor.seconds(self.way, rows) * self.world.noise()
        self.world.now += seconds
        self.world.runs.append((self.way, rows, seconds))
        return [np.zeros(rows, np.float32)]

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.world.loaded.remove(self)
