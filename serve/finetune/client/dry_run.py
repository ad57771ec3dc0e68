"""``halfeven finetune --dry-run``: the server checks the job and trains two steps of it; the rows are deleted there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..jobs.records.job_types import BAD_DATA
from .job_command import JobBar, delete_files, job_request, upload_files
from .remote import Remote


def dry_run(
    url: str,
    name: str,
    file: Path,
    *,
    validation: Path | None = None,
    seed: int | None = None,
    hyperparameters: Mapping[str, object] | None = None,
    compare: bool = False,
    notify: Callable[[str], None],
    console: Console,
) -> dict[str, Any]:
    """The server's validation of a job (`jobs/trial_run.py`); the uploaded files are deleted again.

    Raises BadInput with the server's words where the file or the settings are refused, NotReady without a server.
    """
    remote, sent = Remote(url), list[str]()
    request = job_request(name, None, seed, hyperparameters or {})
    try:
        with JobBar(console) as bar:
            request |= upload_files(remote, file, validation, bar, sent)
        return remote.validate(request, compare)
    finally:
        delete_files(remote, sent, notify)


def dry_run_sentences(facts: Mapping[str, Any]) -> str:
    """The result for people: the findings, then what the job would cost, why it would fail, or why neither is known."""
    lines = [f"{one['code']}: {one['message']}" for one in facts["findings"]]
    rows, trial = facts["rows"], facts["trial"]
    if trial is None:
        begins = "it is not known if the job would fail" if facts["valid"] is None else "the job would fail"
        return "\n".join([*lines, f"{begins}: {facts['error']['code']}: {facts['error']['message']}"])
    memory = f"{trial['peak_memory_bytes'] / 2**20:.0f} MiB of memory"
    if trial["peak_device_bytes"] is not None:
        memory += f", {trial['peak_device_bytes'] / 2**20:.0f} MiB of the device's"
    learns = (
        f"{rows['training']} rows, {rows['held_out']} held out; {trial['parameters']} parameters that learn"
    )
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in trial["estimated_parts"].items())
    conversion = (
        "" if trial["conversion_known"] else ", and the conversion: no job of this model has shown how long"
    )
    steps = (
        f"{trial['total_steps']} steps of {trial['seconds_per_step']:.3g} s in {trial['precision']}; the job takes "
        f"about {trial['estimated_seconds']:.3g} s ({parts}){conversion}; {memory}"
    )
    return "\n".join([*lines, learns, steps])


def comparison_of(facts: Mapping[str, Any]) -> Table | str:
    """A row for each precision; a sentence where the job cannot be trained at all."""
    if (found := facts.get("compared")) is None:
        return dry_run_sentences(facts)
    columns = ("precision", "steps/s", "MiB", "loss", "difference to fp32", "")
    table = Table(*columns, title=f"{found['steps']} steps of this job", box=SIMPLE_HEAD)
    for name, one in found["precisions"].items():
        taken = "chosen" if name == found["choice"] else ""
        if why := one.get("left_out"):
            table.add_row(name, "–", "–", "–", "–", escape(f"left out: {why}"))
            continue
        bytes = one["peak_device_bytes"] or one["peak_memory_bytes"]
        difference = one.get("loss_difference")
        shown = "–" if difference is None else f"{difference:.2%}"
        loss = "–" if one["loss"] is None else f"{one['loss']:.4g}"
        skipped = f"{one['skipped']} skipped" if one["skipped"] else ""
        words = ", ".join(filter(None, (taken, skipped)))
        table.add_row(name, f"{one['steps_per_second']:.3g}", f"{bytes / 2**20:.0f}", loss, shown, words)
    return table


def dry_run_exit_code(facts: Mapping[str, Any]) -> int:
    """The command's exit code. 0: the job can be trained; 2: its data do not fit; 1: it would fail otherwise."""
    if facts["valid"]:
        return 0
    return 2 if facts["error"]["code"] in BAD_DATA else 1
