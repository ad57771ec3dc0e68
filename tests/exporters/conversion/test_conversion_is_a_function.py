"""The same folder gives the same plan and the same verdict, whatever the clock, the load and the threads do."""

import io
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import PLANNING_BYTES, Samples, few
from halfeven.exporters.proof import prove
from halfeven.exporters.proof.prove import (
    SMALL_BATCHES,
    SMALL_OPERATIONS,
    TRUE_KERNELS_OPERATIONS,
    ReferenceRun,
    ask_reference,
    take,
)
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.proof.threads import FEW, LARGE_ROW, MANY, fixed_threads
from halfeven.exporters.question import Answers, Arrays
from halfeven.exporters.report.page import render_terminal
from halfeven.exporters.report.version_facts import facts_of
from halfeven.exporters.search.delta_debugging import Budget
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.errors import OutOfTime
from halfeven.models.folder.package import Precision
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import Store, Version
from rich.console import Console

from tests.benchmarks.same_plans import COMPARED, converted
from tests.corpus import captured, fresh

CLOCKS = ("time", "monotonic", "perf_counter", "thread_time", "process_time")
MODELS = [("program", "rms norm of large"), ("file", "log energy"), ("file-O3", "fused attention, bool mask")]


def set_clocks(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    for name in CLOCKS:
        monkeypatch.setattr(time, name, seconds)
        monkeypatch.setattr(time, f"{name}_ns", lambda: int(seconds() * 1e9))


def bytes_of(version: Version) -> list[bytes]:
    return [version.file(file).read_bytes() for file in COMPARED]


@pytest.mark.slow
@pytest.mark.parametrize(("road", "name"), MODELS)
def test_no_clock_has_a_say_in_a_plan_or_a_verdict(
    road: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = time.time()
    hours = iter(range(1 << 40))
    clocks = {"standing": lambda: still, "racing": lambda: still + 3600.0 * next(hours)}
    found = {}
    for kind, seconds in clocks.items():
        with monkeypatch.context() as patched:
            set_clocks(patched, seconds)
            (tmp_path / kind).mkdir()
            found[kind] = bytes_of(converted(road, name, tmp_path / kind))
    assert next(hours) > 0, "nothing looked at the clock at all, not even for the manifest"
    assert found["racing"] == found["standing"]


@pytest.mark.slow
def test_the_threads_that_the_caller_has_do_not_matter(tmp_path: Path) -> None:
    """The product of 'spectrum' is added up otherwise by two threads."""
    found, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        (tmp_path / str(threads)).mkdir()
        found.append(bytes_of(converted("program", "spectrum", tmp_path / str(threads))))
        assert torch.get_num_threads() == threads, "they are given back"
    torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (64, MANY)])
def test_a_large_model_has_more_threads_but_no_more_than_there_are_cores(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfeven.exporters.proof.threads.usable_cores", lambda: cores)
    with fixed_threads(LARGE_ROW - 1):
        assert torch.get_num_threads() == FEW
    with fixed_threads(LARGE_ROW):
        assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_a_time_limit_ends_a_conversion_and_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion gives no version with the other form alone: on a calm machine the version would have had both."""

    def write_onnx(*_: object) -> None:
        raise OutOfTime("the check did not end within 600 s")

    monkeypatch.setattr("halfeven.exporters.torch.forms.write_onnx", write_onnx)
    with pytest.raises(OutOfTime, match="600 s"):
        converted("program", "zoo mlp", tmp_path)
    assert Store(tmp_path / "store").names() == []


# The words about what was not tried, and about what is not half.


def published(tmp_path: Path, *keep: str, level: str = "O1") -> Version:
    original = captured("zoo mlp")
    samples = Samples({key: tensor.numpy() for key, tensor in fresh("zoo mlp", 16, seed=1).items()})
    precision = Precision(level, "fp16", keep)
    subject = Subject(original.program, original.spec, samples, precision, ("torch",), tmp_path, {})
    return travel(subject, ProgramForms(subject), Store(tmp_path / "store"), lambda _: None)


def shown(version: Version) -> tuple[str, str]:
    """The page and the terminal."""
    console = Console(width=200, record=True, quiet=False, file=io.StringIO())
    console.print(render_terminal(facts_of(version)))
    return version.file("report.html").read_text(), console.export_text()


@pytest.mark.slow
def test_an_exhausted_search_says_so_and_blames_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfeven.exporters.plan.planner.BUDGET", Budget(0, 0))
    version = converted("program", "rms norm of large", tmp_path)
    assert {form["search"] for form in facts_of(version)["forms"].values()} == {"exhausted"}
    assert version.json("parity.json")["search"]["outcome"] == "exhausted"
    reason = version.manifest["reason"]
    assert "search for nodes that must stay in FP32 was exhausted" in reason and "policy" not in reason
    kept = Counter(one["op"] for one in facts_of(version)["forms"]["torch"]["kept"])
    assert f"--keep op:{kept.most_common(1)[0][0]} for nodes" in reason and "--samples FILE" in reason
    for text in shown(version):
        assert "exhausted before all was tried" in text and "--samples FILE" in " ".join(text.split())


@pytest.mark.parametrize(
    ("keep", "level", "because"),
    [
        (["*"], "O1", "every node that the policy would run in half is kept in FP32"),
        ([], "O0", "that was asked for (level O0)"),
    ],
)
def test_a_version_without_a_half_node_is_fp32_and_not_called_proven(
    keep: list[str], level: str, because: str, tmp_path: Path
) -> None:
    version = published(tmp_path, *keep, level=level)
    assert version.status == "live" and version.manifest["half"] is None
    assert because in version.manifest["reason"] and "proven" not in version.manifest["reason"]
    assert level == "O0" or "asked for by keep = '*'" in version.manifest["reason"]
    page, terminal = shown(version)
    assert "<strong>FP32</strong>" in page and "Equal on" not in page
    assert "live, in FP32" in terminal and because in terminal and "passed" not in terminal


@pytest.mark.slow
def test_a_plan_that_passes_as_it_is_needed_no_search(tmp_path: Path) -> None:
    version = published(tmp_path)
    assert version.manifest["forms"]["torch"]["search"] == "not needed"
    assert "<strong>Equal on " in shown(version)[0]
    (tmp_path / "O3").mkdir()
    assert published(tmp_path / "O3", level="O3").manifest["forms"]["torch"]["search"] == "not asked"


# Budgets are counts.


def reference_run_of(row_operations: int) -> ReferenceRun:
    tensors = [TensorSpec(name, "FP32", (Dim.parse(-1), Dim.parse(4))) for name in ("x", "y")]
    spec = ModelSpec("m", (tensors[0],), (tensors[1],), 8)
    samples = Samples({"x": np.ones((16, 4), np.float32)})
    return ask_reference(spec, samples, lambda inputs: {"y": inputs["x"]}, row_operations=row_operations)


def test_how_many_batches_judge_follows_from_the_operations_of_a_row() -> None:
    assert not reference_run_of(0).is_slow and len(reference_run_of(0).small) == 3 * SMALL_BATCHES
    limit = SMALL_OPERATIONS // ((1 + 2 + 3) * SMALL_BATCHES)
    assert not reference_run_of(limit).is_slow and len(reference_run_of(limit).small) == 3 * SMALL_BATCHES
    assert reference_run_of(limit + 1).is_slow and len(reference_run_of(limit + 1).small) == 3


def test_large_answers_are_asked_for_as_seldom_as_those_of_a_slow_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prove, "SMALL_BYTES", 32 * (1 + 2 + 3) * SMALL_BATCHES)  # a row has 32 bytes
    assert len(reference_run_of(0).small) == 3 * SMALL_BATCHES
    monkeypatch.setattr(prove, "SMALL_BYTES", prove.SMALL_BYTES - 1)
    assert len(reference_run_of(0).small) == 3
    planning = Samples({"x": np.ones((32, 4), np.float32)})
    assert [
        few(planning, of_a_row=size).count
        for size in (0, PLANNING_BYTES // 16, PLANNING_BYTES // 4, PLANNING_BYTES)
    ] == [
        16,
        16,
        4,
        2,
    ]


@pytest.mark.parametrize(("row_operations", "stands_in"), [(0, False), (TRUE_KERNELS_OPERATIONS, True)])
def test_whether_true_kernels_judge_the_bulk_follows_from_the_operations_of_a_row(
    row_operations: int, stands_in: bool
) -> None:
    asked = {"half": 0, "stand-in": 0}

    def counting(name: str) -> Answers:
        def answer(inputs: Arrays) -> dict[str, np.ndarray]:
            asked[name] += 1
            return {"y": inputs["x"]}

        return answer

    reference_run = reference_run_of(row_operations)
    take(reference_run, counting("half"), counting("stand-in"))
    bulk = (*reference_run.bulk, *reference_run.adversarial, *reference_run.perturbed)
    assert asked["half"] == len(reference_run.small) + (0 if stands_in else len(bulk))
    assert bool(asked["stand-in"]) == stands_in
