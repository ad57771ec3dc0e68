"""The bounds of one order hold for this process, for what it starts, and for all of that together."""

import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from halfeven.models.errors import BadFolder, EngineFailed, OutOfMemory, OutOfTime
from halfeven.models.order.one_order import MEMORY_SETTING, SECONDS_SETTING, Order, OrderBounds, one_order
from halfeven.serve.settings import Settings

from tests.patience import PATIENCE_S

PIPE = subprocess.PIPE
MIB = 2**20


def data_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def test_what_an_order_starts_is_bounded_from_outside_and_goes_first() -> None:
    code = "import sys; sys.stdin.read(1); print(open('/proc/self/oom_score_adj').read()); bytearray(2**30)"
    with one_order(OrderBounds(memory_bytes=300 * MIB)) as order:
        child = order.start([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, stderr=PIPE)
        said, failed = child.communicate(b"x", timeout=PATIENCE_S)
    assert said.split() == [b"500"] and b"MemoryError" in failed


def test_memory_that_this_process_lacks_is_a_refusal_that_names_the_setting() -> None:
    before, order = resource.getrlimit(resource.RLIMIT_DATA), Order()
    order.memory_bytes = data_bytes() + 256 * MIB
    with pytest.raises(OutOfMemory, match=f"the work was ended: .* MiB of memory.*{MEMORY_SETTING}"):  # noqa: SIM117
        with order.bounds_this_process("the work"):
            np.ones(2**30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(
    "error, seen",
    [
        (EngineFailed("Failed to allocate memory for requested buffer of size 9"), OutOfMemory),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (BadFolder("a trial run said bad_alloc"), BadFolder),
        (RuntimeError("cannot allocate memory in static TLS block"), RuntimeError),
        (ValueError("of mine"), ValueError),
    ],
)
def test_only_words_about_memory_mean_that_it_was_lacking(error: Exception, seen: type[Exception]) -> None:
    with pytest.raises(seen), Order().bounds_this_process("the work"):
        raise error


def test_time_counts_for_the_original_order_whatever_begins_within_it() -> None:
    now_s = [10.0]
    order = Order(OrderBounds(seconds=5.0), lambda: now_s[0])
    assert order.left_s == 5.0
    now_s[0] = 13.0
    assert order.left_s == 2.0
    now_s[0] = 16.0
    assert order.left_s == 0.0
    with one_order(OrderBounds(seconds=7.0)) as outer, one_order(OrderBounds(seconds=99.0)) as inner:
        assert inner is outer and inner.bounds.seconds == 7.0


def test_the_end_of_the_time_is_told_while_the_work_goes_on() -> None:
    ended, said = threading.Event(), list[str]()

    def end(error: OutOfTime) -> None:
        said.append(str(error))
        ended.set()

    with Order(OrderBounds(seconds=0.0)).watched(end):
        assert ended.wait(PATIENCE_S)
    assert SECONDS_SETTING in said[0] and "no verdict" in said[0]


@pytest.mark.slow
def test_processes_of_an_order_are_bounded_together_where_a_control_group_can_be_made() -> None:
    code = "import sys; held = b'x' * (150 << 20); print('x', flush=True); sys.stdin.read()"
    with one_order(OrderBounds(memory_bytes=256 * MIB)) as order:
        if order.group is None:
            pytest.skip("this user may make no control group")
        children = []
        for _ in range(2):  # each is within the bound of one
            child = order.start([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE)
            children.append(child)
            assert child.stdout is not None
            child.stdout.read(1)
        assert order.was_killed_for_memory() and not order.was_killed_for_memory()
        for child in children:
            with child:
                child.kill()


def test_the_settings_that_messages_name_are_there() -> None:
    named = {f"HALFEVEN_{name.upper()}" for name in Settings.model_fields}
    assert {MEMORY_SETTING, SECONDS_SETTING} <= named
