"""The memory that the process keeps for its next batch, and the memory that it gives back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from safetensors.torch import save_file

from tests.kept import kept_store
from tests.model_folders import write_folder
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow


def printed(script: str, *words: str) -> Any:
    """The JSON that the script prints, in a process of its own."""
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return json.loads(done.stdout)


BATCHES = """
import ctypes, resource
from halfeven.serve.versions.loading.release import give_back_freed, one_heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def batch():
    blocks = [libc.malloc(6 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 6 << 20)
    for block in blocks:
        libc.free(block)

def faults():
    batch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        batch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

as_it_is = faults()
one_heap()
in_one_heap, kept = faults(), resident()
give_back_freed()
print([as_it_is, in_one_heap, kept - resident()])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_a_batch_frees_waits_for_the_next_and_goes_when_it_is_given_back() -> None:
    as_it_is, in_one_heap, returned = printed(BATCHES)
    assert in_one_heap * 20 < as_it_is, "fresh pages for every batch"
    assert returned > 40 << 20


FILES = """
import json, sys
from pathlib import Path
import torch
import halfeven.serve.server
from halfeven.models.engines.load import load_original
from halfeven.models.store.store import Store
from halfeven.serve.versions.loading.release import let_go_of_files
from safetensors.torch import load_file

def mapped(name):
    found = 0
    for line in open("/proc/self/smaps"):
        words = line.split()
        if not words[0].endswith(":"):
            ours = name in line
        elif ours and words[0] == "Rss:":
            found += int(words[1])
    return found

root, *paths = sys.argv[1:]
states = {path: load_file(path) for path in paths}
states[paths[1]]["a"][0] = 7.0
totals = {path: state["a"].double().sum().item() for path, state in states.items()}
rows, weight = torch.randn(64, 256), torch.randn(256, 256)
answer = rows @ weight
before = [mapped(name) for name in ("libtorch_cpu", *paths)]
let_go_of_files()
after = [mapped(name) for name in ("libtorch_cpu", *paths)]
same = torch.equal(rows @ weight, answer)
again = mapped("libtorch_cpu")
sums = [state["a"].double().sum().item() == totals[path] for path, state in states.items()]
load_original(Store(Path(root)).live("net"), "torch", torch.device("cpu"))
modules = sorted({"sympy", "onnx", "onnxruntime", "jinja2"} & set(sys.modules))
print(json.dumps([before, after, [same, *sums], again, modules]))
"""


def _convert(root: Path) -> None:
    convert(
        write_folder(root / "net", max_batch_size=8), Store(root / "store"), Options(forms=("torch",)), print
    )


@pytest.mark.skipif(sys.platform != "linux", reason="proc(5)'s")
def test_a_server_lets_go_of_what_it_read_of_files_and_loads_nothing_that_only_other_forms_need(
    tmp_path: Path,
) -> None:
    """Weights that were written to stay; libtorch and weights that were only read can be read again."""
    paths = [str(tmp_path / f"{how}.safetensors") for how in ("read", "written")]
    for path in paths:
        save_file({"a": torch.randn(1 << 20)}, path)
    store = kept_store(__file__, _convert) / "store"
    before, after, same, again, modules = printed(FILES, str(store), *paths)
    assert after[0] * 2 < before[0] and after[0] < again < before[0], "what libtorch needed to be imported"
    assert min(before[1:]) >= 4096 and after[1] == 0 < after[2]
    assert same == [True] * 3
    assert modules == []
