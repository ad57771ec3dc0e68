"""Children of the tested code start at once: forked from a process that has imported what they import and no more.

A capture, a trainer or a conversion of a job is a process of its own, and most of its seconds are the import of torch.
With `Popen` in the place of ``subprocess.Popen``, a child of the names in `FORKED` is forked by a process that was
itself started by file path, has imported that, has computed nothing and has one thread. Seen from inside, the child is
a fresh interpreter: arguments, folder, environment, descriptors, session, path, ``__main__``. It is a child of the
process that asked for it. The first child of a kind in a run of the tests, whichever worker asks for it, is a fresh
interpreter, as all are in the product.

A server is forked where its command has ``-PB``, the first one too. A process of its own beside it forks the
children of its jobs. They have the server's modules too: whatever both import is imported before the server is forked.
Beside the first process of a training, another one forks the processes that train with it.

    python … preloaded.py DESCRIPTOR        the process that forks; it reads orders from the socket of this number
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import mmap
import os
import runpy
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORKED = {
    f"halfeven.{name}"
    for name in (
        "models.capture.child", "models.capture.describing", "serve.finetune.training.trainer",
        "serve.finetune.jobs.policy_check", "serve.finetune.jobs.weights_to_version",
        "serve.cli.main",
    )
}  # fmt: skip
SERVER = "halfeven.serve.cli.main"
TRAINER = "halfeven.serve.finetune.training.trainer"  # the first process of a training starts the others
READER = "halfeven.serve.finetune.jobs.row_reader"  # needs no torch: no reason to start a process that forks
READ_AT_THE_START = (
    "PYTHON", "LANG", "LC_", "LD_", "MALLOC_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_",
    "TORCH", "PYTORCH_", "HF_", "TRANSFORMERS_",
)  # of CUDA nothing: it reads its variables when it begins, and a process that forks has not begun it  # fmt: skip
ORDINARY = {  # of `subprocess.Popen`: an order has nothing else
    "executable": None, "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False, "restore_signals": True,
    "gid": None, "gids": None, "uid": None, "umask": -1,
}  # fmt: skip
FEW_UNSEEN = 128  # rows on which a conversion that is forked tries its plan (`few_unseen.py`)
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of Linux
MOST = 2**20  # bytes of an order
_ROOM = " " * 4096  # an argument: the memory in which a child writes its own command line


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """``subprocess.Popen``, forked where it may be."""

    def _execute_child(self, *given: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(start).bind(*given).arguments
        parent = _parent_of(asked)
        if parent is None:
            return start(*given)
        pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = parent.child(asked, [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]
        return None


class _Parent:
    """A process that forks children of one kind, at the other end of ``link``. ``read``: what its environment says to
    interpreters and libraries."""

    def __init__(self, link: socket.socket, read: frozenset[tuple[str, str]]) -> None:
        self._lock, self._link, self.read = threading.Lock(), link, read
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def started(cls, environment: Mapping[str, str]) -> "_Parent":
        """A process that is a fresh interpreter itself."""
        ours, theirs = _pair()
        parent = cls(ours, _read(environment))
        with theirs:
            parent.process = subprocess.Popen(
                [sys.executable, "-PB", str(Path(__file__)), str(theirs.fileno()), _ROOM],
                env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        owner = os.getpid()
        # A process that is forked from this one does not end the parent.
        atexit.register(lambda: parent.end() if os.getpid() == owner else None)
        return parent

    def child(self, asked: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The process identifier of a new child of this process."""
        name = asked["args"][3]
        beside = {SERVER: sorted({*FORKED, READER}), TRAINER: [TRAINER]}.get(name, [])
        order = {
            "arguments": asked["args"],
            "beside": beside,
            "imports": [each for each in (name, *beside) if each.startswith("halfeven.")],
            "folder": os.fspath(asked["cwd"] or Path.cwd()),
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "session": asked["start_new_session"],
            "group": asked["process_group"],
        }
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._link, [json.dumps(order).encode()], descriptors)
                return int(self._link.recv(64))
            finally:
                _adopt_orphans(False)

    def end(self) -> None:
        """Close the socket, as the end of this process does: the other process ends then."""
        self._link.close()
        if self.process is not None:
            self.process.wait()


_parents: dict[tuple[int, str, frozenset[tuple[str, str]]], _Parent | None] = {}
_of_this_server: _Parent | None = None
_starting = threading.Lock()
# A byte for each kind; shared with the workers, which are forked from this process.
_begun = mmap.mmap(-1, 2**16)


def _pair() -> tuple[socket.socket, socket.socket]:
    """The end of the process that asks, and that of the one that forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
    return ours, theirs


def _read(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in environment.items() if item[0].startswith(READ_AT_THE_START))


def _parent_of(asked: Mapping[str, Any]) -> _Parent | None:
    """The process that forks such children; nothing where the child has to be a fresh interpreter."""
    command = asked["args"]
    if sys.platform != "linux" or isinstance(command, str) or command[0] != sys.executable:
        return None
    if command[1:3] != ["-PB", "-m"] or command[3] not in FORKED or not Path(asked["cwd"] or ".").is_dir():
        return None
    if any(asked[name] != ORDINARY[name] for name in ORDINARY):
        return None
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    read = _read(environment)
    if _of_this_server is not None:
        return _of_this_server if _of_this_server.read == read else None
    with _starting:
        package = command[3].rpartition(".")[0]  # a child has no modules of other packages' children
        kind = (os.getpid(), package, read)  # the pid: a forked process has not its parent's children
        if kind not in _parents and command[3] != SERVER and _first_of_all((package, read)):
            _parents[kind] = None
            return None
        if _parents.get(kind) is None:
            _parents[kind] = _Parent.started(environment)
        return _parents[kind]


def _first_of_all(kind: tuple[str, frozenset[tuple[str, str]]]) -> bool:
    """True if no worker of this run has started a child of this kind."""
    place = zlib.crc32(repr((kind[0], sorted(kind[1]))).encode()) % len(_begun)
    was, _begun[place] = _begun[place], 1
    return not was


def _adopt_orphans(yes: bool) -> None:
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, int(yes), 0, 0, 0)


def _serve(link: socket.socket) -> None:
    """The work of the process that forks: it goes on until the one that started it is gone. Returns in each child
    alone."""
    gc.disable()  # going through torch again and again is a quarter of its import
    for name in ("torch", "torch._dynamo"):
        importlib.import_module(name)
    while True:
        text, descriptors, _, _ = socket.recv_fds(link, MOST, 3)
        if not text:
            os._exit(0)
        order = json.loads(text)
        for name in order["imports"]:
            importlib.import_module(name)
            if name == SERVER:  # it imports this when its command is known
                importlib.import_module("halfeven.serve.server")
        if plans := sys.modules.get("halfeven.exporters.plan.rehearsal"):
            plans.UNSEEN = plans.UNSEEN_ALONE = FEW_UNSEEN  # type: ignore[attr-defined]
        gc.freeze()  # a child looks at none of it: it would copy each page that it looks at
        if _fork(link, order):
            return _become(order, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(link: socket.socket, order: Mapping[str, Any]) -> bool:
    """True in the child. It is forked by a process that ends at once, so the kernel gives it to the nearest process
    above that adopts orphans: the one that asked for it."""
    ours, theirs = socket.socketpair()
    middle = os.fork()
    if not middle:
        if os.fork():
            os._exit(0)
        link.close()
        ours.close()
        if order["session"]:
            os.setsid()
        elif order["group"] >= 0:
            os.setpgid(0, order["group"])
        theirs.send(str(os.getpid()).encode())
        theirs.recv(1)  # by then its parent is the one that asked
        theirs.close()
        return True
    theirs.close()
    os.waitpid(middle, 0)
    link.send(ours.recv(64))
    ours.close()
    return False


def _fork_beside(read: frozenset[tuple[str, str]], descriptors: Sequence[int]) -> _Parent:
    """A child of a server or a trainer, which forks the children of that process."""
    ours, theirs = _pair()
    if os.fork():
        theirs.close()
        return _Parent(ours, read)
    ours.close()
    for descriptor in descriptors:
        os.close(descriptor)
    _serve(theirs)
    sys.exit()  # a child of a job, at its end


def _become(order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Turn this process into what a fresh interpreter with this command line is, up to its end."""
    global _of_this_server
    if order["beside"]:
        _of_this_server = _fork_beside(_read(order["environment"]), descriptors)
        FORKED.clear()
        FORKED.update(order["beside"])
        subprocess.Popen = Popen
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    gc.enable()
    os.chdir(order["folder"])
    # Python itself sets this one at its start.
    coerced = {name: os.environ[name] for name in ("LC_CTYPE",) if name in os.environ}
    os.environ.clear()
    os.environ.update({**coerced, **order["environment"]})
    sys.orig_argv[:] = order["arguments"]
    _show(order["arguments"])
    what, *more = order["arguments"][3:]
    numpy, torch = (sys.modules[name] for name in ("numpy", "torch"))
    numpy.random.seed()  # else the random numbers of all children would be the same
    torch.default_generator.seed()
    sys.argv[:] = ["-m", *more]
    sys.modules.pop(what, None)
    runpy.run_module(what, run_name="__main__", alter_sys=True)


def _show(command: Sequence[str]) -> None:
    """Set the command line of this process that others see: proc(5), ``cmdline``, is read from where it was started."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"".join(os.fsencode(part) + b"\0" for part in command)
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
