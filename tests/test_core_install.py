"""The installation for ONNX files alone: no torch and nothing of the server, on the whole road of a file."""

import ast
import json
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.convert import Options
from halfeven.exporters.half_files.half_file import EQUAL, write_half
from halfeven.models.store.manifest import sha256_of
from torch import nn

from tests.exporters.half_files.onnx_net import samples, written
from tests.house_sources import ROOT, Name, sources

REFUSED = {
    "fastapi", "httptools", "multipart", "onnxscript", "prometheus_client", "pydantic", "pydantic_settings",
    "starlette", "torch", "uvicorn", "uvloop",
}  # fmt: skip
ROAD = (
    "serve.cli.main", "serve.cli.half_file_commands", "serve.cli.difference_commands", "serve.cli.convert_ending",
    "serve.python_api.half_files", "serve.python_api.drop_in", "exporters.conversion.convert",
    "exporters.half_files.half_file", "exporters.half_files.lock_file", "exporters.differing.diff",
    "exporters.differing.index_check", "exporters.guessing.onnx_file", "models.engines.onnx_engine",
)  # fmt: skip
CHILD = """
import importlib.abc, json, sys

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

REFUSED, commands, paths = map(json.loads, sys.argv[1:])
REFUSED = set(REFUSED)
sys.meta_path.insert(0, Refusing())
from halfeven.serve.cli.main import main

codes = []
for words in commands:
    sys.argv = ["halfeven", *words]
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code)
import halfeven as he
from halfeven.models.errors import BadSetting
from halfeven.drop_in import convert_float_to_float16
import onnx

net, rows, half, program = paths
digest = he.fp16(net, half, rows).facts["digest"]
said = []
for call in (
    lambda: he.fp16(program, half), lambda: he.convert(net), lambda: he.load("store", "net"), lambda: he.Half,
    lambda: he.serve(half),
):
    try:
        call()
    except BadSetting as error:
        said.append(str(error))
nodes = len(convert_float_to_float16(onnx.load(net)).graph.node)
print(json.dumps([codes, digest, nodes, said, sorted(REFUSED & set(sys.modules))]))
"""


@cache
def at_import(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports that a file does when it is imported itself."""
    body = ast.parse(file.read_text()).body
    nodes = (one for node in body for one in (ast.walk(node) if isinstance(node, ast.Try) else [node]))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def reached(starts: tuple[str, ...]) -> tuple[set[Name], list[str]]:
    """The modules of halfeven that are imported with ``starts``, and the refused packages that they import."""
    modules, seen, found = sources(ROOT), set[Name](), list[str]()
    waiting: list[Name] = [tuple(start.split(".")) for start in starts]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in modules:
            continue
        seen.add(name)
        package = name if modules[name].name == "__init__.py" else name[:-1]
        for node in at_import(modules[name]):
            if isinstance(node, ast.ImportFrom) and node.level:
                target = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
                target = tuple(part for part in target if part)
                waiting += [target, *((*target, one.name) for one in node.names)]
                continue
            texts = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [
                f"{'.'.join(name)} imports {text}" for text in texts if text.partition(".")[0] in REFUSED
            ]
    return seen, found


@pytest.mark.slow
def test_no_file_on_the_road_of_onnx_files_imports_torch_or_the_server() -> None:
    seen, found = reached(ROAD)
    assert found == []
    assert len(seen) > 100 and reached(("exporters.torch.forms",))[1], "imports are followed"


def test_the_small_installation_has_the_bounds_of_the_whole_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    whole = [line.partition(";")[0].strip() for line in project["project"]["dependencies"]]
    small = project["dependency-groups"]["core"]
    assert set(small) < set(whole)
    assert not any(line.startswith(tuple(REFUSED)) for line in small)


@pytest.mark.slow
def test_a_file_is_converted_and_compared_without_torch_and_the_half_is_the_same(tmp_path: Path) -> None:
    """A command that needs torch says so in one sentence, too."""
    rows, net = samples(tmp_path / "x.npz"), written(tmp_path / "net.onnx")
    half, again, lock = tmp_path / "net.fp16.onnx", tmp_path / "again.onnx", tmp_path / "halfeven.lock"
    program = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 4).eval(), (torch.ones(1, 4),)), program)
    np.save(tmp_path / "index.npy", np.random.default_rng().standard_normal((64, 4)).astype(np.float32))
    words = [
        ["fp16", net, "-o", half, "--samples", rows],
        ["verify", half],
        ["diff", net, half, "--samples", rows],
        ["lock", half, "-o", lock],
        ["check", "--lock", lock],
        ["convert", net, "--samples", rows, "--store", tmp_path / "store"],
        ["demo"],
    ]
    commands = [[str(word) for word in one] for one in words]
    asked = map(json.dumps, (sorted(REFUSED), commands, [str(net), str(rows), str(again), str(program)]))
    done = subprocess.run([sys.executable, "-c", CHILD, *asked], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    codes, digest, nodes, said, loaded = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0] * (len(words) - 1) + [2], done.stderr
    assert (
        "this needs the package 'torch', which is not installed" in done.stderr
        and "pip install" in done.stderr
    )
    assert len(said) == 5 and all("this needs the package" in one and "pip install" in one for one in said), (
        said
    )
    here = tmp_path / "here.onnx"
    assert write_half(net, here, Options(samples=rows))["verdict"] == EQUAL
    assert sha256_of(half) == sha256_of(here) == digest and nodes and loaded == []
