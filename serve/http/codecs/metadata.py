"""Metadata of the server and its models on ``/v2``: plain values in, JSON objects out.

Source: Open Inference Protocol V2 "Server Metadata", "Model Metadata"; Triton's statistics, model
configuration and model repository extensions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ....models.spec.spec import ModelSpec, TensorSpec
from ...batching.counters import Counters

# Only what is really offered: clients such as perf_analyzer read this list and believe it.
EXTENSIONS = (
    "classification",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


def server_metadata(name: str, version: str) -> dict[str, Any]:
    return {"name": name, "version": version, "extensions": list(EXTENSIONS)}


def model_metadata(
    spec: ModelSpec, versions: Sequence[str], form: str, properties: Mapping[str, str]
) -> dict[str, Any]:
    """``form`` is the engine's (torch, onnx, live); shapes include the batch, -1 where a size is free."""
    return {
        "name": spec.name,
        "versions": list(versions),
        "platform": f"halfeven_{form}",
        "inputs": [_tensor(tensor) for tensor in spec.inputs],
        "outputs": [_tensor(tensor) for tensor in spec.outputs],
        "properties": dict(properties),
    }


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    """The tensor's entry. Its parameters, where it has any: the range of integers that index a table, the axis of which
    they are lengths, a batch axis that is not 0."""
    found: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.wire_shape}
    parameters: dict[str, Any] = {}
    if tensor.range is not None:
        parameters["range"] = str(tensor.range)
    if tensor.lengths_of:
        parameters["lengths_of"] = tensor.lengths_of
    if tensor.batch_axis:
        parameters["batch_axis"] = tensor.batch_axis
    return {**found, "parameters": parameters} if parameters else found


def model_config(spec: ModelSpec, form: str, device: str, versions: Sequence[str] = ()) -> dict[str, Any]:
    """Triton's ModelConfig; ``dims`` leave the batch out where there is one. ``versions`` are those loaded.

    Triton's batch is every tensor's first axis. Where one has it elsewhere the config says ``max_batch_size`` 0, which
    makes ``dims`` the whole shapes, and clients such as perf_analyzer send what the model takes.
    """
    first = spec.batched and not spec.batch_axes
    config: dict[str, Any] = {
        "name": spec.name,
        "platform": f"halfeven_{form}",
        "backend": "halfeven",
        "version_policy": _version_policy(versions),
        "max_batch_size": spec.max_batch_size if first else 0,
        "input": [_config_tensor(tensor, first) for tensor in spec.inputs],
        "output": [_config_tensor(tensor, first) for tensor in spec.outputs],
        "instance_group": [_instance_group(spec, device)],
        "model_transaction_policy": {"decoupled": False},
        "parameters": {},
    }
    if first:
        config["dynamic_batching"] = _dynamic_batching(spec)
    return config


def _version_policy(versions: Sequence[str]) -> dict[str, Any]:
    if len(versions) < 2:
        return {"latest": {"num_versions": 1}}
    return {"specific": {"versions": list(versions)}}


def _dynamic_batching(spec: ModelSpec) -> dict[str, Any]:
    """Batches are filled up to ``preferred_batch_size`` where the model has buckets; priority 1 goes before 2."""
    batching = spec.batching
    queue: dict[str, Any] = {"max_queue_size": batching.max_queue_size}
    if batching.timeout_ms:
        queue["default_timeout_microseconds"] = str(batching.timeout_ms * 1000)
        queue["allow_timeout_override"] = True
    dynamic: dict[str, Any] = {
        "max_queue_delay_microseconds": batching.max_queue_delay_us,
        "priority_levels": 2,
        "default_priority_level": 2,
        "default_queue_policy": queue,
    }
    if isinstance(batching.buckets, tuple) and batching.buckets:
        dynamic["preferred_batch_size"] = list(batching.buckets)
    return dynamic


def _instance_group(spec: ModelSpec, device: str) -> dict[str, Any]:
    """One instance: the thread that owns the device."""
    kind, _, number = device.partition(":")
    gpus, kind = ([int(number or 0)], "KIND_GPU") if kind == "cuda" else ([], "KIND_CPU")
    return {"name": f"{spec.name}_0", "kind": kind, "count": 1, "gpus": gpus}


def _config_tensor(tensor: TensorSpec, without_batch: bool) -> dict[str, Any]:
    dims = tensor.wire_shape[1:] if without_batch else tensor.wire_shape
    return {
        "name": tensor.name,
        "data_type": f"TYPE_{tensor.datatype}",
        "dims": [str(size) for size in dims],  # 64-bit integers are strings in proto3 JSON, as Triton's are
    }


def model_statistics(name: str, version: str, now: Counters) -> dict[str, Any]:
    """One entry of ``model_stats``. Copies out are part of the engine's run, so ``compute_output`` has a count and no
    time: perf_analyzer wants the three counts to be equal."""
    requests = now.requests
    return {
        "name": name,
        "version": version,
        "last_inference": now.last_inference_ms,
        "inference_count": now.rows,
        "execution_count": now.executions,
        "inference_stats": {
            "success": _duration(requests, now.queue_ns + now.compute_ns),
            "fail": _duration(now.failures, now.failures_ns),
            "queue": _duration(requests, now.queue_ns),
            "compute_input": _duration(requests, now.assemble_ns),
            "compute_infer": _duration(requests, now.compute_ns - now.assemble_ns),
            "compute_output": _duration(requests, 0),
            "cache_hit": _duration(0, 0),
            "cache_miss": _duration(0, 0),
        },
        "response_stats": {},
        "batch_stats": [_batch(rows, *pair) for rows, pair in sorted(now.batches.items())],
        "memory_usage": [],
    }


def _batch(rows: int, executions: int, spent_ns: int) -> dict[str, Any]:
    # The engine's one run includes its copies; the count must be the same in all three.
    copies = _duration(executions, 0)
    return {
        "batch_size": rows,
        "compute_input": copies,
        "compute_infer": _duration(executions, spent_ns),
        "compute_output": copies,
    }


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
