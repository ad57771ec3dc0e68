"""``halfeven parity``: the gate once more, for a version in the store or for a folder that is not published."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...exporters.conversion.convert import Options, convert
from ...exporters.gate.rejudge import LIMITS, rejudge
from ...exporters.guessing.given_samples import judging_samples
from ...exporters.inputs.drifted_inputs import judging_with_drifted
from ...exporters.inputs.samples import stored_samples
from ...exporters.on_device.device_proofs import keep_proof
from ...exporters.on_device.environment import environment
from ...exporters.on_device.reprove import holds_here, reprove
from ...exporters.on_device.selftest_record import obey_selftest
from ...exporters.proof.subject import CPU
from ...exporters.report.version_facts import facts_of
from ...models.engines.device_choice import resolve_device
from ...models.engines.load import load_half
from ...models.engines.true_fp32 import use_true_fp32
from ...models.errors import BadInput, BadSetting
from ...models.store.store import Store, Version
from ..versions.orders import drifted, pardon
from ..versions.versions_in_store import version_called

Notify = Callable[[str], None]


def judge_again(
    target: str, store: Store, samples: Path | None, device: str, notify: Notify
) -> dict[str, Any]:
    """Facts as `report.page.render_terminal` takes them. ``target``: a folder, NAME or NAME@VERSION.

    Raises UnknownName for a target that is neither, BadInput for a version that has no half to judge.
    """
    if _is_folder(target):
        options = Options(samples=samples, device=CPU if device == "auto" else str(resolve_device(device)))
        with tempfile.TemporaryDirectory(prefix="halfeven-parity-") as folder:
            return convert(Path(target), Store(Path(folder)), options, notify).shown()
    return _judge_version(version_called(target, store), store, samples, device, notify)


def judge_saved(target: str, store: Store, limits: Sequence[str]) -> dict[str, Any]:
    """Judge the stored numbers of a version under other limits (``KEY=VALUE``, keys of ``[parity]``); no model is run.

    Raises UnknownName, and BadSetting for a key or value that is not a limit, or for a folder, which has no numbers.
    """
    if _is_folder(target):
        raise BadSetting(
            f"--limit judges the stored numbers of a version, and {target!r} is a model folder: convert it, then give "
            "NAME or NAME@VERSION"
        )
    version = version_called(target, store)
    own = version.spec().parity
    asked = dict(map(_limit, limits))
    under = replace(own, **asked, overridden=tuple(sorted({*own.overridden, *asked})))
    facts = facts_of(version)

    def judged(proofs: Mapping[str, Any]) -> dict[str, Any]:
        return {form: rejudge(saved, under).to_json() for form, saved in proofs["forms"].items()}

    for form, found in version.read("parity.json", judged).items():
        facts["forms"][form] |= {"passed": found["passed"], "parity": found}
    return facts


def _is_folder(target: str) -> bool:
    return (Path(target) / "model.toml").is_file()


def _limit(word: str) -> tuple[str, float]:
    key, _, value = word.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if key not in LIMITS or not 0 <= number < math.inf:
        raise BadSetting(f"--limit {word!r}: expected KEY=NUMBER with one of the keys {', '.join(LIMITS)}")
    return key, number


def _judge_version(
    version: Version, store: Store, samples: Path | None, device: str, notify: Notify
) -> dict[str, Any]:
    use_true_fp32()
    where = resolve_device(device)
    obey_selftest(version, where)
    facts = facts_of(version)
    halves = [form for form, found in facts["forms"].items() if found["passed"] and found["half_nodes"]]
    if not halves:
        raise BadInput(f"{version} has no proven half to judge again: {facts['reason']}")
    if samples:
        judging = judging_samples(version, samples).distinct()
    else:
        judging, notes = judging_with_drifted(stored_samples(version), version.spec(), store)
        for note in notes:
            notify(note)
    if samples:
        facts["power"] = None  # it was measured on the version's own samples
        facts["samples"] = {"source": judging.source, "count": judging.count}
    for form in halves:
        notify(f"judging the {form} form on {where}")
        engine = load_half(version, form, where)
        report = reprove(version, engine, where, judging)
        engine.close()
        if samples is None and not holds_here(version, where):
            keep_proof(version, form, facts["forms"][form]["path"].rpartition("/")[2], where, report)
        found = report.to_json()
        facts["forms"][form] |= {key: found[key] for key in ("passed", "max_error_u", "sqnr_db")} | {
            "parity": found
        }
    proven = samples is None and all(facts["forms"][form]["passed"] for form in halves)
    if proven and drifted(version, str(where)):
        pardon(version)
        notify(f"its half had drifted on {where} and may serve there again: load {version.name} again")
    return facts | {"environment": environment(where)}
