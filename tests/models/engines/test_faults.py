"""The errors that mean too little memory, and those that mean that the device is gone."""

import numpy as np
import pytest
import torch
from halfeven.models.engines.faults import device_answers, device_lost, no_half_kernel, out_of_memory
from halfeven.models.errors import EngineFailed


def raised_from(cause: BaseException) -> EngineFailed:
    try:
        raise EngineFailed("the live model raised") from cause
    except EngineFailed as error:
        return error


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("[ONNXRuntimeError] : 6 : bfc_arena.cc Failed to allocate memory for requested buffer"),
    RuntimeError("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 2: out of memory ; GPU=0"),
    RuntimeError("[ONNXRuntimeError] : 6 : std::bad_alloc"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError(
        "[ONNXRuntimeError] : 1 : FAIL : Available memory of 1048576 is smaller than requested bytes of 4194304"
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOCATION_FAILED"),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
]
LOST = [
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError(
        "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered"
    ),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    torch.AcceleratorError("CUDA error: unknown error"),
    RuntimeError("CUDA error: no CUDA-capable device is detected"),
    torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    RuntimeError("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 709: context is destroyed"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
]
NEITHER = [
    ValueError("poison"),
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    KeyError("device-side assert"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_too_little_memory_is_known_by_type_or_message_and_costs_no_device(error: BaseException) -> None:
    assert out_of_memory(error) and not device_lost(error)
    assert out_of_memory(raised_from(error))


@pytest.mark.parametrize("error", LOST, ids=str)
def test_errors_after_which_a_context_answers_no_more_lose_the_device(error: BaseException) -> None:
    assert device_lost(error) and not out_of_memory(error)
    assert device_lost(raised_from(error))


@pytest.mark.parametrize("error", NEITHER, ids=str)
def test_other_errors_are_neither(error: BaseException) -> None:
    assert not out_of_memory(error) and not device_lost(error)


def test_what_this_machine_really_raises_is_recognised() -> None:
    with pytest.raises(MemoryError) as by_numpy:
        np.empty(2**60, np.uint8)
    assert out_of_memory(by_numpy.value)
    with pytest.raises(RuntimeError) as by_torch:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(by_torch.value)


UNCLASSIFIED = torch.AcceleratorError("CUDA error: a text that no list has")


@pytest.mark.parametrize(("answers", "expected"), [(True, True), (False, False)])
def test_after_a_cuda_error_of_no_known_kind_the_device_is_asked(
    answers: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ones(count: int, device: str) -> torch.Tensor:
        if not answers:
            raise torch.AcceleratorError("CUDA error: the same text again")
        return torch.zeros(count)

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert device_answers(UNCLASSIFIED, "cuda:0") is expected
    assert device_answers(raised_from(UNCLASSIFIED), "cuda:0") is expected


@pytest.mark.parametrize(
    ("error", "device"), [(UNCLASSIFIED, "cpu"), (ValueError("poison"), "cuda:0"), (NO_MEMORY[0], "cuda:0")]
)
def test_other_errors_ask_the_device_nothing(
    error: BaseException, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "ones", lambda *_, **__: pytest.fail("the device was asked"))
    assert device_answers(error, device)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\"sinc_cuda\" not implemented for 'Half'", True),
        (
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision",
            True,
        ),
        ("\"sinc_cuda\" not implemented for 'ComplexFloat'", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_a_missing_half_kernel_is_neither_too_little_memory_nor_a_lost_device(text: str, found: bool) -> None:
    error = RuntimeError(text)
    assert no_half_kernel(error) is no_half_kernel(raised_from(error)) is found
    assert not out_of_memory(error) and not (found and device_lost(error))
