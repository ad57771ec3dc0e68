"""The memory of a training is that of its own process, and each phase has its own."""

import json
import subprocess
import sys

import numpy as np
import pytest
from halfeven.serve.finetune.training import peak_memory
from halfeven.serve.finetune.training.peak_memory import CHOOSING, EVALUATION, LOADING, STEPS, PeakMemory

MIB = 2**20


def held(mib: int) -> np.ndarray:
    return np.ones(mib * MIB, np.uint8)


@pytest.mark.slow
def test_each_phase_has_its_own_peak_and_one_that_comes_again_its_largest() -> None:
    """In a process of its own: what other tests left would be given back, or grow, between two phases."""
    asked = (
        "import json, numpy as np\n"
        f"from {peak_memory.__name__} import CHOOSING, EVALUATION, STEPS, PeakMemory\n"
        "memory = PeakMemory('cpu')\n"
        "for phase, mib in ((STEPS, 20), (EVALUATION, 200), (STEPS, 80), (CHOOSING, 0)):\n"
        "    memory.enter(phase)\n"
        f"    np.ones(mib * {MIB}, np.uint8)\n"
        "print(json.dumps(memory.facts()))"
    )
    found = json.loads(subprocess.check_output([sys.executable, "-c", asked]))
    by_phase, least = found["memory_by_phase"], min(found["memory_by_phase"].values())
    assert set(by_phase) == {LOADING, STEPS, EVALUATION, CHOOSING}
    assert by_phase[EVALUATION] >= least + 190 * MIB
    assert found["peak_memory_bytes"] == max(by_phase.values()), "loading has what this process held before"
    assert least + 70 * MIB < by_phase[STEPS] < least + 150 * MIB
    assert found["peak_device_bytes"] is None


def test_where_the_kernel_lets_no_peak_be_reset_a_phase_has_that_of_those_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(peak_memory, "_RESET", peak_memory.Path(str(tmp_path)) / "none" / "here")
    memory = PeakMemory("cpu")
    held(100)
    before = memory.facts()["peak_memory_bytes"]
    memory.enter(STEPS)
    assert memory.facts()["memory_by_phase"][STEPS] >= before


@pytest.mark.slow
def test_a_process_does_not_have_the_peak_of_the_one_that_started_it() -> None:
    mine = held(1024)
    asked = f"from {peak_memory.__name__} import resident_peak; print(resident_peak())"
    found = int(subprocess.check_output([sys.executable, "-c", asked]))
    assert 32 * MIB < found < mine.nbytes
