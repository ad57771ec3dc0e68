"""Every route but infer, over a real server, by httpx and by tritonclient."""

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import tritonclient.http as triton
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront
from tritonclient.utils import InferenceServerException

from tests.patience import PATIENCE_S
from tests.serve.conftest import HISTORY, make_roster, running

DIGEST = "0123456789abcdef" * 4
PREDICT = "/v1/models/double:predict"


@pytest.fixture
def client(server: str) -> Any:
    with triton.InferenceServerClient(server) as client:
        yield client


def test_tritonclient_reads_health_and_metadata(client: Any) -> None:
    assert client.is_server_live(query_params={"test": 1}) and client.is_server_ready()
    assert client.is_model_ready("double") and client.is_model_ready("double", "3")
    assert not client.is_model_ready("nobody") and not client.is_model_ready("double", "9")
    assert client.get_server_metadata()["name"] == "triton"
    metadata = client.get_model_metadata("pair", query_params={"test": 1})
    assert metadata["platform"] == "halfeven_torch" and metadata["versions"] == ["3"]
    assert metadata["inputs"][0] == {"name": "ids", "datatype": "INT64", "shape": [-1, -1]}
    assert metadata["properties"]["halfeven_precision"] == "fp16"
    assert metadata["properties"]["halfeven_reason"] == "measured faster"


def test_tritonclient_reads_config_statistics_and_index(client: Any, http: httpx.Client) -> None:
    assert http.post(PREDICT, json={"instances": [[1, 2, 3, 4]] * 5}).status_code == 200
    assert client.get_model_config("double")["max_batch_size"] == 8
    (one,) = client.get_inference_statistics("double")["model_stats"]
    assert (one["name"], one["version"], one["inference_count"]) == ("double", "3", 5)
    assert len(client.get_inference_statistics()["model_stats"]) == 3
    assert {(item["name"], item["state"]) for item in client.get_model_repository_index()} == {
        ("double", "READY"),
        ("scores", "READY"),
        ("pair", "READY"),
    }


def test_every_version_that_is_loaded_is_listed_and_counted(client: Any, roster: Any) -> None:
    double = roster.models["double"]
    older = replace(double, prepared=replace(double.prepared, version="2"), rows=[1, 1])
    double.older.append(older)
    assert client.get_model_metadata("double")["versions"] == ["2", "3"]
    assert client.get_model_config("double")["version_policy"] == {"specific": {"versions": ["2", "3"]}}
    stats = client.get_inference_statistics("double")["model_stats"]
    assert [(one["version"], one["inference_count"]) for one in stats] == [("2", 2), ("3", 0)]
    (one,) = client.get_inference_statistics("double", "3")["model_stats"]
    assert one["version"] == "3"
    assert len(client.get_inference_statistics()["model_stats"]) == 4


def test_a_triton_strict_server_answers_with_triton_s_statuses(roster: Any) -> None:
    roster.reasons.append("model 'x' is being proven")
    app = build_app(roster, lambda: b"", HISTORY, "triton", as_triton=True)
    with running(app) as address, httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S) as http:
        statuses = {
            path: http.get(path).status_code
            for path in (
                "/v2/health/ready",
                "/v2/models/starting/ready",
                "/v2/models/nobody/ready",
                "/v2/models/nobody",
                "/v2/nothing",
                "/v1/models/double/versions/9",
            )
        }
        assert http.post("/v2/repository/index", content=bytes(2**20 + 1)).status_code == 400
        assert http.post("/v2/repository/models/nobody/load").status_code == 400
    assert statuses == {
        "/v2/health/ready": 400,
        "/v2/models/starting/ready": 400,
        "/v2/models/nobody/ready": 400,
        "/v2/models/nobody": 400,
        "/v2/nothing": 404,
        "/v1/models/double/versions/9": 404,
    }


def test_what_is_not_offered_is_refused_with_the_way_out(client: Any, http: httpx.Client) -> None:
    for call, way_out in (
        (client.get_system_shared_memory_status, "binary tensors in the body"),
        (lambda: client.register_cuda_shared_memory("r", b"", 0, 1), "binary tensors in the body"),
        (client.get_trace_settings, "Server-Timing"),
        (client.get_log_settings, "log level"),
    ):
        with pytest.raises(InferenceServerException, match=f"501.*not offered.*{way_out}"):
            call()
    assert http.post("/v2/models/double/generate").status_code == 501
    assert http.post("/v2/repository/mine/index").status_code == 501


def test_the_server_says_why_it_is_not_ready(http: httpx.Client, roster: Any) -> None:
    assert http.get("/v2/health/ready").json() == {"ready": True}
    roster.reasons.append("model 'x' is being proven")
    answer = http.get("/v2/health/ready")
    assert answer.status_code == 503 and answer.json()["reasons"] == ["model 'x' is being proven"]
    assert http.get("/v2/health/live").status_code == http.get("/healthz").status_code == 200
    assert http.get("/v2/models/starting/ready").status_code == 503


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"ready": 1}', "Invalid value for 'ready': expected a boolean"),
        (b"[]", "expected an empty body"),
        (b"{", "not JSON"),
        (b"[" * 250_000, "JSON nesting depth exceeds"),
    ],
)
def test_a_bad_index_request_is_refused(http: httpx.Client, body: bytes, fault: str) -> None:
    answer = http.post("/v2/repository/index", content=body)
    assert answer.status_code == 400 and fault in answer.json()["error"]
    for good in (b"", b"{}", b'{"ready": true}', b' {"ready": false} '):
        assert len(http.post("/v2/repository/index", content=good).json()) == 3


def test_predictions_carry_who_gave_them_and_what_they_took(http: httpx.Client) -> None:
    answer = http.post(PREDICT, json={"instances": [[1, 2, 3, 4], [5, 6, 7, 8]]})
    assert answer.json() == {"predictions": [[2, 4, 6, 8], [10, 12, 14, 16]]}
    assert answer.headers["halfeven-version"] == "3" and answer.headers["halfeven-digest"] == DIGEST
    assert answer.headers["halfeven-precision"] == "fp16"
    assert answer.headers["server-timing"].startswith("queue;dur=")
    assert (
        http.post("/v1/models/double/versions/3:predict", json={"instances": [[1, 2, 3, 4]]}).status_code
        == 200
    )


@pytest.mark.parametrize("coding", ["gzip", "br"])
def test_a_prediction_may_be_compressed_like_a_request_of_v2(http: httpx.Client, coding: str) -> None:
    body = gzip.compress(b'{"instances": [[1, 2, 3, 4]]}')
    answer = http.post(PREDICT, content=body, headers={"content-encoding": coding})
    if coding == "gzip":
        assert answer.json() == {"predictions": [[2, 4, 6, 8]]}
    else:
        assert (answer.status_code, answer.json()["code"]) == (501, "unknown_coding")


@pytest.mark.parametrize(
    ("url", "body", "status", "code", "fault"),
    [
        ("/v1/models/nobody:predict", b"{}", 404, "not_found", "Request for unknown model: 'nobody'"),
        ("/v1/models/double/versions/9:predict", b"{}", 404, "not_found", "unknown model"),
        ("/v1/models/starting:predict", b"{}", 503, "not_ready", "no active version"),
        (PREDICT, b"{", 400, "bad_request", "not JSON"),
        (
            PREDICT,
            b'{"instances": [[1,2,3,"a"]]}',
            400,
            "bad_request",
            "input 'x' of model 'double': instances[0][3]",
        ),
        (
            PREDICT,
            b'{"instances": [[1,2,3]]}',
            400,
            "bad_request",
            "input 'x' of model 'double': expected shape [-1,4]",
        ),
        (PREDICT, bytes(5000), 413, "too_large", "4096 bytes"),
    ],
)
def test_a_bad_prediction_request_is_a_problem_and_the_next_one_is_answered(
    http: httpx.Client, url: str, body: bytes, status: int, code: str, fault: str
) -> None:
    answer = http.post(url, content=body)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert fault in problem["detail"]
    assert http.post(PREDICT, json={"instances": [[1, 2, 3, 4]]}).json() == {"predictions": [[2, 4, 6, 8]]}


def test_an_error_that_is_not_ours_is_hidden_and_the_server_goes_on(http: httpx.Client, roster: Any) -> None:
    def broken(x: Any) -> Any:
        raise RuntimeError("a secret path")

    double = roster.models["double"]
    works, double.compute = double.compute, broken
    answer = http.post(PREDICT, json={"instances": [[1, 2, 3, 4]]})
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    double.compute = works
    assert http.post(PREDICT, json={"instances": [[1, 2, 3, 4]]}).status_code == 200


def test_the_server_answers_with_the_slash_of_the_standard_s_own_document(http: httpx.Client) -> None:
    assert http.get("/v2/").json() == http.get("/v2").json()


def test_unknown_paths_and_methods_are_errors_in_the_words_of_their_path(http: httpx.Client) -> None:
    assert http.get("/v2/nothing").json() == {
        "error": "this server has no such route: GET /docs lists all routes"
    }
    assert http.get("/v2/models/double/").status_code == 404
    assert http.get("/nothing").json()["code"] == "not_found"
    answer = http.delete("/v1/models")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert http.post("/v2/health/live").json() == {
        "error": "Method Not Allowed: this route takes GET and HEAD"
    }


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/models/double/predict", "/v1/models/{m}:predict"),
        ("/v2/models/double/inference", "/v2/models/{m}/infer"),
        ("/v2/health", "/v2/health/live"),
        ("/metric", "/metrics"),
    ],
)
def test_a_path_that_is_no_route_is_refused_with_the_one_that_is_meant(
    http: httpx.Client, path: str, meant: str
) -> None:
    said = f"this server has no such route: did you mean {meant}? GET /docs lists all routes"
    assert said in http.post(path).text


def test_versions_and_their_evidence_come_from_the_store(http: httpx.Client) -> None:
    assert {model["name"] for model in http.get("/v1/models").json()["models"]} == {
        "double",
        "scores",
        "pair",
    }
    assert [v["version"] for v in http.get("/v1/models/double/versions").json()["versions"]] == [3, 2]
    assert http.get("/v1/models/double/versions/2").json()["status"] == "refused"
    assert http.get("/v1/models/double/versions/3/report").text == "<p>report of double 3</p>"
    assert http.get("/v1/models/double/versions/3/plan").json() == {"kept": ["double", "3"]}
    assert http.get("/v1/models/double/versions/3/lineage").json() == {"parent": None}
    assert http.post("/v1/models/double/rollback").json() == {"model": "double", "live": 2}
    for missing in ("/v1/models/nobody/versions", "/v1/models/double/versions/9"):
        assert http.get(missing).json()["code"] == "not_found"


def test_metrics_are_given_as_they_are(http: httpx.Client) -> None:
    answer = http.get("/metrics")
    assert answer.text == "halfeven_up 1\n" and answer.headers["content-type"].startswith("text/plain")


def test_a_long_metrics_page_holds_nobody_up() -> None:
    """The metrics of a thousand models take seconds to write."""
    begun, goes_on = threading.Event(), threading.Event()

    def written() -> bytes:
        begun.set()
        return b"%d" % goes_on.wait(PATIENCE_S)

    roster = make_roster()
    front = InferFront(build_app(roster, written, HISTORY), roster)
    with running(front) as host, ThreadPoolExecutor(1) as scraper:
        scraped = scraper.submit(httpx.get, f"http://{host}/metrics", timeout=PATIENCE_S)
        try:
            assert begun.wait(PATIENCE_S)
            assert httpx.get(f"http://{host}/v2/health/live", timeout=PATIENCE_S).status_code == 200
            assert not scraped.done()
        finally:
            goes_on.set()
        assert scraped.result().text == "1"


def test_every_route_is_in_the_documents_infer_too(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v2/models/{m}/infer", "/v1/models/{m}:predict", "/metrics"} <= paths.keys()


def test_the_openai_client_lists_and_retrieves_models(server: str) -> None:
    with openai.OpenAI(base_url=f"http://{server}/v1", api_key="none") as client:
        listed = client.models.list()
        assert sorted(model.id for model in listed) == ["double", "pair", "scores"]
        assert {(model.object, model.owned_by, type(model.created)) for model in listed} == {
            ("model", "halfeven", int)
        }
