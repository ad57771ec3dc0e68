"""The forms of a conversion beside each other: what is the same of both is said once."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..gate.gate_rows import Row, gate_rows

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
    """For each output the forms that were judged on it."""
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
