"""``halfeven demo`` on this machine, and where FP16 convolutions take a hundred times as long.

    python -m tests.benchmarks.slow_demo [TIMES]

Prints the seconds of both, and what the gradient scaler did. Both must stay below two minutes on two cores.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SLOW = Path(__file__).parent / "slow_half"


def environment_of(times: int) -> dict[str, str]:
    """The environment of a process in which FP16 convolutions take ``times`` times as long."""
    paths = os.pathsep.join(filter(None, [str(SLOW), os.environ.get("PYTHONPATH", "")]))
    return {"SLOW_HALF": str(times), "PYTHONPATH": paths}


def demo(times: int) -> tuple[float, dict[str, Any]]:
    """Seconds of the whole command, and what it reports."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-m", "halfeven", "demo", "--store", store, "--json"]
        done = subprocess.run(
            command,
            env={**os.environ, **environment_of(times)},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - began, json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    for times in (1, int(sys.argv[1]) if sys.argv[1:] else 100):
        seconds, facts = demo(times)
        job = facts["job"]["summary"]
        print(
            f"FP16 convolutions {times} times as long: {seconds:.1f} s; scale {job['scale_min']:,.0f} to "
            f"{job['scale_max']:,.0f}, {job['skipped']} of {job['steps']} steps skipped, "
            f"{facts['swap']['failed']} requests failed"
        )


if __name__ == "__main__":
    main()
