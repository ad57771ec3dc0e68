"""The report of one conversion: a page that loads nothing, and a table for the terminal.

Both read ``facts``, the JSON-able dict of one conversion. Absent values are not drawn, so that older versions
render too. ``model``, ``version``, ``digest``, ``status``, ``reason``, ``precision``, ``samples`` (source,
planning, judging, batch_sizes), ``capture`` (notes), ``environment`` and ``replay`` describe the conversion;
``forms`` maps a form to what the command line prints of it and ``parity``, its `gate.verdict.ParityReport` as
JSON (with ``diagnoses``: floor, distance, range or precision). ``half`` is the half's dtype, None where nothing is
half. Beyond the gate (each made in `sections.py` unless another file is named):

- ``recommendation`` {convert, message}
- ``curve`` {nodes, astray_u, points: [{at, node, op, error_u, lost}], first}: `curve.Curve.to_json`
- ``search`` {outcome, evaluations, unseen, minimal, before, after, certificate: [{node, op, error_u, reason}]}
- ``repairs`` [{node, what, evidence}]: `repairs.Repair.to_json`
- ``profile`` {nodes, batches, rows, guards}
- ``weights`` {tensors, worst: [rows of the ledger, columns as they come]}
- ``casts`` {count, bytes, bytes_before, rows: [{source, from, to, bytes, readers, more}]}
- ``power`` {shown, samples, noticed, missed, nodes: [{node, op, noticed, why, blind}]}: `proof.power.Power.to_json`
- ``worst`` {output, sample, row, error_u, inputs: [{name, shape, least, largest, mean, zeros, not_finite}]}:
  `gate.worst.worst_sample`

In JSON a null number has no bound.
"""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..gate.noise import ROOM
from ..proof.power import EXPLAINED, FAULTS
from ..search.delta_debugging import EXHAUSTED
from .gate_rows import Row, few_pairs, gate_rows
from .headline import FEW, GENERATED, PASSED, headline, is_generated, judged_samples, perturbed_samples
from .plots import HEIGHT, SLICE_HEIGHT, WIDTH, curve_plot, error_bar, error_plot, slice_plot

_LEGEND = (
    "u: the error, as a multiple of the half's rounding unit at the output's largest value. SQNR: signal to noise "
    "in dB, slice: that of the worst channel. flips: decisions that change. half: nodes in half. kept: nodes in FP32 "
    "for the answer's sake. casts: nodes that change the datatype. size: bytes of the weights, of FP32's."
)
_HERE = Path(__file__).parent
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def render_html(facts: Mapping[str, Any]) -> str:
    """The report as one page without any outside asset. Every text in ``facts`` is escaped."""
    return _environment().get_template("report.html").render(facts=facts)


def table(facts: Mapping[str, Any]) -> str:
    """The table of a conversion or a proof, as the terminal shows it."""
    text = io.StringIO()
    Console(file=text, width=100, highlight=False).print(render_terminal(facts))
    return text.getvalue().rstrip()


def render_terminal(facts: Mapping[str, Any]) -> Group:
    """One row for each form and output, the legend, and every sentence of a refusal and every note."""
    fp32 = ", in FP32" if _in_fp32(facts) else ""
    title = escape(f"{facts['model']}@{facts.get('version') or '–'}: {facts['status']}{fp32}")
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("form", no_wrap=True)
    table.add_column("output", overflow="fold")  # what the others leave of 80 columns
    table.add_column("verdict", no_wrap=True)
    for heading in ("u/limit", "SQNR", "slice", "flips", "half", "kept", "casts", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    sentences: list[Text] = []
    dtype = str(facts.get("half") or "fp16").upper()
    for form, found in facts["forms"].items():
        for row in _rows(form, found):
            table.add_row(*row)
        sentences += [Text(f"✗ {form}: {sentence}", style="red") for sentence in _sentences(found)]
        sentences += [
            Text(f"  {form}: {sentence}") for sentence in (*_diagnoses(found, dtype), *_orders(found))
        ]
        widened = widened_limits(found.get("parity") or {})
        sentences += [Text(f"! {form}: {sentence}", style="yellow") for sentence in widened]
    sentences += [Text(f"! {sentence}", style="yellow") for sentence in _findings(facts)]
    sentences += [Text(f"  {note}") for note in facts.get("notes", ())]
    return Group(table, Text(), *_verdict(facts), *sentences, Text(), Text(_LEGEND, style="dim"))


def _verdict(facts: Mapping[str, Any]) -> Iterable[Text]:
    """The verdict under the table, where the number of samples belongs to it."""
    if facts["status"] in PASSED and facts.get("half", "") is not None and judged_samples(facts):
        yield Text(headline(facts), style="bold")
    if is_generated(facts):
        yield Text(f"! {GENERATED}: give real ones with samples.safetensors or --samples", style="yellow")
    elif perturbed_samples(facts):
        yield Text(f"! {FEW}", style="yellow")


def _rows(form: str, found: Mapping[str, Any]) -> Iterable[list[str]]:
    graph = [
        f"{found['half_nodes']}/{found['nodes']}" if "nodes" in found else "–",
        str(len(found.get("kept", ()))),
        str(found.get("casts", "–")),
        f"{found['bytes'] / max(found['bytes_fp32'], 1):.0%}" if "bytes" in found else "–",
    ]
    outputs = (found.get("parity") or {}).get("outputs") or []
    for output in outputs:
        decisions, tied = output.get("decisions"), output["tied"]
        is_exact = output["exact"] and not tied
        flips = f"{decisions['flipped']}/{decisions['decisions']}" if decisions else "–"
        yield [
            escape(form),
            escape(output["name"]),
            "[green]passed[/]" if output["passed"] else "[red]refused[/]",
            f"{number_text(output['max_error_u'])}/{output['limit_u']:g}",
            db_text(output["sqnr_db"], is_exact),
            db_text((output.get("worst_slice") or {}).get("db"), is_exact),
            f"{tied} tied" if tied and not decisions else flips,
            *graph,
        ]
    if not outputs:
        passed = "FP32" if found.get("half_nodes") == 0 else "[green]passed[/]"
        verdict = passed if found.get("passed") else "[red]refused[/]"
        yield [escape(form), "–", verdict, "–", "–", "–", "–", *graph]


def _sentences(found: Mapping[str, Any]) -> list[str]:
    failures = (found.get("parity") or {}).get("failures") or []
    error = found.get("error")
    return ([error] if error else []) + [failure["message"] for failure in failures]


def _diagnoses(found: Mapping[str, Any], dtype: str) -> Iterable[str]:
    for diagnosis in (found.get("parity") or {}).get("diagnoses") or []:
        if diagnosis["verdict"] in ("range", "precision"):
            yield f"{diagnosis['verdict']}: {diagnosis['message']}"
        elif diagnosis["floor_u"] and diagnosis["error_u"]:
            error, floor = number_text(diagnosis["error_u"]), number_text(diagnosis["floor_u"])
            best = f"the best possible for {dtype}"
            yield f"'{diagnosis['output']}' errs by {error}u, " + (
                best if error == floor else f"where {floor}u is {best}"
            )


def _orders(found: Mapping[str, Any]) -> Iterable[str]:
    for output in (found.get("parity") or {}).get("outputs") or []:
        if order := output.get("order"):
            best = order["top10_overlap"]
            kept = "" if best is None else f", {10 * best:.0f} of the ten best kept"
            yield (
                f"'{output['name']}' ranks {order['rows']} samples: {order['tied']} of {order['pairs']} pairs tie"
                f"{few_pairs(order)}, {order['swapped']} swap beyond the allowed error{kept}"
            )


def _findings(facts: Mapping[str, Any]) -> Iterable[str]:
    if first := (facts.get("curve") or {}).get("first"):
        how = "is not finite" if first["lost"] else f"errs by {number_text(first['error_u'])}u"
        yield f"first astray: {first['node']} ({first['op']}) {how}"
    if message := (facts.get("recommendation") or {}).get("message"):
        yield message
    exhausted = any(form.get("search") == EXHAUSTED for form in facts["forms"].values())
    if _in_fp32(facts) or (exhausted and facts["status"] == "live"):
        yield facts["reason"]


def _in_fp32(facts: Mapping[str, Any]) -> bool:
    """True if the version is live although nothing in it is half."""
    return facts["status"] in PASSED and facts.get("half", "") is None


def pages_of(folder: Path) -> Environment:
    """The templates of a folder, and the frame that all pages share (``base.html``, ``page.css``): every text is
    escaped, and absent values are not drawn."""
    return Environment(
        loader=FileSystemLoader([folder, _HERE]),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _environment() -> Environment:
    environment = pages_of(_HERE)
    environment.globals.update(error_bar=error_bar, error_plot=error_plot, slice_plot=slice_plot)
    environment.globals.update(curve_plot=curve_plot, headline=headline, rules_of=rules_of)
    environment.globals.update(
        judged_outputs=judged_outputs, adversarial=adversarial, dropped_inputs=dropped_inputs
    )
    environment.globals.update(widened_limits=widened_limits, FAULTS=FAULTS, EXPLAINED=EXPLAINED)
    environment.globals.update(
        is_generated=is_generated, GENERATED=GENERATED, perturbed_samples=perturbed_samples
    )
    environment.globals.update(WIDTH=WIDTH, HEIGHT=HEIGHT, SLICE_HEIGHT=SLICE_HEIGHT)
    environment.filters.update(size=size_text, number=number_text, db=db_text, share=share_text)
    return environment


def size_text(count: float | None) -> str:
    """``18432`` → ``18.0 KB`` (1 KB = 1,024 bytes)."""
    if count is None:
        return "–"
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} bytes" if power == 0 else f"{count:.1f} {_UNITS[power]}"


def number_text(value: float | None) -> str:
    """Three significant digits; null means no bound."""
    if value is None:
        return "∞"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def db_text(value: float | None, exact: bool = False) -> str:
    """Decibels; null is an answer without any error where ``exact``, else one without any signal."""
    if value is None:
        return "exact" if exact else "–"
    return f"{value:.1f}"


def share_text(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def widened_limits(report: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each output whose error limit comes from FP32's own noise (`gate.noise.with_room`) and not from
    the model's limits. ``report``: the parity report of one form, as JSON."""
    for output in report.get("outputs", ()):
        noise = (output.get("statistics") or {}).get("noise")
        if not noise or not isinstance(noise["error"], float):  # a word where it is not finite
            continue
        noise_u = noise["error"] / report["u"]
        if 0 < output["limit_u"] <= ROOM * noise_u * (1 + 1e-9):
            yield (
                f"output '{output['name']}': the FP32 model itself differs by {noise_u:.3g}u when it is computed in "
                f"FP64 or with other sums (its largest value is {1 / report['u']:.4g}u), so the limit is "
                f"{output['limit_u']:.4g}u: the verdict 'equal' means less for this output; look for near ties or for "
                "values at the end of FP32's range"
            )


Forms = Mapping[str, Mapping[str, Any]]


class Judged(NamedTuple):
    """One output of one form, with the diagnosis of its error where there is one."""

    form: str
    output: Mapping[str, Any]
    diagnosis: Mapping[str, Any]


class Rule(NamedTuple):
    """A rule of the gate; ``asked`` is None where the forms were asked different things. A row for each form, None
    where it was not asked, and what its name adds to the common one."""

    name: str
    asked: Row | None
    rows: Sequence[Row | None]
    details: Sequence[str | None]


def judged_outputs(forms: Forms) -> list[list[Judged]]:
    """The forms that were judged on each output."""
    found: dict[str, list[Judged]] = {}
    for form, facts in forms.items():
        parity = facts.get("parity") or {}
        diagnoses = {one["output"]: one for one in parity.get("diagnoses") or ()}
        for output in parity.get("outputs") or ():
            found.setdefault(output["name"], []).append(
                Judged(form, output, diagnoses.get(output["name"], {}))
            )
    return list(found.values())


def rules_of(judged: Sequence[Judged]) -> list[Rule]:
    """The rules in the gate's order, each with a row for each form."""
    found: dict[str, list[Row | None]] = {}
    for place, one in enumerate(judged):
        for row in gate_rows(one.output):
            # The place of the worst slice and the number of samples may differ between the forms.
            key = re.sub(r"\d+", "", row.rule.partition(" (")[0])
            found.setdefault(key, [None] * len(judged))[place] = row
    rules = []
    for rows in found.values():
        known = [row for row in rows if row is not None]
        same = len({row.asked for row in known}) == 1
        name = _common([row.rule.partition(" (")[0] for row in known])
        details = [None if row is None else row.rule.removeprefix(name).strip(" ()") for row in rows]
        rules.append(Rule(name, known[0] if same else None, rows, details))
    return rules


def _common(names: Sequence[str]) -> str:
    """The one name, or the words before the number in which the names differ."""
    return names[0] if len(set(names)) == 1 else re.split(r" of \d|\d", names[0])[0].strip()


def adversarial(forms: Forms) -> list[tuple[str, str, list[Mapping[str, Any] | None]]]:
    """Tuples of an adversarial input, an output, and the finding for each form (None where there is none)."""
    found: dict[tuple[str, str], list[Mapping[str, Any] | None]] = {}
    for place, facts in enumerate(forms.values()):
        for seen in (facts.get("parity") or {}).get("adversarial") or ():
            found.setdefault((seen["input"], seen["output"]), [None] * len(forms))[place] = seen
    return [(*names, seen) for names, seen in found.items()]


def dropped_inputs(forms: Forms) -> list[str]:
    names = (name for facts in forms.values() for name in (facts.get("parity") or {}).get("dropped") or ())
    return list(dict.fromkeys(names))
