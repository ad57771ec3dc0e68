"""The converters' benchmark judges everybody alike: what it calls good is good, and nothing broken ends it."""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from tests.benchmarks import converter_peers
from tests.benchmarks.converter_judge import (
    GOOD,
    IO,
    LOAD,
    SILENT,
    WRONG,
    Judgement,
    Questions,
    answers_of,
    judged,
    session_of,
)
from tests.benchmarks.converters import HANGS_AFTER, MISSING, Row, Worker, converted, pairs, summary
from tests.exporters.onnx.onnx_files import parsed, spec_of

ORIGINAL = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) y = Relu(h) }"
HALF = """g (float[n,8] x) => (float[n,8] y) {
    a = Cast<to=10>(x) b = MatMul(a, w) c = Relu(b) y = Cast<to=1>(c)
}"""
NORM = "g (float[n,8] x) => (float[n,8] y) { s = Mul(x, x) y = Sqrt(s) }"
HALF_NORM = """g (float[n,8] x) => (float[n,8] y) {
    a = Cast<to=10>(x) s = Mul(a, a) r = Sqrt(s) y = Cast<to=1>(r)
}"""


def weights(dtype: type = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(seed).standard_normal((8, 8)).astype(dtype)}


def verdict(folder: Path, original: ModelProto, half: ModelProto, *gains: float) -> Judgement:
    """The judge's verdict on ``half``, on a draw of normal inputs for each of ``gains``, so many times as large."""
    path, candidate = folder / "original.onnx", folder / "half.onnx"
    onnx.save(original, path)
    onnx.save(half, candidate)
    inputs = np.random.default_rng(1).standard_normal((8, 8))
    draws = [[(tuple(range(8)), {"x": (gain * inputs).astype(np.float32)})] for gain in gains or (1.0,)]
    questions = Questions(spec_of(original), draws, answers_of(session_of(path)))
    return judged(questions, path, candidate)


def test_a_faithful_half_is_good_and_what_it_computes_is_counted(tmp_path: Path) -> None:
    found = verdict(tmp_path, parsed(ORIGINAL, weights()), parsed(HALF, weights(np.float16)))
    assert found.verdict == GOOD, found
    assert (found.size.floats, found.size.fp32, found.size.casts) == (2, 0, 2)


def test_the_original_itself_is_good_but_all_of_it_is_fp32(tmp_path: Path) -> None:
    original = parsed(ORIGINAL, weights())
    found = verdict(tmp_path, original, original)
    assert found.verdict == GOOD and found.error_u == 0
    assert (found.size.floats, found.size.fp32, found.size.casts) == (2, 2, 0)


def test_what_is_computed_of_constants_alone_is_not_counted(tmp_path: Path) -> None:
    text = HALF.replace("{", "{ v = Cast<to=10>(u)").replace("w)", "v)")
    found = verdict(tmp_path, parsed(ORIGINAL, weights()), parsed(text, {"u": weights()["w"]}))
    assert found.verdict == GOOD, found
    assert (found.size.floats, found.size.fp32, found.size.casts) == (2, 0, 2)


def test_an_overflow_that_the_runtime_hides_is_silently_wrong(tmp_path: Path) -> None:
    found = verdict(tmp_path, parsed(NORM), parsed(HALF_NORM), 1000.0)
    assert found.verdict == SILENT, found
    assert found.runtime.startswith("passed") and found.oracle.startswith("refused")


def test_a_file_that_one_draw_of_several_refuses_is_not_good(tmp_path: Path) -> None:
    original, half = parsed(NORM), parsed(HALF_NORM)
    assert verdict(tmp_path, original, half, 1.0, 2.0, 3.0).verdict == GOOD
    assert verdict(tmp_path, original, half, 1.0, 1000.0, 3.0).verdict == SILENT


def test_other_weights_are_wrong_everywhere(tmp_path: Path) -> None:
    found = verdict(tmp_path, parsed(ORIGINAL, weights()), parsed(HALF, weights(np.float16, seed=2)))
    assert found.verdict == WRONG, found


def test_an_output_that_became_half_is_a_broken_promise(tmp_path: Path) -> None:
    text = HALF.replace("(float[n,8] y)", "(float16[n,8] y)").replace("<to=1>", "<to=10>")
    found = verdict(tmp_path, parsed(ORIGINAL, weights()), parsed(text, weights(np.float16)))
    assert found.verdict == IO and "outputs" in found.reason


@pytest.mark.parametrize("text", [HALF.replace("<to=1>", "<to=10>"), ORIGINAL])
def test_a_file_whose_types_do_not_agree_is_not_loaded(tmp_path: Path, text: str) -> None:
    found = verdict(tmp_path, parsed(ORIGINAL, weights()), parsed(text, weights(np.float16)))
    assert found.verdict == LOAD and found.checker


def test_an_unsorted_file_is_judged_by_its_answers_and_the_checker_is_noted(tmp_path: Path) -> None:
    half = parsed(HALF, weights(np.float16))
    nodes = list(half.graph.node)
    del half.graph.node[:]
    half.graph.node.extend(reversed(nodes))
    found = verdict(tmp_path, parsed(ORIGINAL, weights()), half)
    assert found.verdict == GOOD and "sorted" in found.checker


# Workers.

ANSWERS = """
import json, os, signal, sys, time
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    wish = json.loads(line)["wish"]
    if wish == "die": os._exit(9)
    if wish == "spend": os.kill(os.getpid(), signal.SIGXCPU)
    if wish == "hang": time.sleep(3600)
    print(json.dumps({"seconds": 1.0, "wish": wish}), flush=True)
"""


def worker(limit: float = 300.0) -> Worker:
    return Worker((sys.executable, "-c", ANSWERS), limit)


def test_a_worker_that_dies_costs_one_model_and_answers_the_next() -> None:
    one = worker()
    assert one.ask({"wish": "die"}) == {"error": "died with status 9"}
    assert one.ask({"wish": "answer"})["wish"] == "answer"
    one.stop()


def test_a_worker_that_hangs_is_ended() -> None:
    assert worker(limit=0.1).ask({"wish": "hang"}) == {"error": "hung: no answer in 0.1 s"}


def test_a_conversion_is_limited_by_processor_time_alone() -> None:
    """A busy machine changes no verdict."""
    script = """
import resource, runpy, sys
sys.argv = ["-"]
peers = runpy.run_path(%r)
def convert(job): raise ValueError(resource.getrlimit(resource.RLIMIT_CPU)[0])
peers["serve"](lambda: (convert, "1"))
"""
    one = Worker((sys.executable, "-c", script % converter_peers.__file__))
    assert converter_peers.LIMIT_SECONDS <= int(one.ask({})["error"].split()[1]) < HANGS_AFTER
    one.stop()
    assert "processor time" in worker().ask({"wish": "spend"})["error"]


def test_a_converter_that_is_not_installed_is_shown_as_that() -> None:
    missing = Worker((sys.executable, "-c", "import json; print(json.dumps({'missing': 'no such module'}))"))
    rows = list(converted("theirs", missing, worker(), []))
    assert [row["verdict"] for row in rows] == [MISSING]
    assert "not installed" in summary({"theirs": rows})


# Tables.


def row(model: str, verdict: str, **size: int) -> Row:
    return {"model": model, "verdict": verdict, "seconds": 1.0, "size": {"floats": 9, **size}}


def test_only_models_that_both_get_right_are_compared_by_size() -> None:
    theirs = [row("a", GOOD, fp32=4, casts=5), row("b", WRONG, fp32=0, casts=0)]
    ours = [row("a", GOOD, fp32=1, casts=2), row("b", GOOD, fp32=3, casts=3)]
    results: Mapping[str, list[Row]] = {"theirs": theirs, "ours": ours}
    assert pairs(results, ours=["ours"]).splitlines()[-1] == "| theirs | ours | 1 | 4, 1 | 5, 2 |"
    assert "| theirs | 1/2 | 0 | 1 |" in summary(results)
