"""The doctor finds what a list of providers does not show: missing kernels and libraries. The GPU is a fake."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from halfeven.models.machine.usable_cores import cores_here
from halfeven.serve.cli.doctor import examine

BUILT = ["sm_75", "sm_80", "sm_90a", "compute_90"]
NO_STORE = Path("no-store")
SESSION = onnxruntime.InferenceSession


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A machine with one GPU of that capability; ``session`` is what ONNX Runtime opens on it."""

    def machine(capability: tuple[int, int] = (9, 0), session: Callable[..., Any] = OnCpu) -> dict[str, Any]:
        for name, value in {
            "is_available": True,
            "device_count": 1,
            "get_device_capability": capability,
            "get_device_name": "Made Up 100",
            "get_arch_list": BUILT,
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
        monkeypatch.setattr(onnxruntime, "InferenceSession", session)
        return {check["what"]: check["advice"] for check in examine(NO_STORE)["checks"]}

    return machine


class OnCpu:
    """The session that computes on this machine's CPU under the name of the provider that was asked for."""

    provider = "CUDAExecutionProvider"

    def __init__(self, model: bytes, options: Any, providers: list[str]) -> None:
        assert providers == ["CUDAExecutionProvider"]
        self._session = SESSION(model, options, providers=["CPUExecutionProvider"])

    def get_providers(self) -> list[str]:
        return [self.provider, "CPUExecutionProvider"]

    def run(self, names: None, feed: dict[str, np.ndarray]) -> Any:
        return self._session.run(names, feed)


class FellBack(OnCpu):
    provider = "CPUExecutionProvider"


class Wrong(OnCpu):
    def run(self, names: None, feed: dict[str, np.ndarray]) -> Any:
        return [feed["x"]]


def refuses(*_: Any, **__: Any) -> None:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "has_kernels"),
    [((8, 6), True), ((9, 0), True), ((12, 0), True), ((7, 0), False), ((7, 5), True), ((8, 0), True)],
)
def test_a_device_that_this_torch_was_not_built_for_is_named(
    gpu: Callable[..., dict[str, Any]], capability: tuple[int, int], has_kernels: bool
) -> None:
    assert ("no kernels for it" not in gpu(capability)["cuda:0"]) is has_kernels


@pytest.mark.parametrize(
    ("session", "advice"),
    [(OnCpu, ""), (FellBack, "library"), (refuses, "no kernel image"), (Wrong, "wrong results")],
)
def test_onnx_runtime_is_asked_to_compute_on_the_gpu_and_not_for_its_list(
    gpu: Callable[..., dict[str, Any]], session: Callable[..., Any], advice: str
) -> None:
    found = gpu(session=session)["onnxruntime"]
    assert advice in found and bool(found) is bool(advice)


def test_a_system_without_the_calls_of_linux_has_cores_and_its_limits_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(sys, "platform", "darwin")
    found = {check["what"]: check for check in examine(NO_STORE)["checks"]}
    assert found["cpu"]["found"].startswith(f"{cores_here()}, ")
    assert "only Linux limits the memory of child processes" in found["system"]["advice"]
