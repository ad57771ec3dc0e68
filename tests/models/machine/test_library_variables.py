"""Variables that let libraries compute FP32 less precisely, or on one processor, are taken out of our processes by
name, and refused or named in a process of the user's."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
from halfeven.models.errors import BadSetting
from halfeven.models.machine import library_variables, usable_cores
from halfeven.models.machine.library_variables import BINDING, FPMATH, bindings, refuse_lesser_fp32, take_out

from tests.patience import PATIENCE_S
from tests.slow import one_in_turn


@pytest.fixture(autouse=True)
def nothing_said_before() -> Iterator[None]:
    library_variables.warn_once.cache_clear()
    yield
    library_variables.warn_once.cache_clear()


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "DNNL_DEFAULT_FPMATH_MODE": "any"}, {}),
        ({"DNNL_DEFAULT_FPMATH_MODE": "tf32", "HOME": "/"}, {"HOME": "/"}),
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}, {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}),
        ({"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "2"}),
        ({"GOMP_CPU_AFFINITY": "0-1"}, {}),
        ({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, {}),
        ({"KMP_AFFINITY": "none"}, {"KMP_AFFINITY": "none"}),
        (
            {"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores"},
            {"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores"},
        ),
    ],
)
def test_what_is_taken_out_of_the_environment_is_said_by_its_name_once(
    given: dict[str, str], left: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        environment = dict(given)
        take_out(environment)
        assert environment == left
    said = [record.message.partition(" ")[0] for record in caplog.records]
    assert sorted(said) == sorted(f"{name}={given[name]}" for name in given.keys() - left.keys())


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "bf16"}, "ONEDNN_DEFAULT_FPMATH_MODE=bf16 .*expected STRICT"),
        (
            {"DNNL_DEFAULT_FPMATH_MODE": "ANY", "ONEDNN_DEFAULT_FPMATH_MODE": ""},
            "DNNL_DEFAULT_FPMATH_MODE=ANY ",
        ),
        ({"DNNL_DEFAULT_FPMATH_MODE": "BF16", "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}, None),
        ({}, None),
    ],
)
def test_a_process_in_which_onednn_computes_fp32_in_less_is_refused(
    environment: Mapping[str, str], named: str | None
) -> None:
    if named is None:
        refuse_lesser_fp32(environment)
        return
    with pytest.raises(BadSetting, match=named):
        refuse_lesser_fp32(environment)


@pytest.mark.parametrize(("affinity", "said"), [({0}, 1), ({0, 1}, 0)])
def test_a_users_process_that_openmp_bound_to_one_processor_is_named_once(
    affinity: set[int], said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: affinity, raising=False)
    monkeypatch.setenv("OMP_PLACES", "cores")
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    with caplog.at_level(logging.WARNING, "halfeven.machine"):
        for _ in range(3):
            usable_cores.cores_here()
    assert [
        "1 of 4" in record.message and "OMP_PLACES=cores" in record.message for record in caplog.records
    ] == ([True] * said)
    assert os.environ["OMP_PLACES"] == "cores"


# A child process with the variable set, as it is and as the command line begins it.

OURS = "from halfeven.serve.cli import main; main.app = lambda: None; main.main()\n"
CORES = (
    "import os\nbefore = os.sched_getaffinity(0)\nimport torch\nprint(before == os.sched_getaffinity(0))\n"
)
PRODUCT = """
import torch
packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(256, 256), None)
row = torch.full((128, 256), 1 + 2**-12)
answer = torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], "")
print(bool((answer == 256 * (1 + 2**-12)).all()))
"""


def holds(script: str, name: str, value: str) -> bool | None:
    """The word that the script prints in a process with this variable; None where it does not run."""
    clean = {one: kept for one, kept in os.environ.items() if one not in (*BINDING, *FPMATH)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**clean, name: value},
    )
    return {"True\n": True, "False\n": False}.get(done.stdout)


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize(
    ("script", "name", "value"),
    [
        *one_in_turn([(CORES, "OMP_PROC_BIND", "true"), (CORES, "GOMP_CPU_AFFINITY", "0-1")], 0),
        *one_in_turn([(PRODUCT, name, "BF16") for name in FPMATH], 0),
    ],
)
def test_a_process_that_the_command_line_begins_computes_fp32_on_all_its_cores(
    script: str, name: str, value: str
) -> None:
    if holds(script, name, value) is not False:
        pytest.skip("the variable changes nothing here")
    assert holds(OURS + script, name, value) is True


def test_the_variables_that_bind_are_named_with_their_values() -> None:
    assert bindings({"OMP_PROC_BIND": "", "GOMP_CPU_AFFINITY": "3"}) == ["GOMP_CPU_AFFINITY=3"]
