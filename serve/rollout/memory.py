"""Memory, after something large came or went: the collector's sight, and what others keep for themselves."""

import ctypes
import gc
import linecache
import sys

from torch.fx import graph_module

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt's words, <malloc.h>
_FROM_THE_HEAP = 32 << 20  # bytes; the most that glibc takes for the second (HEAP_MAX_SIZE / 2)
_KEPT = 128 << 20  # bytes at the heap's end that wait for the next batch
_SOURCE = "<eval_with_key>"  # what torch.fx calls the source of a program


def one_heap() -> None:
    """Let all threads allocate from one heap: with one each, what a thread frees is of no use to the others.

    And let it keep what a batch has freed for the next one: activations of a few megabytes, mapped afresh each time,
    cost a page fault per 4 KB. Measured with a residual net at batches of 32: 4,000 faults and a quarter of the time.
    Call it before any thread is started.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _FROM_THE_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def take_out_of_sight() -> None:
    """Take what is loaded out of the collector's sight: walking torch's heap costs 80 ms of somebody's p99."""
    gc.unfreeze()  # what was closed meanwhile is a cycle, and frozen it would never be found
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """After engines were closed: collect their cycles, and hand free pages to the system (glibc keeps them)."""
    _forget_sources()
    take_out_of_sight()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _forget_sources() -> None:
    """torch.fx keeps the source of every program it ever made, for tracebacks; those lose a line of text by this."""
    kept = getattr(getattr(graph_module, "_loader", None), "eval_cache", None)
    if isinstance(kept, dict):
        kept.clear()
    for name in [name for name in list(linecache.cache) if name.startswith(_SOURCE)]:
        linecache.cache.pop(name, None)
