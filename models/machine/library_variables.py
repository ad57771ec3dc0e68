"""Environment variables of others that would make libraries compute otherwise than halfeven says.

oneDNN computes FP32 in a less precise type where those in `FPMATH` ask for it, and no setting of torch forbids it.
OpenMP binds the thread that imports torch to one processor where those in `BINDING` ask for it: the threads that are
started later inherit that, and the process seems to have one core. Libraries read both when they are loaded, or at
their first operation.

A process of ours takes such variables out before it imports torch or numpy, and says so. A process of the user's keeps
them: `refuse_lesser_fp32` refuses there, and the number of cores is read with a warning.
"""

import functools
import logging
import os
from collections.abc import Mapping, MutableMapping

from ..errors import BadSetting

logger = logging.getLogger("halfeven.machine")

# oneDNN reads the first, and the second where the first is empty (its documentation, "Floating-point math mode").
FPMATH = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
_LESSER = {"any", "bf16", "f16", "tf32"}
# GNU's libgomp binds by each of the first three; LLVM's and Intel's libraries by the last too.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_UNBOUND = {"", "false", "none", "disabled"}


def take_out(environment: MutableMapping[str, str]) -> None:
    """Remove the variables that make oneDNN compute FP32 less precisely or bind threads, with a warning for each."""
    for setting in _lesser_fp32(environment):
        del environment[setting.partition("=")[0]]
        warn_once(f"{setting} is not used: it would make oneDNN compute FP32 in a less precise type")
    for setting in bindings(environment):
        del environment[setting.partition("=")[0]]
        warn_once(
            f"{setting} is not used: OpenMP would bind all threads to one processor; to restrict the process to some "
            "processors, start it with taskset or in a cpuset"
        )


def refuse_lesser_fp32(environment: Mapping[str, str] = os.environ) -> None:
    """Raise BadSetting where oneDNN computes FP32 in a less precise type in this process."""
    read = next((name for name in FPMATH if environment.get(name)), "")
    for setting in _lesser_fp32(environment):
        if setting.startswith(f"{read}="):
            raise BadSetting(
                f"{setting} makes oneDNN compute FP32 in a less precise type, so that nothing could be proven against "
                "FP32 or answered in it; expected STRICT: unset the variable before the process starts"
            )


def bindings(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The settings, as ``NAME=VALUE``, by which OpenMP binds threads to processors."""
    if environment.get("OMP_PROC_BIND", "").strip().lower() == "false":  # then the others do not count
        return []
    return [
        f"{name}={environment[name]}"
        for name in BINDING
        if environment.get(name, "").strip().lower() not in _UNBOUND
    ]


@functools.cache
def warn_once(sentence: str) -> None:
    logger.warning(sentence)


def _lesser_fp32(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={environment[name]}" for name in FPMATH if environment.get(name, "").lower() in _LESSER]
