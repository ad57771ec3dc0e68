"""The power of the proofs of the healthy corpus and the zoo, and what measuring it costs.

    python -m tests.benchmarks.proof_power [NAME ...]

For each model: nodes at which faults were planted, the share of the errors of 8u that its samples show and hide, why
the others are missed, and the share of the conversion's processor time that this took. Damped faults are planted again
on 64 fresh samples: those that reach the limit there are listed. The last line has all of them.
"""

import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from halfeven.exporters.conversion import road
from halfeven.exporters.graph.original_graph import OriginalGraph
from halfeven.exporters.proof import planted_faults
from halfeven.exporters.proof.planted_faults import measured_power
from halfeven.exporters.proof.power import DAMPED, FINE, Power
from halfeven.exporters.proof.prove import ReferenceRun
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.folder.package import Precision
from halfeven.models.store.store import Store

from tests.conversions import samples_of
from tests.corpus import CORPUS, captured

FRESH = 64


def reached(name: str, power: Power) -> list[str]:
    """The nodes at which a fault was damped and is noticed on fresh samples."""
    damped = {one.node for one in power.planted if one.why == DAMPED}
    if not damped:
        return []
    model = captured(name)
    samples = samples_of(name, FRESH, seed=3)
    subject = Subject(model.program, model.spec, samples, Precision("O1"), ("torch",), Path(), {})
    maker = ProgramForms(subject)
    with mock.patch.multiple(planted_faults, ROWS=FRESH, MOST_NODES=1 << 20, SMALL=1 << 60):
        again = measured_power(maker.reference_run(samples), maker.original_graph(), "fp16")
    asked = {one.node: one for one in again.planted}
    return [f"{node} {asked[node].response:.2f}" for node in damped if not asked[node].why]


def measured(name: str) -> tuple[Power, float, float]:
    """The power, and the seconds of the processor that it and the conversion took."""
    model, found, spent = captured(name), list[Power](), list[float]()

    def timed(run: ReferenceRun, original: OriginalGraph, dtype: str) -> Power:
        started = time.process_time()
        found.append(measured_power(run, original, dtype))
        spent.append(time.process_time() - started)
        return found[-1]

    spec = replace(model.spec, name="measured")
    subject = Subject(
        model.program, spec, samples_of(name, 32, seed=1), Precision("O1"), ("torch",), Path(), {}
    )
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(road, "measured_power", timed):
        started = time.process_time()
        road.travel(subject, ProgramForms(subject), Store(Path(folder)), lambda _: None)
        return found[0], spent[0], time.process_time() - started


def main(names: list[str]) -> None:
    nodes, seen, missed, spent, took, blind, grown = 0, 0, Counter[str](), 0.0, 0.0, 0, list[str]()
    for name in names or [name for name, case in CORPUS.items() if not case.trap]:
        power, own, original = measured(name)
        nodes, seen = nodes + len(power.planted), seen + sum(FINE in one.noticed for one in power.planted)
        missed.update(one.why for one in power.planted if one.why)
        spent, took, blind = spent + own, took + original, blind + (not power.is_shown)
        print(
            f"{name:32} {len(power.planted):3} nodes, shown {power.noticed(FINE):4.0%}, of undamped "
            f"{power.share:4.0%}, hidden {power.hidden:3.0%}, {own / original:.1%} of {original:.1f} s",
            flush=True,
        )
        for one in power.planted:
            if one.why:
                print(
                    f"    {one.node} ({one.op}) {one.why}: {one.response:.4f} of the limit, from {one.seen_at_u:g}u"
                )
        for one in reached(name, power):
            print(f"    {one} of the limit on fresh samples")
            grown.append(one)
    undamped = nodes - missed[DAMPED]
    print(
        f"{nodes} nodes, {seen} shown ({seen / nodes:.1%}); missed {dict(missed)}; of {undamped} undamped "
        f"{seen / undamped:.1%} shown; {len(grown)} of the damped reach the limit on fresh samples; "
        f"{blind} not shown; {spent / took:.1%} of the time"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
