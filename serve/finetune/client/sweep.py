"""``halfeven finetune --sweep``: one job for each combination of settings, on the same rows, and a table at the end.

All jobs begin with the version that is active when the sweep begins, have the same seed and so the same held-out
rows, and are judged against the version that is active when they end (``stale_parent = "rejudge"``): the active version
at the end is the best that the rows can tell apart.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....models.errors import BadInput, HalfevenError
from ..jobs.choices.hyperparameter_table import REJUDGE
from .job_command import (
    JobBar,
    Notify,
    Watch,
    create_job,
    exit_code,
    facts_of,
    job_request,
    refused_files_deleted,
    upload_files,
)
from .remote import Remote

MOST_JOBS = 64
Settings = dict[str, Any]


def grid_of(words: Sequence[str]) -> list[Settings]:
    """Every combination of ``NAME=VALUE,VALUE,…``, or ``NAME=[…]`` with a list in JSON. Raises BadInput."""
    axes: dict[str, list[Any]] = {}
    for word in words:
        name, _, text = word.partition("=")
        values = (
            _json_or(text, None) if text.startswith("[") else [_json_or(one, one) for one in text.split(",")]
        )
        if not name or not isinstance(values, list) or not values or "" in values or name in axes:
            raise BadInput(f"--sweep {word!r}: expected NAME=VALUE,VALUE, once for each name: lr=1e-3,1e-4")
        axes[name] = values
    found = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(found) > MOST_JOBS:
        raise BadInput(f"--sweep: {len(found)} combinations; at most {MOST_JOBS} jobs are one sweep")
    return found


def _json_or(text: str, default: Any) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return default


def sweep(
    server: str,
    name: str,
    file: Path,
    grid: Sequence[Settings],
    *,
    validation: Path | None = None,
    suffix: str | None = None,
    seed: int | None = None,
    hyperparameters: Mapping[str, object] | None = None,
    follow: bool = True,
    notify: Notify,
    console: Console,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[dict[str, Any]]:
    """The facts of each job at its end (`facts_of`), with its ``settings``, in the order of ``grid``.

    Ctrl-C cancels those that have not ended. Raises BadInput where the server refuses the file or one of the jobs,
    NotReady where it takes no more or does not answer: those that were created are cancelled then.
    """
    remote, jobs = Remote(server), list[Mapping[str, Any]]()
    common = {"stale_parent": REJUDGE} | {
        key: one for key, one in (hyperparameters or {}).items() if one is not None
    }
    with JobBar(console) as bar:
        with refused_files_deleted(remote, notify) as sent:
            if "@" not in name and (active := remote.active_version(name)) is not None:
                name = f"{name}@{active}"
            files = upload_files(remote, file, validation, bar, sent)
            for settings in grid:
                request = job_request(name, suffix, seed, {**common, **settings}) | files
                try:
                    jobs.append(create_job(remote, request, sleep))
                except BaseException:  # Ctrl-C too
                    for job in reversed(jobs):
                        with suppress(HalfevenError):
                            remote.cancel(job["id"])
                    raise
                seed = jobs[0]["seed"]
                notify(f"job {jobs[-1]['id']}: {words_of(settings)}")
        ended = Watch(remote, bar, notify, clock, sleep).until_they_end(jobs) if follow else jobs
    return [
        {"settings": settings, **facts_of(job, remote.url)} for settings, job in zip(grid, ended, strict=True)
    ]


def words_of(settings: Settings) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())


def summary_of(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sweep for ``--json``: ``jobs``; ``best``: the settings of the smallest held-out loss; ``active``: the version
    that the last promotion made active, None where none did."""
    losses = [(loss, place) for place, job in enumerate(jobs) if (loss := _held_out_loss(job)) is not None]
    promoted = [job["fine_tuned_model"] for job in jobs if _state(job) == "promoted"]
    newest = max(promoted, key=lambda version: int(version.rpartition("@")[2]), default=None)
    return {
        "jobs": list(jobs),
        "best": jobs[min(losses)[1]]["settings"] if losses else None,
        "active": newest,
    }


def table_of(facts: Mapping[str, Any]) -> Table:
    names = list(facts["jobs"][0]["settings"])
    table = Table(*names, "held-out loss", "seconds", "version", "", box=SIMPLE_HEAD)
    for job in facts["jobs"]:
        loss, summary = _held_out_loss(job), job["summary"] or {}
        taken = f"{summary['seconds']:.3g}" if summary.get("seconds") else "–"
        is_now = (
            "active"
            if job["fine_tuned_model"] and job["fine_tuned_model"] == facts["active"]
            else _state(job)
        )
        cells = (*job["settings"].values(), "–" if loss is None else f"{loss:.5g}", taken)
        best = ", best" if job["settings"] == facts["best"] else ""
        table.add_row(*(Text(str(cell)) for cell in (*cells, job["fine_tuned_model"] or "–", is_now + best)))
    return table


def sweep_exit_code(jobs: Sequence[Mapping[str, Any]], follow: bool = True) -> int:
    """0 where one of the versions became active, 3 where none did and one was made, else as for the first job."""
    codes = [exit_code(job, follow) for job in jobs]
    return next((code for code in (0, 3) if code in codes), codes[0])


def _held_out_loss(job: Mapping[str, Any]) -> float | None:
    return (job["summary"] or {}).get("held_out_loss")


def _state(job: Mapping[str, Any]) -> str:
    if (error := (job["error"] or {}).get("code")) and not job["promotion"]:
        return f"{job['status']}: {error}"
    return (job["promotion"] or {}).get("state") or job["status"]
