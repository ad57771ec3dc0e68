"""The process that converts: it never outlives the server, which would convert again and publish a second version."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from halfeven.serve.finetune.jobs import weights_to_version

# Starts the conversion with the same pipes, prints its number and waits for it.
SERVER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", sys.argv[1], sys.argv[2]])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_PDEATHSIG")
def test_when_the_server_is_killed_a_busy_conversion_dies_though_its_pipes_stay_open(tmp_path: Path) -> None:
    """The request of the conversion is a pipe that nobody fills: the conversion is busy reading, and never ends by
    itself."""
    request = tmp_path / "request.json"
    os.mkfifo(request)
    command = [sys.executable, "-c", SERVER, weights_to_version.__name__, str(request)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as server:
        assert server.stdout
        assert int(server.stdout.readline())
        with request.open("wb"):  # from here on the conversion reads
            server.kill()
            out = server.stdout.fileno()
            assert select.select([out], [], [], 10.0)[0], "the conversion lives on"
            assert os.read(out, 1) == b"", "nobody holds its side any more"
