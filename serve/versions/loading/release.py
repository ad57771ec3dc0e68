"""Memory that is given back after a load or an unload: of Python's collector, glibc, file mappings and torch.fx."""

import ctypes
import gc
import linecache
import re
import sys
from pathlib import Path

from torch.fx import graph_module

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt's words, <malloc.h>
_FROM_THE_HEAP = 32 << 20  # bytes; the most that glibc takes for the second (HEAP_MAX_SIZE / 2)
_KEPT = 64 << 20  # bytes at the heap's end that wait for the next batch
_MADV_DONTNEED = 4  # <sys/mman.h>
_WEIGHTS = ".safetensors"
_LIBRARY = re.compile(r"\.so(\.\d+)*$")
_SOURCE = "<eval_with_key>"  # what torch.fx calls the source of a program


def one_heap() -> None:
    """Let all threads allocate from one heap: with a heap each, memory that one thread frees is of no use to the
    others.

    The heap keeps the memory that a batch has freed for the next one: activations of a few megabytes, mapped again each
    time, cost a page fault per 4 KB. Measured with a residual net at batches of 32: 4,000 faults and a quarter of the
    time. Call it before any thread is started.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _FROM_THE_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def give_back_freed() -> None:
    """Give the memory that `one_heap` keeps for the next batch back to the system; called after a while without one."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def take_out_of_sight() -> None:
    """Exclude the loaded objects from garbage collection: to walk torch's heap takes 80 ms, which a request would
    wait."""
    gc.unfreeze()  # a closed engine is a cycle, which would never be collected while frozen
    gc.collect()
    gc.freeze()


def let_go_of_files() -> None:
    """Give the pages of weights files and of libraries back: they come from the system's cache again when they are
    read.

    Weights that were packed into another layout are not read again, and half of libtorch is read at import only. Pages
    that were written to stay.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if sys.platform != "linux" or advise is None:
        return
    for begin, end in _clean_mappings(Path("/proc/self/smaps")):
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)


def _clean_mappings(smaps: Path) -> list[tuple[int, int]]:
    """(begin, end) of the process's mappings of such files that have no page of their own (proc(5))."""
    found: dict[tuple[int, int], bool] = {}
    mapping: tuple[int, int] | None = None
    for line in smaps.read_text().splitlines():
        words = line.split(maxsplit=5)  # begin-end, permissions, offset, device, inode, path
        if not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            mapping = (begin, end) if _comes_back(words[1], words[-1]) else None
        elif mapping is not None and words[0] == "Anonymous:":
            found[mapping] = words[1] == "0"
    return [place for place, clean in found.items() if clean]


def _comes_back(permissions: str, path: str) -> bool:
    """True if the file has the bytes of the mapping: not so for a library's data, which it may write to."""
    return path.endswith(_WEIGHTS) or ("w" not in permissions and _LIBRARY.search(path) is not None)


def give_back() -> None:
    """Collect the cycles of engines that were closed, and hand free pages to the system (glibc keeps them)."""
    _forget_sources()
    take_out_of_sight()
    let_go_of_files()
    give_back_freed()


def give_back_tried() -> None:
    """Collect the cycles of an engine that was closed and was loaded since the last `give_back`: no object of another
    model is visited, now or by the next call."""
    _forget_sources()
    gc.collect()
    gc.freeze()
    give_back_freed()


def _forget_sources() -> None:
    """Drop the sources that torch.fx keeps of every program it ever made; tracebacks then lack that line of text."""
    kept = getattr(getattr(graph_module, "_loader", None), "eval_cache", None)
    if isinstance(kept, dict):
        kept.clear()
    for name in [name for name in list(linecache.cache) if name.startswith(_SOURCE)]:
        linecache.cache.pop(name, None)
