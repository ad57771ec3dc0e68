"""The checks of a device, one after another; what they find wrong is switched off by name in the store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

from ...exporters.on_device.environment import environment
from ...exporters.on_device.selftest_record import keep_record
from ...models.engines.device_choice import resolve_device
from ...models.engines.switched_off import DEVICE
from ...models.engines.true_fp32 import use_true_fp32
from ...models.version import __version__
from .check_batches import batch_sizes, memory, ordering
from .check_fast_forms import bit_equality, graphs, onnx_placement
from .check_out_of_memory import out_of_memory
from .nets import NAMES, Net, captured_net
from .plain_way import FAILED, DeviceLost, Outcome, not_applicable


class Check(NamedTuple):
    """``on_cuda``: what only a CUDA device has, where the check is of that; empty: it is for every device."""

    run: Callable[[torch.device, Sequence[Net]], Outcome]
    on_cuda: str = ""


CHECKS: Mapping[str, Check] = {
    "bit equality with live autocast": Check(bit_equality),
    "ordering under stress": Check(ordering, "streams whose order could be wrong"),
    "batch sizes": Check(batch_sizes, "fixed batch sizes"),
    "graphs against eager": Check(graphs, "graphs"),
    "memory": Check(memory, "memory of its own"),
    "injected out of memory": Check(out_of_memory, "memory of its own"),
    "ONNX placement": Check(onnx_placement, "a choice between it and the CPU"),
}
Notify = Callable[[str], None]


def selftest(word: str, root: Path, notify: Notify) -> dict[str, Any]:
    """Check the device that ``word`` names, and keep in the store at ``root`` what must not be used there.

    Gives the device, its driver and versions, the date, and each check's outcome. Raises BadSetting for a device that
    is not there, CaptureFailed where a net of the zoo cannot be captured here, OSError where nothing can be kept.
    """
    use_true_fp32()
    device = resolve_device(word)
    nets = []
    for name in NAMES:
        notify(f"capturing {name}")
        nets.append(captured_net(name))
    outcomes = run_checks(device, nets, notify)
    record = keep_record(root, device, reasons_of(outcomes))
    return {
        "status": "failed" if failed(outcomes) else "passed",
        "device": str(device),
        "halfeven": __version__,
        "environment": environment(device),
        "date": record.at,
        "checks": [{"check": name, **asdict(outcome)} for name, outcome in outcomes.items()],
        "off": dict(record.off),
    }


def run_checks(
    device: torch.device, nets: Sequence[Net], notify: Notify, checks: Mapping[str, Check] = CHECKS
) -> dict[str, Outcome]:
    """Each check's outcome. After one that lost the device the others do not apply."""
    outcomes: dict[str, Outcome] = {}
    lost = ""
    for name, check in checks.items():
        if lost:
            outcomes[name] = not_applicable(f"the device was lost by the check '{lost}'")
            continue
        if check.on_cuda and device.type != "cuda":
            outcomes[name] = not_applicable(f"only a CUDA device has {check.on_cuda}")
            continue
        notify(f"checking {name}")
        try:
            outcomes[name] = check.run(device, nets)
        except DeviceLost as error:
            lost = name
            outcomes[name] = Outcome(FAILED, f"the device is lost: {error}", (DEVICE,))
    return outcomes


def failed(outcomes: Mapping[str, Outcome]) -> bool:
    return any(outcome.status == FAILED for outcome in outcomes.values())


def reasons_of(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """The features to switch off, each with the check and its evidence."""
    reasons: dict[str, str] = {}
    for name, outcome in outcomes.items():
        for feature in outcome.off:
            reasons.setdefault(feature, f"{name}: {outcome.evidence}")
    return reasons


def table_of(facts: Mapping[str, Any]) -> Table:
    table = Table("check", "outcome", "evidence", "switched off", title=_title(facts))
    for check in facts["checks"]:
        table.add_row(check["check"], check["status"], escape(check["evidence"]), ", ".join(check["off"]))
    return table


def _title(facts: Mapping[str, Any]) -> str:
    versions = (f"{name} {found}" for name, found in facts["environment"].items() if name != "device")
    return f"{facts['device']}: {facts['environment']['device']}, {', '.join(versions)}, {facts['date']}"
