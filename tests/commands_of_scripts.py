"""The test's side of `forked_command.py`: starts the commands that a script asks for."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests import forked_command
from tests.preloaded import MOST, SERVER


@contextmanager
def forked_halfeven(script: Path) -> Iterator[None]:
    """Inside the block, the executable file ``script`` is `halfeven`. A command whose caller is gone is killed."""
    place = f"{script}.socket"
    words = f'{sys.executable} -ISB {forked_command.__file__} {place} "$@"'
    script.write_text(f"#!/bin/sh\nexec {words}\n")
    script.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(place)
        door.listen()
        threading.Thread(target=_answer, args=(door,), daemon=True).start()
        yield
        door.shutdown(socket.SHUT_RDWR)


def _answer(door: socket.socket) -> None:
    while True:
        try:
            link, _ = door.accept()
        except OSError:  # the block has ended
            return
        threading.Thread(target=_run, args=(link,), daemon=True).start()


def _run(link: socket.socket) -> None:
    with link:
        text, descriptors, _, _ = socket.recv_fds(link, MOST, 3)
        order = json.loads(text)
        process = subprocess.Popen(
            [sys.executable, "-PB", "-m", SERVER, *order["words"]],
            cwd=order["folder"],
            env=order["environment"],
            stdin=descriptors[0],
            stdout=descriptors[1],
            stderr=descriptors[2],
        )
        for descriptor in descriptors:
            os.close(descriptor)
        signals = threading.Thread(target=_pass_signals, args=(link, process), daemon=True)
        signals.start()
        status = process.wait()
        with suppress(BrokenPipeError):  # its caller is gone
            link.send(str(status).encode())
        signals.join()


def _pass_signals(link: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    while said := link.recv(64):
        process.send_signal(int(said))
    process.kill()
