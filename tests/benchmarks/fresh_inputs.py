"""The share of fresh inputs on which a proven half errs by more than its limit, beside the share in its headline.

    python -m tests.benchmarks.fresh_inputs [--only NAME …] [--road program file] [--given 32] [--rows 256]
                                            [--out FILE.json]

Every model of the corpus (the shipped zoo is in it) is converted on ``--given`` samples; the halves that passed are
asked fresh inputs from the same source. An input counts as wrong where an answer errs by more than ``limit_u``·u·S,
with limit and S as the proof has them, is not finite where the original's is, or is another integer that does not tie.
The exit code is 1 where a half errs oftener than its headline says.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from halfeven.exporters.gate.divergence import SENTINEL
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF
from halfeven.exporters.gate.trial import Pair, pairs_of
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.stored import stored_ties
from halfeven.exporters.proof.prove import answers_of, tried
from halfeven.exporters.report.headline import headline, judged_samples, one_in
from halfeven.exporters.report.version_facts import facts_of
from halfeven.exporters.torch.program_answers import ties_of
from halfeven.models.engines.load import load_half, load_original
from halfeven.models.engines.torch_engine import original_module
from halfeven.models.errors import HalfevenError
from halfeven.models.store.store import LIVE, Version
from torch import device

from tests.benchmarks.same_plans import ROWS as GIVEN
from tests.benchmarks.same_plans import converted
from tests.corpus import CORPUS, fresh

ROWS, SEED = 256, 77
ROADS = ("program", "file")
CPU = device("cpu")


@dataclass(frozen=True)
class Row:
    """One form of one model. ``wrong`` of ``asked`` inputs err; the headline allows one in ``one_in``."""

    road: str
    model: str
    form: str
    headline: str
    one_in: int
    asked: int
    wrong: int
    worst_u: float
    seconds: float

    @property
    def holds(self) -> bool:
        return self.wrong * self.one_in <= self.asked


def fresh_samples(name: str, rows: int = ROWS, seed: int = SEED) -> Samples:
    return Samples({key: tensor.numpy() for key, tensor in fresh(name, rows, seed).items()})


def rows_of(road: str, name: str, rows: int = ROWS, given: int = GIVEN) -> Iterator[Row]:
    """The proven forms of one model that were asked; none where no half is proven."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        version = converted(road, name, Path(scratch), given)
        if version.status != LIVE or version.manifest["half"] is None:
            return
        reports = version.json("parity.json")["forms"]
        facts = facts_of(version)
        shown = {
            **facts,
            "forms": {form: {**facts["forms"][form], "parity": report} for form, report in reports.items()},
        }
        allowed = one_in(judged_samples(shown))
        for form, report in reports.items():
            if report["passed"]:
                wrong, worst = wrong_inputs(version, form, report, fresh_samples(name, rows))
                seconds = time.perf_counter() - began
                yield Row(road, name, form, headline(shown), allowed, rows, wrong, worst, seconds)


def wrong_inputs(
    version: Version, form: str, report: Mapping[str, Any], samples: Samples
) -> tuple[int, float]:
    """The number of samples that are answered wrongly, and the largest error of a number in units of u·S."""
    spec, dtype = version.spec(), version.manifest["half"]
    engines = [load_original(version, form, CPU), load_half(version, form, CPU)]
    original, half = (answers_of(spec, engine) for engine in engines)
    program = version.has("original.pt2")
    ties = (
        ties_of(original_module(version), spec, dtype, samples)
        if program
        else stored_ties(version, dtype, samples)
    )
    judged = {output["name"]: output for output in report["outputs"]}
    trials = [tried(numbers, inputs, original(inputs), half(inputs), ties)
              for numbers, inputs in samples.batches(spec.max_batch_size)]  # fmt: skip
    wrong, worst = set[int](), 0.0
    for tensor in spec.outputs:
        is_float, found = tensor.type.is_float, judged[tensor.name]
        limit = found["limit_u"] * UNIT_ROUNDOFF[dtype] * (found["scale"] or 1.0) if is_float else 0.0
        for pair in pairs_of(spec, tensor, trials):
            errors = _errors(is_float, pair)
            wrong |= {
                number for number, error in zip(pair.samples, errors, strict=True) if not error <= limit
            }
            worst = (
                max(worst, float(errors.max(initial=0.0)) / limit * found["limit_u"]) if is_float else worst
            )
    for engine in engines:
        engine.close()
    return len(wrong), worst


def _errors(is_float: bool, pair: Pair) -> np.ndarray:
    """The largest error of each row, infinite where a mask differs; of integers how many differ and do not tie."""
    inner = tuple(range(1, pair.reference.ndim))
    if not is_float:
        different = pair.reference != pair.candidate
        return (different if pair.ties is None else different & ~pair.ties).sum(inner)
    one, other = pair.reference.astype(np.float64), pair.candidate.astype(np.float64)
    counts = np.abs(one) < SENTINEL
    with np.errstate(invalid="ignore"):
        masked = np.where(np.sign(one) == np.sign(other), 0.0, np.inf)
        errors = np.where(counts, np.abs(one - other), masked)
    errors[np.isnan(one) & np.isnan(other)] = 0.0
    return np.nan_to_num(errors, nan=np.inf, posinf=np.inf).max(inner, initial=0.0)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | road | form | allowed of inputs | wrong of asked | largest error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        mark = "" if row.holds else " **oftener**"
        lines.append(
            f"| {row.model} | {row.road} | {row.form} | 1 in {row.one_in} | {row.wrong} of {row.asked}{mark} | "
            f"{row.worst_u:.3g}u |"
        )
    asked, wrong = sum(row.asked for row in rows), sum(row.wrong for row in rows)
    failed = sum(not row.holds for row in rows)
    return "\n".join(
        [*lines, f"\n{len(rows)} halves, {wrong} of {asked} inputs wrong, {failed} oftener than said"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.fresh_inputs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models of the corpus")
    parser.add_argument("--road", nargs="+", default=["program"], choices=ROADS)
    parser.add_argument(
        "--given", type=int, default=GIVEN, help="samples of a conversion; half of them judge"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="fresh inputs")
    parser.add_argument("--out", type=Path, help="results.json")
    asked = parser.parse_args()
    found: list[Row] = []
    for road in asked.road:
        for name in asked.only or CORPUS:
            try:
                rows = list(rows_of(road, name, asked.rows, asked.given))
            except HalfevenError as error:
                print(f"{road} {name}: {error}", file=sys.stderr, flush=True)
                continue
            for row in rows:
                print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
            found += rows
    print(table(found))
    if asked.out:
        asked.out.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0 if all(row.holds for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
