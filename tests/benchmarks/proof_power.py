"""The power of the proofs of the healthy corpus and the zoo, and what measuring it costs.

    python -m tests.benchmarks.proof_power [NAME ...]

For each model: nodes at which faults were planted, the share of the errors of 8u that its samples show and hide, why
the others are missed, and the share of the conversion's processor time that this took. The last line has all of them.
"""

import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from halfeven.exporters import road
from halfeven.exporters.gate.power import FINE, Power
from halfeven.exporters.graph.original_graph import OriginalGraph
from halfeven.exporters.planted_faults import measured_power
from halfeven.exporters.prove import ReferenceRun
from halfeven.exporters.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.package import Precision
from halfeven.models.store import Store

from tests.conversions import samples_of
from tests.corpus import CORPUS, captured


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
    nodes, seen, missed, spent, took, blind = 0, 0, Counter[str](), 0.0, 0.0, 0
    for name in names or [name for name, case in CORPUS.items() if not case.trap]:
        power, own, original = measured(name)
        nodes, seen = nodes + len(power.planted), seen + sum(FINE in one.noticed for one in power.planted)
        missed.update(one.why for one in power.planted if one.why)
        spent, took, blind = spent + own, took + original, blind + (not power.is_shown)
        print(
            f"{name:32} {len(power.planted):3} nodes, shown {power.noticed(FINE):4.0%}, hidden {power.hidden:3.0%}, "
            f"{power.to_json()['missed']}, {own / original:.1%} of {original:.1f} s",
            flush=True,
        )
    print(
        f"{nodes} nodes, {seen} shown, missed {dict(missed)}; {blind} not shown; {spent / took:.1%} of the time"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
