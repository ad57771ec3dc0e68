"""The metadata that perf_analyzer and people read about a model."""

from dataclasses import replace

from halfeven.models.spec.spec import Batching, Dim, ModelSpec, TensorSpec
from halfeven.serve.batching.counters import Counters
from halfeven.serve.http.codecs.metadata import model_config, model_metadata, model_statistics

BATCH, FREE = Dim(), Dim(2, 512, "length")
SPEC = ModelSpec(
    "m",
    (TensorSpec("ids", "INT64", (BATCH, FREE)),),
    (TensorSpec("y", "FP16", (BATCH, Dim(10, 10))),),
    16,
    batching=Batching(250, 99),
)


def test_metadata_shapes_have_the_batch_and_minus_one_where_a_size_is_free() -> None:
    metadata = model_metadata(SPEC, ["3"], "onnx", {"halfeven_precision": "fp16"})
    assert metadata["inputs"] == [{"name": "ids", "datatype": "INT64", "shape": [-1, -1]}]
    assert metadata["outputs"] == [{"name": "y", "datatype": "FP16", "shape": [-1, 10]}]
    assert metadata["platform"] == "halfeven_onnx" and metadata["versions"] == ["3"]


def test_config_dims_leave_the_batch_out_only_where_there_is_one() -> None:
    config = model_config(SPEC, "torch", "cuda:1")
    assert config["input"] == [{"name": "ids", "data_type": "TYPE_INT64", "dims": ["-1"]}]
    assert config["max_batch_size"] == 16
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 250
    assert config["instance_group"][0]["kind"] == "KIND_GPU" and config["instance_group"][0]["gpus"] == [1]
    whole = model_config(SPEC.with_max_batch_size(0), "onnx", "cpu")
    assert whole["output"][0]["dims"] == ["-1", "10"] and "dynamic_batching" not in whole
    assert whole["instance_group"][0]["kind"] == "KIND_CPU"


def test_a_batch_on_another_axis_is_named_and_is_no_batch_to_triton_s_clients() -> None:
    state = TensorSpec("h", "FP32", (BATCH, Dim(2, 2), Dim(8, 8)), batch_axis=1)
    recurrent = ModelSpec("m", (state,), SPEC.outputs, 16)
    (found,) = model_metadata(recurrent, ["3"], "onnx", {})["inputs"]
    assert found == {"name": "h", "datatype": "FP32", "shape": [2, -1, 8], "parameters": {"batch_axis": 1}}
    config = model_config(recurrent, "torch", "cpu")
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (0, ["2", "-1", "8"])
    assert config["output"][0]["dims"] == ["-1", "10"] and "dynamic_batching" not in config


def test_config_tells_the_queue_s_rules_and_the_versions() -> None:
    batching = Batching(buckets=(2, 8), timeout_ms=30)
    config = model_config(replace(SPEC, batching=batching), "torch", "cpu", ["3"])
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["dynamic_batching"]["preferred_batch_size"] == [2, 8]
    policy = config["dynamic_batching"]["default_queue_policy"]
    assert policy["default_timeout_microseconds"] == "30000" and policy["max_queue_size"] == 1024
    plain = model_config(SPEC, "torch", "cpu", ["2", "3"])
    assert plain["version_policy"] == {"specific": {"versions": ["2", "3"]}}
    assert "preferred_batch_size" not in plain["dynamic_batching"]
    assert "default_timeout_microseconds" not in plain["dynamic_batching"]["default_queue_policy"]


def test_statistics_have_every_phase_and_one_line_per_batch_size_in_order() -> None:
    counters = Counters("3", requests=4, rows=7, executions=3, queue_ns=90, batches={4: (1, 5), 1: (2, 6)})
    entry = model_statistics("m", "3", counters)
    assert (entry["inference_count"], entry["execution_count"], entry["last_inference"]) == (7, 3, 0)
    assert entry["inference_stats"]["queue"] == {"count": 4, "ns": 90}
    assert entry["inference_stats"]["cache_hit"] == {"count": 0, "ns": 0}
    assert [(line["batch_size"], line["compute_infer"]["ns"]) for line in entry["batch_stats"]] == [
        (1, 6),
        (4, 5),
    ]
