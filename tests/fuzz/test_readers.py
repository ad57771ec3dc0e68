"""Every reader of bytes takes nearly valid inputs, or refuses them with words: no other error, no hang, no growth.

A part of the inputs in every run, others each day. ``HALFEVEN_FUZZ=1000000`` reads about so many in all (minutes).
"""

import faulthandler
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.converted import converted
from tests.conftest import SEED
from tests.fuzz.http_wire import HttpWire
from tests.fuzz.targets import Target, mutator, targets, try_out
from tests.patience import PATIENCE_S
from tests.slow import FUZZED

pytestmark = pytest.mark.slow  # thousands of inputs of each of thirty readers

HUNG_AFTER_S = PATIENCE_S
MOST_BYTES = 512 << 20  # that the process may grow by, while it reads inputs of a few kilobytes
NAMES = [
    "HTTP", "V2 JSON", "V2 binary", "predict", "gRPC", "repository", "content coding", "picture", "model.toml",
    "config.pbtxt", ".mar", "ONNX",
    "samples", "training rows", "CSV", "JSON lines", "Parquet", "tar", "program", "program JSON", "program for torch",
    "shape expression", "keys", "manifest", "spec.json", "parity.json",
    "live", "promotions.json", "rollout.json", "drifted-1.json", "events.jsonl",
    "proofs-1.json", "tuned.json", "cores.json", "ceiling.json", "state.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    logging.disable(logging.CRITICAL)  # some log each damaged file
    wire = HttpWire()
    yield {target.name: target for target in targets(tmp_path_factory.mktemp("fuzz"), converted(), wire)}
    wire.close()
    logging.disable(logging.NOTSET)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_every_reader_is_named_here(readers: dict[str, Target]) -> None:
    assert list(readers) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_takes_its_inputs_or_refuses_them_with_words(name: str, readers: dict[str, Target]) -> None:
    target = readers[name]
    assert all(try_out(target, seed) for seed in target.seeds()), "what it begins from is valid"
    weights = sum(one.weight for one in readers.values())
    number = int(np.random.SeedSequence([SEED, NAMES.index(name)]).generate_state(1)[0])
    draws, taken, count = mutator(target, number), 0, max(20, FUZZED * target.weight // weights)
    before = peak_bytes()
    for place in range(count):
        data = draws.draw()
        faulthandler.dump_traceback_later(HUNG_AFTER_S, exit=True)
        try:
            taken += try_out(target, data)
        except Exception as error:
            pytest.fail(
                f"input {place} of the draw {number}, {data!r:.2000}: {type(error).__name__}: {error}"
            )
        finally:
            faulthandler.cancel_dump_traceback_later()
    print(f"{name}: {count} inputs, {taken} taken")
    assert peak_bytes() - before < MOST_BYTES
