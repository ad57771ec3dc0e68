# pyright: reportMissingImports=false
"""Reads the YAML files of the arguments as the models of the `kubernetes` and `kserve` packages: every fault, as JSON.

Both packages are generated from the OpenAPI documents of their projects: each model has the types of its fields and the
names that they have in a document, and refuses to be made without the required ones.
"""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from bare import bare

bare("kubernetes")
bare("kserve")
bare("kserve.models")
PLACES = ("kserve.models", "kubernetes.client.models")
KINDS = {("serving.kserve.io/v1alpha1", "ServingRuntime"): "V1alpha1ServingRuntime",
         ("serving.kserve.io/v1beta1", "InferenceService"): "V1beta1InferenceService"}  # fmt: skip
PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "datetime": str}


def model(name: str) -> Any:
    file = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    for place in PLACES:
        try:
            return getattr(importlib.import_module(f"{place}.{file}"), name)
        except ModuleNotFoundError as error:
            if error.name != f"{place}.{file}":
                raise
    raise LookupError(name)


def faults(kind: str, value: Any, where: str) -> list[str]:
    if inner := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        if not isinstance(value, list):
            return [f"{where}: expected a list, got {value!r}"]
        return [fault for i, one in enumerate(value) for fault in faults(inner[1], one, f"{where}[{i}]")]
    if inner := re.fullmatch(r"[Dd]ict[(\[]str, (.+)[)\]]", kind):
        if not isinstance(value, dict):
            return [f"{where}: expected a mapping, got {value!r}"]
        return [fault for key, one in value.items() for fault in faults(inner[1], one, f"{where}.{key}")]
    if kind in PLAIN:
        is_right = isinstance(value, PLAIN[kind]) and (kind != "int" or not isinstance(value, bool))
        return [] if is_right else [f"{where}: expected {kind}, got {value!r}"]
    if re.fullmatch(r"Resource\w*Quantity|IntOrString", kind):
        return []
    return faults_of_model(model(kind), value, where)


def faults_of_model(made_of: Any, value: Any, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: expected {made_of.__name__}, got {value!r}"]
    names = {written: attribute for attribute, written in made_of.attribute_map.items()}
    found = [f"{where}: {made_of.__name__} has no field {key}" for key in value if key not in names]
    known = {key: one for key, one in value.items() if key in names}
    for key, one in known.items():
        found += faults(made_of.openapi_types[names[key]], one, f"{where}.{key}")
    try:
        made_of(**{names[key]: one for key, one in known.items()})
    except ValueError as error:
        found.append(f"{where}: {error}")
    return found


def kind_of(document: dict[str, Any]) -> str:
    api, kind = document["apiVersion"], document["kind"]
    return KINDS.get((api, kind)) or api.rpartition("/")[2].capitalize() + kind


read = {
    f"{Path(file).name} {document['kind']}": faults(kind_of(document), document, document["kind"])
    for file in sys.argv[1:]
    for document in yaml.safe_load_all(Path(file).read_text())
}
print(json.dumps(read))
