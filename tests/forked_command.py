"""``halfeven`` for the scripts of tests: each command is forked from a process that has imported it (`preloaded.py`).

In such a script a fresh interpreter takes 2 to 3 s of a processor for its imports alone, and so does each child of it.
What a script starts is this file by itself, a few milliseconds: it hands its words, folder, environment and descriptors
to the test, passes signals on, and ends as the command does.

    python -ISB forked_command.py SOCKET WORD …
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path


def main(path: str, *words: str) -> None:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(path)
    order = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    socket.send_fds(link, [json.dumps(order).encode()], [0, 1, 2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: link.send(str(number).encode()) and None)
    status = int(link.recv(64))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
