"""What the process keeps for its next batch, and what it gives back."""

import subprocess
import sys

import pytest

BATCHES = """
import ctypes, resource, sys
from halfeven.serve.rollout.memory import give_back, one_heap

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
give_back()
print(faults, kept - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_a_batch_frees_waits_for_the_next_and_goes_when_it_is_given_back() -> None:
    found = {}
    for how in ("one_heap", "as it is"):
        done = subprocess.run(
            [sys.executable, "-c", BATCHES, how], capture_output=True, text=True, timeout=120, check=True
        )
        found[how] = [int(word) for word in done.stdout.split()]
    faults, returned = found["one_heap"]
    assert faults * 20 < found["as it is"][0], "fresh pages for every batch"
    assert returned > 40 << 20
