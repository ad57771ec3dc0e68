"""The facts of the web pages, as plain dictionaries for their templates. Only models that the reader may know of."""

import math
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...exporters.report.headline import is_generated
from ...models.machine.processor import this_processor
from ...models.pictures.picture import png_of
from ...models.pictures.pixels import Picture
from ...models.spec.spec import ModelSpec
from ...models.version import __version__
from ..access.access_control import AccessControl
from ..access.keys import Owners
from ..batching.interface import Answer
from ..finetune.jobs.records.job_types import REFUSED, JobRow
from ..finetune.web.openai_shapes import shown_message
from ..http.codecs.pictures import BASE64, packed
from ..http.error_mapping import without_folders
from ..http.routes.app import History
from ..versions.director import Director
from ..versions.roster import Roster
from ..versions.traffic.recent import BIN_S, BINS, Bin, quantile_ns, together
from ..versions.traffic.served import ServedModel

WIDTH, HEIGHT = 300, 40  # of a sparkline
_BEST, _SHOWN = 5, 64  # classes, numbers of an output
_LONGEST_PHRASE = 90
Reaches = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Behind:
    """The sources of the pages. ``jobs``: the newest fine-tuning jobs that some owners may see; ``root_path``: where a
    proxy shows the server."""

    roster: Roster
    director: Director
    history: History
    access: AccessControl
    jobs: Callable[[Owners], Sequence[JobRow]]
    started_s: float
    root_path: str = ""


def server_facts(behind: Behind, reaches: Reaches) -> dict[str, Any]:
    """The head of the home page. It reads how full the disk is."""
    roster, device = behind.roster, str(behind.roster.place.device)
    disk = shutil.disk_usage(roster.store.root)
    return {
        "version": __version__,
        "device": f"{device} ({this_processor()})" if device == "cpu" else device,
        "uptime": duration(time.monotonic() - behind.started_s),
        "faults": [without_folders(fault) for fault in roster.not_ready_reasons(reaches)],
        "keys": "on" if behind.access.needed else "off",
        "free": disk.free,
        "disk": disk.total,
    }


def duration(seconds: float) -> str:
    """``93784`` → ``1 d 2 h``: the two largest parts."""
    left, parts = int(seconds), list[str]()
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def cards(roster: Roster, reaches: Reaches) -> list[dict[str, Any]]:
    """One for each model in the store, whether it is served or not. It lists the store's folders."""
    served = {one.name: one for one in roster.all()}
    made = [card(one) for name, one in served.items() if reaches(name)]
    idle = [
        {"name": name, "state": state.lower(), "number": version, "why": without_folders(why)}
        for name, version, state, why in roster.index()
        if state != "READY" and name not in served and reaches(name)
    ]
    return sorted([*made, *idle], key=lambda one: one["name"])


def card(served: ServedModel) -> dict[str, Any]:
    prepared, bins = served.prepared, served.recent.bins()
    last_minute, all_bins = bins[-round(60 / BIN_S) :], together(bins)
    seconds = max(len(last_minute), 1) * BIN_S
    return {
        "name": served.name,
        "state": "served",
        "number": prepared.version,
        "precision": prepared.precision,
        "form": prepared.engine.form,
        "device": prepared.engine.device,
        "why": phrase(without_folders(prepared.reason)),
        "per_second": together(last_minute).answered / seconds,
        "p50_ms": _ms(all_bins, 0.5),
        "p99_ms": _ms(all_bins, 0.99),
        "spark": sparkline(bins),
        "failed": all_bins.failed,
        "waiting": sum(one.waiting for one in served.loaded_versions()),
        "rescued": served.recent.rescued_rows,
    }


def phrase(reason: str) -> str:
    """The first part of a reason, short enough for a card; the model's page has all of it."""
    first = reason.split("; ")[0].split(": ")[0]
    return first if len(first) <= _LONGEST_PHRASE else f"{first[: _LONGEST_PHRASE - 1]}…"


def _ms(one: Bin, share: float) -> float | None:
    found = quantile_ns(one, share)
    return None if found is None else found / 1e6


def sparkline(bins: Sequence[Bin]) -> dict[str, Any] | None:
    """p50 and p99 of each bin as SVG paths in `WIDTH` × `HEIGHT`, logarithmic, the newest at the right; None without
    answers."""
    lines = [[_ms(one, share) for one in bins] for share in (0.5, 0.99)]
    known = [value for line in lines for value in line if value]
    if not known:
        return None
    lowest, highest = min(known) / 2, max(known)
    step, first = WIDTH / (BINS - 1), BINS - len(bins)
    paths = []
    for line in lines:
        path, pen = "", "M"
        for index, value in enumerate(line):
            if not value:
                pen = "M"
                continue
            height = HEIGHT * math.log(value / lowest) / math.log(highest / lowest)
            path += f"{pen}{(first + index) * step:.0f} {HEIGHT - height:.1f}"
            path += "h.1" if pen == "M" else ""  # a bin alone is seen as a dot
            pen = "L"
        paths.append(path)
    return {"p50": paths[0], "p99": paths[1], "highest": highest}


def model_facts(behind: Behind, name: str) -> dict[str, Any]:
    """A model that is served or only in the store. Raises UnknownName."""
    described = behind.director.describe(name)
    served = behind.roster.served(name)
    fault = described.get("fault")
    return {
        "name": name,
        "described": described,
        "fault": fault and without_folders(str(fault)),
        "card": card(served) if served is not None else None,
        "reason": without_folders(served.prepared.reason) if served is not None else "",
        "spec": served.spec if served is not None else None,
        "shares": [
            one for one in described["loaded"] if one["label"] in ("stable", "canary") and one["percent"]
        ],
        "shadow": next((one for one in described["loaded"] if one["label"] == "shadow"), None),
        "shadow_percent": served.traffic.shadow_percent if served is not None else 0.0,
    }


def version_rows(behind: Behind, name: str) -> list[dict[str, Any]]:
    """Every version in the store, the newest first, with its parity badge: (class, words)."""
    labels = {one["version"]: one["label"] for one in behind.director.describe(name)["loaded"]}
    rows = [dict(facts) for facts in behind.history.versions(name)]
    for row in rows:
        row |= {"label": labels.get(row["version"]), "badge": badge(row)}
        errors = [
            form["max_error_u"]
            for form in row.get("forms", {}).values()
            if form.get("max_error_u") is not None
        ]
        row["error_u"] = max(errors, default=None)
    return sorted(rows, key=lambda row: -row["version"])


def badge(version: Mapping[str, Any]) -> tuple[str, str]:
    if version["status"] != "live":
        equal = any(form.get("passed") for form in version.get("forms", {}).values())
        return "bad", f"equal, but {version['status']}" if equal else str(version["status"])
    if version.get("half", "") is None:
        return "", "FP32"
    return ("amber", "equal, on generated samples") if is_generated(version) else ("good", "equal")


def drift_bars(drift: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A histogram for each loaded half and output, with the height of each bar in percent."""
    for version in drift["versions"]:
        for output, gap in version["outputs"].items():
            counts = list(gap["histogram_u"].items())
            most = max([count for _, count in counts] + [1])
            yield {
                **version,
                "output": output,
                "requests": gap["requests"],
                "over": gap["over_limit"],
                "largest_u": gap["largest_u"],
                "bars": [(bound, count, 100 * count / most) for bound, count in counts],
            }


def timeline(
    behind: Behind, names: Collection[str], jobs: Iterable[JobRow], most: int
) -> list[dict[str, Any]]:
    """Orders, decisions and the ends of jobs of these models, the newest first."""
    found = [
        {**event, "message": without_folders(str(event.get("message", "")))}
        for event in behind.director.newest_events(names, most)
    ]
    for job in jobs:
        if job.name in names:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(job.finished_at or job.created_at))
            ended = "refused" if job.status == "failed" and job.code in REFUSED else job.status
            message = f"fine-tuning {ended}" + (f": {shown_message(job)}" if job.message else "")
            found.append({"at": at, "model": job.name, "kind": "job", "message": message, "job": job.id})
    found.sort(key=lambda event: str(event.get("at")), reverse=True)
    return found[:most]


def answer_facts(spec: ModelSpec, answer: Answer) -> dict[str, Any]:
    """One instance's answer, for people: the best classes, a picture, or the first numbers of each output."""
    outputs = []
    for tensor, array in zip(spec.outputs, answer.outputs, strict=True):
        row = array[0] if spec.batched else array
        shown: dict[str, Any] = {"name": tensor.name, "shape": list(row.shape)}
        if tensor.kind == "image":
            shown["picture"] = packed(png_of(row, Picture.of(tensor, spec.batched)))[BASE64]
        elif tensor.kind in ("logits", "probabilities") and row.ndim == 1:
            order = np.argsort(-row.astype(np.float64), kind="stable")[:_BEST]
            named = tensor.labels if len(tensor.labels) == len(row) else range(len(row))
            shown["best"] = [(named[index], float(row[index])) for index in order]
        else:
            numbers = row.ravel()[:_SHOWN].tolist()
            shown["numbers"] = ", ".join(
                f"{one:.6g}" if isinstance(one, float) else str(one) for one in numbers
            )
            shown["more"] = max(row.size - _SHOWN, 0)
        outputs.append(shown)
    return {
        "outputs": outputs,
        "version": answer.prepared.version,
        "precision": answer.precision,
        "queue_ms": answer.queue_ns / 1e6,
        "compute_ms": answer.compute_ns / 1e6,
    }
