"""The words of a lock about each kind of change; noise of the clock is no change, and a library has one version."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from halfeven.exporters.half_files.lock_file import changes
from halfeven.exporters.on_device import environment

THEN: Mapping[str, Any] = {
    "file": "a" * 64,
    "proof": "b" * 64,
    "weights": {"first": "1", "last": "2"},
    "environment": {"device": "cpu x86_64 AVX2, oneDNN", "torch": "2.13.0", "onnxruntime": "1.31.1"},
    "processor": "Some CPU, AVX2",
    "cores": 16,
    "passed": True,
    "summary": "passed: 1u of 4u",
    "max_error_u": 1.0,
    "bits": {"half": "h", "fp32": "f"},
    "milliseconds": {"half": 2.0, "fp32": 4.0},
}


def found(**now: Any) -> list[tuple[str, bool]]:
    return [(change.kind, change.fails) for change in changes(THEN, {**THEN, **now})]


def test_nothing_changed() -> None:
    assert found() == []


@pytest.mark.parametrize(
    "milliseconds", [{"half": 2.9, "fp32": 4.0}, {"half": 5.0, "fp32": 10.0}, {"half": 1.0, "fp32": 1.1}]
)
def test_times_of_a_busy_machine_are_no_change(milliseconds: dict[str, float]) -> None:
    assert found(milliseconds=milliseconds) == []


def test_of_a_batch_of_microseconds_the_clock_tells_nothing() -> None:
    then = {**THEN, "milliseconds": {"half": 0.01, "fp32": 0.02}}
    assert changes(then, {**then, "milliseconds": {"half": 0.09, "fp32": 0.02}}) == []


def test_a_slower_kernel_of_the_half_is_named_with_its_times() -> None:
    (change,) = changes(THEN, {**THEN, "milliseconds": {"half": 40.0, "fp32": 4.0}})
    assert change.kind == "speed" and change.fails
    assert "10.00 of FP32's time, 0.50 when it was locked" in change.message


@pytest.mark.parametrize("other", [{"processor": "Another CPU, AVX2"}, {"cores": 2}])
def test_both_slower_is_named_on_the_same_processor_with_as_many_cores_alone(other: dict[str, Any]) -> None:
    times = {"half": 20.0, "fp32": 40.0}
    assert found(milliseconds=times) == [("speed", True)]
    assert found(milliseconds=times, **other) == [("processor", False)]


def test_another_number_of_cores_is_named_and_a_half_that_is_slower_beside_fp32_too() -> None:
    changed = changes(THEN, {**THEN, "cores": 2, "milliseconds": {"half": 40.0, "fp32": 4.0}})
    assert [change.kind for change in changed] == ["processor", "speed"]
    assert changed[0].message == "another number of cores: 16 then, 2 now"


def test_other_bits_are_told_with_both_errors_and_hold_while_equal() -> None:
    (change,) = changes(THEN, {**THEN, "bits": {"half": "g", "fp32": "f"}, "max_error_u": 3.0})
    assert change.kind == "bits" and not change.fails
    assert (
        change.message.startswith("the half's answers")
        and "erred by 1u then and errs by 3u now" in change.message
    )


def test_an_upgrade_and_a_verdict_that_does_not_hold_under_it() -> None:
    upgraded = {**THEN["environment"], "onnxruntime": "1.32.0"}
    assert found(environment=upgraded) == [("environment", False)]
    failed = found(environment=upgraded, passed=False, bits={}, milliseconds={})
    assert failed == [("environment", False), ("verdict", True)]


def test_another_processor_is_named_and_no_library() -> None:
    device = {**THEN["environment"], "device": "cpu x86_64 AVX512, oneDNN, bf16"}
    (change,) = changes(THEN, {**THEN, "environment": device, "processor": "Other CPU, AVX512"})
    assert (
        change.kind == "processor"
        and "Some CPU, AVX2" in change.message
        and "Other CPU, AVX512" in change.message
    )


def test_a_changed_weight_is_named_and_its_bits_are_no_other_kernel() -> None:
    now = {
        **THEN,
        "file": "b" * 64,
        "weights": {"first": "1", "last": "3"},
        "bits": {"half": "g", "fp32": "f"},
    }
    (change,) = changes(THEN, now)
    assert (
        change.kind == "file"
        and change.fails
        and "1 of its 2 weights differ, the first is last" in change.message
    )


def test_the_version_of_a_library_is_that_of_what_python_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two packages may hold one module, as onnxruntime and onnxruntime-gpu do."""
    for package, number in (("one", "1.0"), ("other", "2.0")):
        (tmp_path / f"{package}-{number}.dist-info").mkdir()
    (tmp_path / "twice_held").mkdir()
    (tmp_path / "twice_held" / "__init__.py").write_text('"""x"""\n__version__ = "2.0"\nraise ImportError\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert environment._version("twice_held") == "2.0" and environment._version("held_by_none") == "none"
