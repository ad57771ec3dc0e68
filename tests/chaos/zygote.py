"""Starts servers by forking a process that has imported everything: a real process each, in a tenth of the time.

    python -m tests.chaos.zygote        a JSON line in, a JSON line out
    {"start": {"store": …, "log": …, "clock": …, "keys": …}}  → the process id
    {"publish": …}              → the id of a process that publishes a version more in that store
    {"convert": {"folder": …, "store": …, "log": …, "at": 7}}  → that of a conversion, which kills itself before its 7th
                                           change of a file or folder of the store; 0: never, and the log ends with how
                                           many changes there were
    {"wait": 123}                       → how it ended: -9 for SIGKILL

``clock``: a file with the seconds that the server's wall clock is off; the system's own clock is shared with others and
is not touched.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import halfeven.exporters.conversion.convert  # imported before the fork, with torch
import halfeven.serve.server
from halfeven.models.store.store import Store
from halfeven.serve.cli import main

from tests.chaos.publishing import publish_again
from tests.few_unseen import set_unseen


def run(asked: dict[str, Any]) -> None:
    """Run the command line's own entry in the child."""
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    real, clock = time.time, Path(asked["clock"])
    time.time = lambda: real() + (float(clock.read_text()) if clock.exists() else 0.0)
    os.environ |= asked["environment"]
    sys.argv = ["halfeven", "serve", "--store", asked["store"], "--port", "0", "--device", "cpu"]
    main.main()


CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.link"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def convert(asked: dict[str, Any]) -> None:
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    count = 0

    def look(event: str, facts: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in CHANGES or not str(facts[0]).startswith(asked["store"]):
            return
        if event != "open" or (facts[2] or 0) & WRITES:
            count += 1
            if count == asked["at"]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    sys.argv = ["halfeven", "convert", asked["folder"], "--store", asked["store"]]
    try:
        main.main()
    finally:
        print(f"\n{count}", file=sys.stderr)


def wait() -> None:
    assert halfeven.serve.server and halfeven.exporters.conversion.convert
    set_unseen(few=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                if "publish" in asked:
                    publish_again(Store(Path(asked["publish"])), "net", "net")
                elif "convert" in asked:
                    convert(asked["convert"])
                else:
                    run(asked["start"])
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    wait()
