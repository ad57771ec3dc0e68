"""The simulated device does what CUDA and torch's allocator do, so that what it finds would be found on a device."""

import random

import pytest
import torch

from tests.simulated_gpu import SimulatedGpu
from tests.simulated_gpu.operations import DeviceTensor


def simulated(pace: float = 0.0, capacity: int = 1 << 40) -> SimulatedGpu:
    return SimulatedGpu(random.Random(0), pace, capacity)


def on_device(tensor: torch.Tensor) -> DeviceTensor:
    assert isinstance(tensor, DeviceTensor)
    return tensor


def test_results_are_rubbish_until_the_stream_has_computed_them() -> None:
    with simulated() as gpu:
        x = torch.ones(3, device=gpu.device) * 2
        assert on_device(x).content.isnan().all()
        assert x.cpu().tolist() == [2.0, 2.0, 2.0], "a copy without non_blocking waits"
        assert gpu.operations.waits == ["aten._to_copy.default"]


def test_freed_memory_is_used_again_by_its_stream_alone_and_another_streams_work_meets_rubbish() -> None:
    with simulated() as gpu:
        x, other = torch.ones(200, device=gpu.device), torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            late = x + 1
        memory = on_device(x).block.memory
        del x
        again = torch.full((200,), 5.0, device=gpu.device)
        assert on_device(again).block.memory is memory
        with torch.cuda.stream(other):
            assert on_device(torch.ones(200, device=gpu.device)).block.memory is not memory
        again.cpu()
        with torch.cuda.stream(other):
            assert late.cpu().tolist() != [2.0] * 200


def test_a_view_keeps_its_memory_in_use() -> None:
    with simulated() as gpu:
        x = torch.arange(6.0, device=gpu.device)
        view = x.view(2, 3).t()[1:]
        del x
        torch.zeros(6, device=gpu.device)
        assert view.cpu().tolist() == [[1.0, 4.0], [2.0, 5.0]]


def test_an_event_orders_streams_and_one_that_was_never_recorded_orders_nothing() -> None:
    with simulated() as gpu:
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        event.synchronize()
        x = torch.ones(2, device=gpu.device)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            assert x.cpu().isnan().all(), "it did not wait"
        event.record()
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            assert x.cpu().tolist() == [1.0, 1.0]


def test_only_page_locked_memory_is_copied_without_a_wait_and_is_read_when_the_device_gets_there() -> None:
    with simulated() as gpu:
        there = torch.empty(2, device=gpu.device)
        pinned, pageable = torch.empty(2, pin_memory=True), torch.zeros(2)
        there.copy_(pageable, non_blocking=True)
        assert gpu.operations.waits == ["copy_ of pageable memory"]
        pinned.fill_(1)
        there.copy_(pinned, non_blocking=True)
        assert len(gpu.operations.waits) == 1
        pinned.fill_(2)
        assert there.cpu().tolist() == [2.0, 2.0]


def test_what_the_host_has_to_know_is_waited_for() -> None:
    with simulated() as gpu:
        x = torch.arange(4.0, device=gpu.device)
        assert x.sum().item() == 6.0 and x.nonzero().shape == (3, 1) and x[x > 1].cpu().tolist() == [2.0, 3.0]
        asked = [name.split(".")[1] for name in gpu.operations.waits]
        assert asked == ["_local_scalar_dense", "nonzero", "index", "_to_copy"]


def test_memory_ends_after_what_is_cached_has_been_given_back() -> None:
    with simulated(capacity=4096) as gpu:
        x = torch.empty(2048, dtype=torch.uint8, device=gpu.device)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(2048, dtype=torch.uint8, device=gpu.device)  # cached for that stream
            assert torch.cuda.memory_reserved() == 4096 and torch.cuda.memory_allocated() == 2048
        y = torch.empty(2048, dtype=torch.uint8, device=gpu.device)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(1, device=gpu.device)
        del x, y
        assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 4096


def test_an_error_on_the_device_is_sticky_and_comes_with_a_later_call() -> None:
    with simulated() as gpu:
        x = torch.ones(2, device=gpu.device)
        gpu.fail(0)
        y = x + 1
        for _ in range(2):
            with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
                y.cpu()
        with pytest.raises(torch.AcceleratorError):
            torch.cuda.synchronize()


def test_tensors_of_the_host_and_the_device_do_not_mix() -> None:
    with simulated() as gpu, pytest.raises(AssertionError, match="mixes a tensor of the host"):
        torch.ones(2, device=gpu.device).add(torch.ones(2))


def test_torch_makes_32_streams_and_then_hands_out_the_same_ones_again() -> None:
    with simulated():
        numbers = [torch.cuda.Stream().cuda_stream for _ in range(64)]
        assert len(set(numbers)) == 32 and numbers[:32] == numbers[32:]


def captured(x: torch.Tensor, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        y = x @ x
        graph.capture_end()
    return graph, y


def test_the_workspace_of_products_is_of_the_graph_that_was_captured_first_and_any_reset_lets_it_go() -> None:
    with simulated() as gpu:
        x, stream = torch.ones(2, 2, device=gpu.device), torch.cuda.Stream()
        first, _ = captured(x, stream)
        second, y = captured(x, stream)
        second.replay()
        assert y.cpu().tolist() == [[2.0, 2.0]] * 2
        first.reset()
        torch.cuda.empty_cache()
        second.replay()
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            y.cpu()


def test_a_capture_that_the_host_waited_in_leaves_the_allocator_in_its_middle_and_an_error_behind() -> None:
    with simulated() as gpu:
        x, graph, pool = (
            torch.ones(2, device=gpu.device),
            torch.cuda.CUDAGraph(),
            torch.cuda.graph_pool_handle(),
        )
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            with pytest.raises(torch.AcceleratorError, match="stream is capturing"):
                (x + 1).sum().item()
            with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
                graph.capture_end()
        with pytest.raises(RuntimeError, match="captures_underway"):
            torch.cuda.empty_cache()
        with pytest.raises(torch.AcceleratorError, match="stream is capturing"):
            torch.ones(1, device=gpu.device)
        assert x.cpu().tolist() == [1.0, 1.0]
