"""The container files make sense: what can be told without an engine. (docs/howto/container.md says what was run.)"""

import fnmatch
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from halfeven.models.store.store import Store
from halfeven.models.telemetry import OFF
from halfeven.serve.server import build
from halfeven.serve.settings import Settings, read_settings
from packaging.requirements import Requirement

from tests.exposed_metrics import PORT, exposed
from tests.serve.conftest import running

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
OTHERS = {"up"}  # Prometheus's own
FUNCTIONS = {"sum", "max", "by", "rate", "increase", "histogram_quantile"}
FUNCTIONS |= {"le", "model", "version", "reason", "kind", "output", "job"}  # labels


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, each with its arguments on one line."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Each stage by its name: what it stands on comes first, its own instructions after."""
    found: dict[str, list[tuple[str, str]]] = {}
    own: list[tuple[str, str]] = []
    for word, rest in instructions():
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            own = found[name] = [*found.get(parent, [("FROM", parent)])]
        else:
            own.append((word, rest))
    return found


def last(stage: str, word: str) -> str:
    return [rest for found, rest in stages()[stage] if found == word][-1]


def compose() -> dict[str, Any]:
    """compose.yaml as it is with an environment that sets nothing: every variable has its default."""
    text = (DOCKER / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def test_telemetry_is_off_for_every_process_in_the_containers() -> None:
    said = {pair for word, rest in stages()["base"] if word == "ENV" for pair in shlex.split(rest)}
    assert {f"{name}={value}" for name, value in OFF.items()} <= said
    grafana = compose()["services"]["grafana"]["environment"]
    switched = {
        name: value for name, value in grafana.items() if "ANONYMOUS" not in name and "PATH" not in name
    }
    assert all(value == ("true" if "DISABLE" in name else "false") for name, value in switched.items())


def in_context(path: Path) -> bool:
    """True if .dockerignore lets the path into the build (the last line that fits decides)."""
    relative = path.relative_to(ROOT)
    names = [relative.as_posix(), *(folder.as_posix() for folder in relative.parents)]
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        anywhere = pattern.startswith("**/") and pattern[3:] in relative.parts
        if (
            line
            and not line.startswith("#")
            and (anywhere or any(fnmatch.fnmatch(n, pattern) for n in names))
        ):
            kept = line.startswith("!")
    return kept


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_server_runs_as_a_numbered_user_who_is_not_root(target: str) -> None:
    assert int(last(target, "USER").partition(":")[0]) >= 1000


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_it_listens_beyond_the_container_only_by_the_explicit_word(target: str) -> None:
    command = [*json.loads(last(target, "ENTRYPOINT")), *json.loads(last(target, "CMD"))]
    assert command == ["halfeven", "serve", "--host", "0.0.0.0", "--expose-without-auth"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_store_is_a_volume_that_the_server_is_told_of(target: str) -> None:
    environment = dict(
        pair.split("=", 1) for word, rest in stages()[target] if word == "ENV" for pair in shlex.split(rest)
    )
    assert last(target, "VOLUME") == environment["HALFEVEN_STORE"] == "/store"
    known = {f"HALFEVEN_{name.upper()}" for name in Settings.model_fields}
    assert {name for name in environment if name.startswith("HALFEVEN_")} <= known


def test_the_health_check_is_python_that_compiles_and_asks_healthz_at_the_default_port() -> None:
    options, _, command = last("cpu", "HEALTHCHECK").partition(" CMD ")
    assert all(option.startswith("--") for option in options.split())
    python, flag, code = json.loads(command)
    assert (python, flag) == ("python", "-c")
    compile(code, "healthcheck", "exec")
    assert "/healthz" in code and f"'{PORT}'" in code
    assert last("cpu", "EXPOSE") == PORT


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_no_installer_and_no_compiler_reaches_the_final_image(target: str) -> None:
    final = stages()[target]
    assert "apt-get" not in json.dumps(final)
    copied = [rest for word, rest in final if word == "COPY"]
    assert copied == [f"--from=installed-{target} /opt/halfeven /opt/halfeven"]
    before = " ".join(rest for word, rest in stages()[f"installed-{target}"] if word == "RUN")
    assert before.endswith("/opt/halfeven/bin/python -m pip uninstall --yes pip")


def test_every_installation_keeps_to_the_constraints() -> None:
    installs = [part for _, rest in instructions() for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 4
    assert all("-c constraints.txt" in part for part in installs)


def test_no_image_floats() -> None:
    defaults = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG" and "=" in rest)
    for stage in stages().values():
        image = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], stage[0][1])
        assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", image), image
    for service in compose()["services"].values():
        tag = service["image"].rpartition(":")[2]
        assert tag and tag != "latest" and (re.match(r"v?\d+\.\d+\.\d+$", tag) or "build" in service)


def test_everything_that_is_copied_exists_and_is_in_the_build_context() -> None:
    copied = [rest.split()[:-1] for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    assert copied
    for name in {name for names in copied for name in names}:
        assert (ROOT / name).exists() and (name == "." or in_context(ROOT / name))


def test_the_build_context_is_what_the_wheel_is_made_of_and_nothing_else() -> None:
    wanted = (
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "py.typed",
        "__init__.py",
        "training.py",
    )
    rooms = [file for room in ("models", "exporters", "serve") for file in (ROOT / room).rglob("*.*")]
    sources = [file for file in rooms if file.is_file() and "__pycache__" not in file.parts]
    assert all(in_context(file) for file in [ROOT / name for name in wanted] + sources)
    for name in (
        ".git/config",
        "tests/test_docker.py",
        "halfeven-store/x",
        ".venv/bin/python",
        ".env",
        "docker/Dockerfile",
    ):
        assert not in_context(ROOT / name), name
    assert not in_context(ROOT / "serve/__pycache__/cli.pyc")


def test_every_published_port_is_published_on_loopback_only() -> None:
    published = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert len(published) >= 3
    assert all(isinstance(port, str) and re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)
    assert all(service.get("network_mode") != "host" for service in compose()["services"].values())


def test_every_build_target_and_every_mounted_file_and_volume_exists() -> None:
    found = compose()
    for service in found["services"].values():
        if "build" in service:
            assert service["build"]["target"] in stages()
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in found["volumes"], mount
        assert {*service.get("secrets", [])} <= {*found["secrets"]}
    assert all((DOCKER / secret["file"]).is_file() for secret in found["secrets"].values())


def test_models_are_mounted_for_a_service_that_publishes_into_the_server_s_store() -> None:
    services = compose()["services"]
    publishing, serving = services["convert"], services["halfeven"]
    assert publishing["image"] == serving["image"] and serving["volumes"][0] in publishing["volumes"]
    (mount,) = [one for one in publishing["volumes"] if one.endswith(":/models:ro")]
    command, folder = publishing["command"]
    source = (DOCKER / mount.partition(":")[0]).resolve()
    assert command == "convert" and (source / Path(folder).relative_to("/models") / "model.toml").is_file()
    assert publishing["profiles"], "it runs where it is asked for, not beside the server"


def test_the_index_of_the_cpu_build_reaches_the_dockerfile() -> None:
    for service in compose()["services"].values():
        if service.get("build", {}).get("target") == "cpu":
            assert service["build"]["args"] == {"TORCH_CPU_INDEX": ""}
    assert "${TORCH_CPU_INDEX:-}" in (DOCKER / "compose.yaml").read_text()
    assert ("ARG", "TORCH_CPU_INDEX=") in stages()["build-cpu"]


@pytest.mark.slow
def test_prometheus_sends_a_key_that_a_server_without_keys_ignores(tmp_path: Path) -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    file = Path(job["authorization"]["credentials_file"])
    assert file.parent == Path("/run/secrets") and file.name in compose()["services"]["prometheus"]["secrets"]
    app, _ = build(read_settings(store=tmp_path, device="cpu"), Store(tmp_path))
    with running(app) as address:
        sent = {"Authorization": "Bearer"}  # of an empty file: Go takes the space off
        assert httpx.get(f"http://{address}/metrics", headers=sent).status_code == 200


def test_prometheus_scrapes_the_server_under_its_name_and_grafana_reads_prometheus() -> None:
    services = compose()["services"]
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.partition(":")[0] in services
    provisioned = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    (source,) = provisioned["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    panels = json.loads((DOCKER / "grafana/dashboards/halfeven.json").read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    mounted = " ".join(services["grafana"]["volumes"])
    boards = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/halfeven.yaml").read_text())
    assert f"./grafana/dashboards:{boards['providers'][0]['options']['path']}:" in mounted


def queries() -> list[str]:
    panels = json.loads((DOCKER / "grafana/dashboards/halfeven.json").read_text())["panels"]
    groups = yaml.safe_load((DOCKER / "rules.yml").read_text())["groups"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    return shown + [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.slow
@pytest.mark.parametrize("query", queries())
def test_every_metric_of_dashboard_and_alerts_is_one_that_the_server_writes(query: str) -> None:
    plain = re.sub(r'"[^"]*"|\[[^]]*\]', "", query)
    names = set(re.findall(r"[A-Za-z_]\w+", plain)) - FUNCTIONS
    assert names and names <= exposed() | OTHERS


def test_the_dashboard_s_selector_chooses_the_models_of_every_panel_that_has_models() -> None:
    board = json.loads((DOCKER / "grafana/dashboards/halfeven.json").read_text())
    assert [one["name"] for one in board["templating"]["list"]] == ["model"]
    assert re.findall(r"\w+", board["templating"]["list"][0]["query"]["query"])[1] in exposed()
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    per_model = [expr for expr in shown if re.search(r"by \([^)]*model|active_version|canary|ceiling", expr)]
    assert len(per_model) >= 12 and all('model=~"$model"' in expr for expr in per_model)


@pytest.mark.parametrize(
    "watched",
    ["halfeven_ready", 'kind="drift"', "rolled_back", "halfeven_rescued_rows", "halfeven_out_of_memory",
     "process_resident_memory_bytes"],
)  # fmt: skip
def test_there_is_an_alert_for(watched: str) -> None:
    groups = yaml.safe_load((DOCKER / "rules.yml").read_text())["groups"]
    assert [rule for group in groups for rule in group["rules"] if watched in rule["expr"]]


def test_the_cpu_target_asks_for_the_plain_onnx_runtime_alone(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    command = next(rest for word, rest in stages()["installed-cpu"] if word == "RUN" and "sed" in rest)
    subprocess.run(command.partition("&&")[0], shell=True, cwd=tmp_path, check=True)
    asked = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [one for one in asked if one.startswith("onnxruntime")] == ["onnxruntime>=1.27,!=1.29.0,<1.33"]


@pytest.mark.parametrize(
    ("system", "machine", "wheel"),
    [
        ("linux", "x86_64", "onnxruntime-gpu"),
        ("linux", "aarch64", "onnxruntime"),
        ("darwin", "arm64", "onnxruntime"),
        ("darwin", "x86_64", "onnxruntime"),
    ],
)
def test_the_wheel_of_onnx_runtime_is_one_that_exists_there(system: str, machine: str, wheel: str) -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    there = {"sys_platform": system, "platform_machine": machine}
    found = [one for one in map(Requirement, asked) if one.name.startswith("onnxruntime")]
    assert [one.name for one in found if one.marker is None or one.marker.evaluate(there)] == [wheel]
