"""docker/kubernetes: the YAML is what Kubernetes and KServe take, and names what the server really has.

The first by the generated models of the `kubernetes` and `kserve` packages, where `make peers` brought them.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from halfeven.serve.cli.serve_command import serve
from halfeven.serve.settings import Settings

from tests.cluster_files import FOLDER, containers, faults_in, variables
from tests.conformance.outside_clients import WITHOUT_PEERS
from tests.exposed_metrics import PORT, exposed

FILES = sorted(FOLDER.glob("*.yaml"))
KINDS = {"PersistentVolumeClaim", "Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler",
         "ServingRuntime", "InferenceService", "Pod"}  # fmt: skip


def documents() -> list[dict[str, Any]]:
    return [document for file in FILES for document in yaml.safe_load_all(file.read_text())]


@pytest.mark.slow
@WITHOUT_PEERS
def test_every_document_is_one_of_its_kind_s_model() -> None:
    found = faults_in(*FILES)
    assert {name.rpartition(" ")[2] for name in found} == KINDS
    assert [fault for faults in found.values() for fault in faults] == []


@pytest.mark.slow
@WITHOUT_PEERS
def test_a_misspelt_field_a_wrong_type_and_a_missing_field_are_found(tmp_path: Path) -> None:
    planted = {
        "deployment.yaml": [
            ("failureThreshold: 60", "failureTreshold: 60"),
            ("maxReplicas: 8", "maxReplicas: eight"),
        ],
        "kserve-service.yaml": [("trafficPercent: 10", "percent: 10")],
        "kserve-runtime.yaml": [("- { name: state, emptyDir: {} }", "- { emptyDir: {} }")],
    }
    for name, changes in planted.items():
        text = (FOLDER / name).read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
    found = faults_in(*sorted(tmp_path.iterdir()))
    said = "\n".join(fault for faults in found.values() for fault in faults)
    assert "V1Probe has no field failureTreshold" in said and "expected int, got 'eight'" in said
    assert "V1beta1CanarySpec has no field percent" in said
    assert "ServingRuntime.spec.volumes[0]" in said and "name" in said.partition("volumes[0]")[2]


def servers() -> Iterator[dict[str, Any]]:
    """The containers that run the server."""
    for document in documents():
        if document["kind"] in ("Deployment", "ServingRuntime"):
            yield from containers(document)


def test_every_variable_and_option_of_a_container_is_one_of_the_server() -> None:
    known = {f"HALFEVEN_{name.upper()}": name for name in Settings.model_fields}
    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    assert len(list(servers())) == 2
    for container in servers():
        given = variables(container)
        assert set(given) <= set(known)
        Settings(**{known[name]: value for name, value in given.items()})  # type: ignore[arg-type]
        words = " ".join(container["args"]).split()
        assert "serve" in words and {word for word in words if word.startswith("--")} <= options


def test_models_are_published_into_the_volume_that_the_servers_copy() -> None:
    by_kind = {document["kind"]: document for document in documents()}
    claim = by_kind["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "pods of several nodes read it"
    pod, serving = by_kind["Pod"]["spec"], by_kind["Deployment"]["spec"]["template"]["spec"]
    for spec in (pod, serving):
        claims = [one["persistentVolumeClaim"] for one in spec["volumes"] if one["name"] == "published"]
        assert [one["claimName"] for one in claims] == [claim["metadata"]["name"]]
    (container,) = pod["containers"]
    assert variables(container)["HALFEVEN_STORE"] in {one["mountPath"] for one in container["volumeMounts"]}
    assert container["image"] == serving["containers"][0]["image"]
    assert pod["securityContext"] == serving["securityContext"]


def test_the_runtime_serves_what_kserve_brought_and_writes_beside_it() -> None:
    """A copy at the start would be made again where the container starts anew, over what was ordered meanwhile."""
    (runtime,) = [one for one in documents() if one["kind"] == "ServingRuntime"]
    (container,) = containers(runtime)
    given = variables(container)
    assert "command" not in container and given["HALFEVEN_STORE"] == "/mnt/models"
    writable = {one["name"] for one in runtime["spec"]["volumes"] if "emptyDir" in one}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounts[given["HALFEVEN_STATE"]] in writable


def test_every_probe_asks_a_route_without_a_key_at_the_port_of_the_server() -> None:
    for container in servers():
        port = int(variables(container).get("HALFEVEN_PORT", PORT))
        names = {one["name"]: one["containerPort"] for one in container["ports"]}
        probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
        paths = {kind: one["path"] for kind, one in probes.items()}
        assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/v2/health/ready"}
        assert {names.get(one["port"], one["port"]) for one in probes.values()} == {port}
        if "grpc" in names:
            assert names["grpc"] == int(variables(container)["HALFEVEN_GRPC_PORT"])


def test_a_pod_has_the_time_to_drain_and_its_readiness_falls_sooner() -> None:
    for document in documents():
        if document["kind"] == "Deployment":
            pod = document["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            given = variables(container)
            drain_s, shutdown_s = (float(given[f"HALFEVEN_{name}_SECONDS"]) for name in ("DRAIN", "SHUTDOWN"))
            assert pod["terminationGracePeriodSeconds"] > drain_s + shutdown_s
            ready = container["readinessProbe"]
            assert ready["periodSeconds"] * ready["failureThreshold"] < drain_s


@pytest.mark.slow
def test_the_autoscaler_reads_a_metric_that_the_server_writes() -> None:
    (scaler,) = [one for one in documents() if one["kind"] == "HorizontalPodAutoscaler"]
    assert {one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"]} <= exposed()


def test_the_runtime_and_its_service_name_each_other_and_the_canary_keeps_kserve_s_rules() -> None:
    """The rules that KServe's webhook has and no schema says: mode Standard, a name, a fixed number of replicas."""
    by_kind = {document["kind"]: document for document in documents()}
    runtime, service = by_kind["ServingRuntime"], by_kind["InferenceService"]
    formats = {one["name"] for one in runtime["spec"]["supportedModelFormats"]}
    assert service["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] == "Standard"
    predictors = [service["spec"]["predictor"], *(one["predictor"] for one in service["spec"]["canary"])]
    for predictor in predictors:
        assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
        assert predictor["model"]["modelFormat"]["name"] in formats
        assert predictor["model"]["protocolVersion"] in runtime["spec"]["protocolVersions"]
    for canary in service["spec"]["canary"]:
        assert canary["predictor"]["name"] and "maxReplicas" not in canary["predictor"]


@pytest.mark.parametrize("kind", ["Deployment", "ServingRuntime"])
def test_no_server_listens_beyond_its_pod_without_keys(kind: str) -> None:
    container = next(
        one for document in documents() if document["kind"] == kind for one in containers(document)
    )
    assert "--expose-without-auth" not in " ".join(container["args"])
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert str(Path(variables(container)["HALFEVEN_KEY_FILE"]).parent) in mounts
