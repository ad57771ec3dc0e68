"""The memory that the process keeps for its next batch, and the memory that it gives back."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from safetensors.torch import save_file

from tests.model_folders import write_folder
from tests.patience import PATIENCE_S

BATCHES = """
import ctypes, resource, sys
from halfeven.serve.versions.loading.release import give_back_freed, one_heap

if "one_heap" in sys.argv:
    one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def batch():
    blocks = [libc.malloc(6 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 6 << 20)
    for block in blocks:
        libc.free(block)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    batch()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = resident()
give_back_freed()
print(faults, kept - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_a_batch_frees_waits_for_the_next_and_goes_when_it_is_given_back() -> None:
    found = {}
    for how in ("one_heap", "as it is"):
        done = subprocess.run(
            [sys.executable, "-c", BATCHES, how],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        found[how] = [int(word) for word in done.stdout.split()]
    faults, returned = found["one_heap"]
    assert faults * 20 < found["as it is"][0], "fresh pages for every batch"
    assert returned > 40 << 20


WEIGHTS = """
import sys
import torch
from safetensors.torch import load_file
from halfeven.serve.versions.loading.release import let_go_of_files

def mapped(path):
    found = 0
    for line in open("/proc/self/smaps"):
        words = line.split()
        if not words[0].endswith(":"):
            ours = line.rstrip().endswith(path)
        elif ours and words[0] == "Rss:":
            found += int(words[1])
    return found

states = {path: load_file(path) for path in sys.argv[1:]}
states[sys.argv[2]]["a"][0] = 7.0
totals = {path: state["a"].double().sum().item() for path, state in states.items()}
before = {path: mapped(path) for path in states}
let_go_of_files()
after = {path: mapped(path) for path in states}
for path, state in states.items():
    print(before[path], after[path], state["a"].double().sum().item() == totals[path])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="proc(5)'s")
def test_weights_that_were_read_are_let_go_and_can_be_read_again_and_those_that_were_written_stay(
    tmp_path: Path,
) -> None:
    paths = [str(tmp_path / f"{how}.safetensors") for how in ("read", "written")]
    for path in paths:
        save_file({"a": torch.randn(1 << 20)}, path)
    done = subprocess.run(
        [sys.executable, "-c", WEIGHTS, *paths],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    for line, goes in zip(done.stdout.splitlines(), (True, False), strict=True):
        before, after, same = line.split()
        assert int(before) >= 4096 and same == "True"
        assert (int(after) == 0) is goes


LIBRARIES = """
import torch
import halfeven.serve.server
from halfeven.serve.versions.loading.release import let_go_of_files

def mapped():
    found = 0
    for line in open("/proc/self/smaps"):
        words = line.split()
        if not words[0].endswith(":"):
            ours = "libtorch_cpu" in line
        elif ours and words[0] == "Rss:":
            found += int(words[1])
    return found

rows, weight = torch.randn(64, 256), torch.randn(256, 256)
answer = rows @ weight
before = mapped()
let_go_of_files()
print(before, mapped(), torch.equal(rows @ weight, answer), mapped())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="proc(5)'s")
def test_what_libtorch_needed_to_be_imported_is_let_go_and_it_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIBRARIES], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    before, after, same, again = done.stdout.split()
    assert same == "True"
    assert int(after) * 2 < int(before)
    assert int(after) < int(again) < int(before)


PROGRAMS = """
import sys
from pathlib import Path
import torch
import halfeven.serve.server
from halfeven.models.engines.load import load_original
from halfeven.models.store.store import Store

load_original(Store(Path(sys.argv[1])).live("net"), "torch", torch.device("cpu"))
print(sorted({"sympy", "onnx", "onnxruntime", "jinja2"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_server_of_torch_forms_loads_nothing_that_only_others_need(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    convert(write_folder(tmp_path / "net", max_batch_size=8), store, Options(forms=("torch",)), print)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS, str(store.root)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
