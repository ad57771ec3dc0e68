"""The manifests for Kubernetes, and what the models of its packages find wrong in them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conformance.outside_clients import PEERS
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docker/kubernetes"
MODELS = ROOT / "tests/conformance/peers/kubernetes_models.py"


def faults_in(*files: Path) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, str(MODELS), *map(str, files)],
        env={**os.environ, "PYTHONPATH": str(PEERS)}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"]}


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    return spec.get("template", {}).get("spec", spec)["containers"]
