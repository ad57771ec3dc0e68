"""The changes of a half between its lock and now, each with the reason why it matters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Any]
SLOWER = (
    1.5  # times the half's time as a share of FP32's: less is what two measurements of one half differ by
)
LEAST_MS = 0.1  # of a shorter batch the clock of a busy machine tells nothing
MUCH_SLOWER = 3.0  # times the half's own time: where FP32 became slower with it, on the same processor


@dataclass(frozen=True, slots=True)
class Change:
    """``kind``: ``file``, ``environment``, ``processor``, ``bits``, ``verdict`` or ``speed``. ``fails``: the lock does
    not hold any more."""

    kind: str
    message: str
    fails: bool


def changes(then: Facts, now: Facts) -> list[Change]:
    """The changes of one half in one form; ``then`` and ``now`` are its facts from `measured.py`."""
    found = [*_file(then, now), *_surroundings(then, now)]
    if not now["passed"]:
        found.append(Change("verdict", f"the half is not equal here any more: {now['summary']}", True))
    if (bits := _bits(then, now)) and then["file"] == now["file"]:
        found.append(Change("bits", bits, False))
    if slow := slower(then, now):
        found.append(Change("speed", slow, True))
    return found


def _file(then: Facts, now: Facts) -> list[Change]:
    if then["file"] == now["file"]:
        return []
    before, after = then["weights"], now["weights"]
    changed = sorted(name for name in before if after.get(name) != before[name])
    more = (
        f": {len(changed)} of its {len(before)} weights differ, the first is {changed[0]}" if changed else ""
    )
    return [
        Change(
            "file",
            f"the half is another file than the locked one{more}; lock the new half, or restore the old",
            True,
        )
    ]


def _surroundings(then: Facts, now: Facts) -> list[Change]:
    found = list[Change]()
    before, after = then["environment"], now["environment"]
    for key in sorted({*before, *after} - {"device"}):
        if before.get(key) != after.get(key):
            found.append(
                Change(
                    "environment",
                    f"{key}: {before.get(key, 'none')} then, {after.get(key, 'none')} now",
                    False,
                )
            )
    if before["device"] != after["device"] or then["processor"] != now["processor"]:
        kinds = f"{then['processor']} ({before['device']}) then, {now['processor']} ({after['device']}) now"
        found.append(Change("processor", f"another processor, which may have other kernels: {kinds}", False))
    return found


def _bits(then: Facts, now: Facts) -> str:
    """A sentence where the answers to the same samples have other bits."""
    sides = [name for name in ("half", "fp32") if then["bits"][name] != now["bits"][name]]
    if not sides:
        return ""
    whose = {"half": "the half's", "fp32": "FP32's"}
    said = " and ".join(whose[side] for side in sides)
    return (
        f"{said} answers to the same samples have other bits: kernels compute otherwise. The half erred by "
        f"{_u(then['max_error_u'])} then and errs by {_u(now['max_error_u'])} now"
    )


def _u(error: float | None) -> str:
    return "more than can be counted" if error is None else f"{error:.3g}u"


def slower(then: Facts, now: Facts) -> str:
    """A sentence where the half is slower than it was; empty where it is not, or where no time was taken."""
    before, after = then["milliseconds"], now["milliseconds"]
    if min(*before.values(), *after.values()) <= 0 or after["half"] < LEAST_MS:
        return ""
    shares = [times["half"] / times["fp32"] for times in (before, after)]
    own = after["half"] / before["half"]
    if shares[1] > SLOWER * shares[0] and own > 1:
        return (
            f"the half is slower beside FP32: {shares[1]:.2f} of FP32's time, {shares[0]:.2f} when it was locked "
            f"({after['half']:.3g} ms for a batch, {before['half']:.3g} ms then)"
        )
    if own > MUCH_SLOWER and then["processor"] == now["processor"]:
        return f"half and FP32 are slower: {after['half']:.3g} ms for a batch of the half, {before['half']:.3g} ms then"
    return ""
