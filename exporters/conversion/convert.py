"""Convert a model folder: read it, capture the model or read its ONNX file, check the signature, call `road.travel`."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models.engines.engine import LIVE_FILE
from ...models.errors import (
    BadInput,
    BadSetting,
    CannotConvert,
    DamagedFile,
    NewerFormat,
    NotRun,
    OrderEnded,
)
from ...models.folder.model_keys import LEVELS
from ...models.folder.package import ModelFolder, Precision, check_program
from ...models.order.one_order import one_order
from ...models.spec.spec import ModelSpec, TensorSpec
from ...models.store.manifest import sha256_of
from ...models.store.promotions import was_cut_off
from ...models.store.store import LIVE, Store, Version
from ..guessing.bare import folder_at
from ..guessing.given_samples import laid_out
from ..inputs.drifted_inputs import drifted_digests, too_old, with_drifted
from ..inputs.samples import Samples, load_samples
from ..inputs.synthetic import generate, in_range, range_of, with_smaller_integers
from ..on_device.environment import environment
from ..onnx.conversion import NotPlanned, read_foreign
from ..onnx.forms import foreign_subject
from ..onnx.reading.bounded_file import external_files, read_graph
from ..proof.maker import Maker, Notify
from ..proof.prove import MAX_JUDGED
from ..proof.subject import CPU, Subject
from ..question import RowsDiffer
from ..report.evidence import SOURCE_SUFFIXES, files_of
from ..report.version_facts import facts_of
from .road import travel

# Data that model.py may read beside itself. Pages, plots and logs, which a command may write there, do not count.
READ_BY_CODE = (
    ".npy", ".npz", ".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pkl", ".csv", ".tsv", ".yaml", ".yml",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a conversion beyond the folder; None: as the folder has it. ``search``, ``device``: as in
    `Subject`.

    ``all_forms``: refuse a model that cannot have all of ``forms``.
    """

    forms: tuple[str, ...] = ("torch", "onnx")
    level: str | None = None
    dtype: str | None = None
    keep: tuple[str, ...] = ()
    samples: Path | None = None
    new_signature: bool = False
    search: bool | None = False
    device: str = CPU
    all_forms: bool = False
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversion:
    """A published version with its facts; ``unchanged`` where the folder gave no new one."""

    version: Version
    facts: Mapping[str, Any]
    unchanged: bool = False

    @property
    def asked_passed(self) -> bool:
        """True if every form that was attempted passed."""
        return all(form["passed"] for form in self.facts["forms"].values())

    @property
    def any_passed(self) -> bool:
        return any(form["passed"] for form in self.facts["forms"].values())

    def shown(self) -> dict[str, Any]:
        """The facts with each form's parity report, as `report.page.render_terminal` takes them."""
        reports = self.version.json("parity.json")["forms"]
        forms = {name: form | {"parity": reports.get(name)} for name, form in self.facts["forms"].items()}
        return {**self.facts, "forms": forms}


def convert(
    folder: Path | ModelFolder, store: Store, options: Options | None = None, notify: Notify = lambda _: None
) -> Conversion:
    """Convert a model folder, or a model without one (`folder_at`), and publish the result, live or refused.

    Raises BadInput for a fault that the operator can correct, CannotConvert where no form can be made at all or where a
    bound of the order ends it.
    """
    what = folder.spec.name if isinstance(folder, ModelFolder) else folder
    with one_order() as order, order.bounds_this_process(f"the conversion of {what}"):
        return _converted(folder, store, options or Options(), notify)


def _converted(folder: Path | ModelFolder, store: Store, options: Options, notify: Notify) -> Conversion:
    read = folder if isinstance(folder, ModelFolder) else folder_at(folder, options.samples, options.name)
    asked = _asked(read, options)
    _check_possible(asked, options)
    store.promotions(asked.spec.name)  # raises now where the file is damaged, and not after the conversion
    folder_digest = _fingerprint(asked, replace(options, all_forms=False))
    kept = drifted_digests(store, asked.spec.name)
    newest = next(readable_versions(store, asked.spec.name), None)
    known = max(store.numbers(asked.spec.name), default=0)  # two commands may convert one folder at once
    made = (one for one in readable_versions(store, asked.spec.name) if one.manifest.get("fingerprint"))
    converted = next(made, None)
    if converted is not None and _is_of(converted, folder_digest, kept) and _holds(converted):
        _make_active_if_cut_off(converted, store, notify)
        return Conversion(converted, facts_of(converted), unchanged=True)
    origin = _origin(asked, _with_drifted(folder_digest, kept), kept)
    asked, samples = _samples(_with_source_noted(asked, newest), options, store)
    try:
        version = _made(asked, options, samples, origin, newest, known, store, notify)
    except RowsDiffer as error:
        note = f"max_batch_size is 1: {error}"
        notify(note)
        asked = replace(asked, spec=asked.spec.with_max_batch_size(1), notes=(*asked.notes, note))
        version = _made(asked, options, samples, origin, newest, known, store, notify)
    return Conversion(version, facts_of(version))


def _made(
    asked: ModelFolder,
    options: Options,
    samples: Samples,
    origin: Mapping[str, Any],
    newest: Version | None,
    known: int,
    store: Store,
    notify: Notify,
) -> Version:
    """The version, by the way of its kind."""
    if asked.spec.form == "live":
        from ..live.forms import live_subject

        check_signature(asked.spec, newest, options.new_signature)
        return travel(*live_subject(asked, samples, origin, notify), store, notify, known)
    if asked.kind == "onnx":
        return _foreign(asked, options, samples, origin, newest, known, store, notify)
    if asked.kind == "program":
        check_program(asked.folder / asked.source)
    notify(f"capturing {asked.spec.name}")
    from ..torch.forms import captured_subject

    subject, maker = captured_subject(asked, samples, origin, options.forms, options.search, options.device)
    check_signature(subject.spec, newest, options.new_signature)
    return travel(subject, maker, store, notify, known)


def _make_active_if_cut_off(version: Version, store: Store, notify: Notify) -> None:
    """A conversion that was killed, or had no room on the disk, may have published the version and no more."""
    if version.status != LIVE or version.awaits_promotion:
        return
    if was_cut_off(store.promotions(version.name), version.number, store.live_number(version.name)):
        store.promote_published(version, by="conversion")
        notify(f"{version} is made active: its conversion ended before it was")


def _origin(folder: ModelFolder, fingerprint: str, kept: Mapping[str, int]) -> dict[str, Any]:
    """The facts of the manifest that come from the model folder: the source, and the keys of its [training]; and the
    inputs that were kept (`drifted_digests`)."""
    return {
        "parent": None,
        "lineage": {"by": "convert"},
        "source": {"source": folder.source, "path": [str(path.resolve()) for path in folder.path]},
        "fingerprint": fingerprint,
        **({"drifted_inputs": dict(kept)} if kept else {}),
        "training": {
            "metrics": list(folder.metrics),
            "loss": folder.loss,
            "transform": folder.transform,
            "optimizer": folder.own_optimizer,
            "fp32_modules": list(folder.fp32_modules),
            "declared_steps": folder.declared_steps,
        },
    }


def _foreign(
    asked: ModelFolder,
    options: Options,
    samples: Samples,
    origin: Mapping[str, Any],
    newest: Version | None,
    known: int,
    store: Store,
    notify: Notify,
) -> Version:
    """Convert an ONNX file. It has one form: itself."""
    notify(f"reading {asked.source}")
    if samples.source == "generated" and any(not tensor.type.is_float for tensor in asked.spec.inputs):
        with suppress(NotPlanned):  # then it is served in FP32, with the ranges that model.toml says
            exact = read_foreign(asked.folder / asked.source, asked)[1]
            samples = in_range(samples, asked.spec, exact)

    def made(original_because: str | None) -> Version:
        def subject_of(tried: Samples, ids: tuple[int, int] | None) -> tuple[Subject, Maker]:
            why = "the file does not run with larger ones; give samples"
            note = () if ids is None else (f"all generated integers are {range_of(ids)}: {why}",)
            noted = replace(asked, notes=(*asked.notes, *note))
            return foreign_subject(noted, tried, origin, options.search, notify, original_because)

        subject, maker = with_smaller_integers(asked.spec, samples, subject_of, NotRun)
        check_signature(subject.spec, newest, options.new_signature)
        return travel(subject, maker, store, notify, known)

    try:
        return made(None)
    except (OrderEnded, RowsDiffer):
        raise  # how busy or small the machine is must not decide what serves; rows that differ are taken alone
    except CannotConvert as error:  # a node that does not run alone, though the file runs
        return made(f"it cannot be planned: {error}")


def _holds(version: Version) -> bool:
    """True if the version that was made of an unchanged model folder can be kept: none of the version's files is
    damaged, and the Python files that the model imports have not changed. Those that lie outside of the folder are not
    in the fingerprint: only running the model's code says which they are."""
    try:
        for file in version.manifest["files"]:
            version.opened(file).close()
    except DamagedFile:
        return False
    if not version.has(LIVE_FILE):
        imported = version.manifest.get("imported", {})  # a version of an earlier release has none
        return all(Path(file).is_file() and sha256_of(Path(file)) == sha for file, sha in imported.items())
    from ...models.engines.live_engine import is_current

    return is_current(version)


def readable_versions(store: Store, name: str) -> Iterator[Version]:
    """The versions, the newest first; not those whose manifest or spec is damaged, which are to be made again. Raises
    NewerFormat for a version of a later release. Fine-tuned versions have no fingerprint."""
    for number in reversed(store.numbers(name)):
        try:
            version = store.version(name, number)
            version.spec()
        except NewerFormat:
            raise
        except DamagedFile:
            continue
        yield version


def _check_possible(asked: ModelFolder, options: Options) -> None:
    """Raises BadSetting, BadInput where a model of this kind cannot be converted so."""
    if options.device != CPU and (asked.spec.form == "live" or asked.kind == "onnx"):
        raise BadSetting(
            f"--device {options.device}: expected cpu for an ONNX file and for a live model, which are proven on other "
            "devices when they are loaded there; only a captured program is planned for one"
        )
    form = "torch" if options.all_forms else "/".join(options.forms)
    if asked.kind == "onnx" and form in ("torch", "live"):
        raise BadInput(f"{asked.source} is an ONNX file: it has no {form} form; use --form onnx")


def _asked(folder: ModelFolder, options: Options) -> ModelFolder:
    """The folder with the command line's options in place of its own; keep patterns add up."""
    own = folder.precision
    level, keep = options.level or own.level, (*own.keep, *options.keep)
    dtype = options.dtype or (own.dtype if level in LEVELS else None)  # Keras' words mean a dtype too
    precision = Precision.parse(level, dtype, keep, own.embeddings, "option")
    live = "live" in options.forms or (folder.spec.form == "live" and options.forms == Options().forms)
    form = "live" if live else "auto" if folder.spec.form == "live" else folder.spec.form
    return replace(folder, precision=precision, spec=replace(folder.spec, form=form))


def _samples(folder: ModelFolder, options: Options, store: Store) -> tuple[ModelFolder, Samples]:
    """The samples that choose and judge, and the folder with notes about them."""
    folder, samples = _own_samples(folder, options)
    samples, notes = with_drifted(samples, folder.spec, store)
    if (more := samples.judging.count - MAX_JUDGED) > 0:
        notes = (*notes, f"{more} samples are left out: the first {MAX_JUDGED} of those that may judge do")
    return replace(folder, notes=(*folder.notes, *notes)), samples


def _own_samples(folder: ModelFolder, options: Options) -> tuple[ModelFolder, Samples]:
    """The samples that were given, without repetitions, else generated ones."""
    if not (path := options.samples or folder.samples):
        return folder, generate(folder.spec)
    given = _given(path, folder)
    if given.count == 0:
        raise BadInput(f"{path} holds no samples: give at least one, better a hundred")
    folder = replace(folder, notes=(*folder.notes, *given.notes))
    samples = given.distinct()
    if samples.count == given.count:
        return folder, given
    note = f"{given.count - samples.count} of {given.count} samples repeat others and are left out"
    return replace(folder, notes=(*folder.notes, note)), samples


def _given(path: Path, folder: ModelFolder) -> Samples:
    """Samples that were read; of a bare ONNX file in the layout of the file or of the guess."""
    if folder.guessed is None or folder.kind != "onnx":
        return load_samples(path, folder.spec)
    return load_samples(path, folder.spec, layout=laid_out)


def _with_source_noted(asked: ModelFolder, newest: Version | None) -> ModelFolder:
    """The folder, with a note where a bare file makes a new version of a model that was made of another file."""
    before = newest.manifest.get("source", {}).get("source") if newest is not None else None
    if asked.guessed is None or before in (None, asked.source):
        return asked
    what = f"'{asked.spec.name}' was made of {before} before and is now made of {asked.source}"
    return replace(asked, notes=(*asked.notes, f"{what}: give --name NAME where that is another model"))


def _is_of(version: Version, folder_digest: str, kept: Iterable[str]) -> bool:
    """True if the version was made of this folder and of the inputs that are ``kept``. Its own ones that are too old by
    now count among these: a version without them would drift again."""
    own = too_old(version.manifest.get("drifted_inputs", {}))
    return version.manifest["fingerprint"] == _with_drifted(folder_digest, {*kept, *own})


def _with_drifted(folder_digest: str, kept: Iterable[str]) -> str:
    """The fingerprint of a version: of the folder, and of the inputs on which a half drifted, by their names."""
    names = sorted(kept)
    return hashlib.sha256(repr((folder_digest, names)).encode()).hexdigest() if names else folder_digest


def _fingerprint(folder: ModelFolder, options: Options) -> str:
    """A digest that is equal for equal work: of the folder's bytes, the options and the libraries."""
    here = sorted(environment(options.device).items())
    given = folder.precision, folder.guessed, options, here
    digest = hashlib.sha256(repr(given).encode())
    named = [path for path in (folder.samples, options.samples, *folder.source_files) if path]
    named += (*folder.weight_files, *folder.net_weights, *_external_data(folder))
    found = (file for path in named for file in (path.rglob("*") if path.is_dir() else (path,)))
    files = {file for file in found if file.is_file()}
    if folder.guessed is None:  # what lies beside a bare file is not the model's
        counts = (*SOURCE_SUFFIXES, *(READ_BY_CODE if folder.kind == "python" else ()))
        files |= {p for p in files_of(folder.folder) if p.is_file() and p.suffix in counts}
    for path in sorted(files):
        digest.update(f"\0{path}\0{sha256_of(path)}".encode(errors="surrogateescape"))
    if labels := [tensor.labels for tensor in folder.spec.outputs if tensor.labels]:
        digest.update(repr(labels).encode(errors="surrogateescape"))  # their file may have any suffix
    return digest.hexdigest()


def _external_data(folder: ModelFolder) -> Iterable[Path]:
    """The files beside an ONNX file that hold its weights. Raises BadFolder for a file that cannot be read."""
    if folder.kind != "onnx":
        return ()
    file = folder.folder / folder.source
    return external_files(file, read_graph(file)).values()


def check_signature(spec: ModelSpec, newest: Version | None, may_change: bool = False) -> None:
    """Raises BadInput where the newest version of the model has other inputs or outputs."""
    if newest is None or may_change or not (changed := signature_change(newest.spec(), spec)):
        return
    raise BadInput(
        f"'{spec.name}' has changed its signature since {newest}, so its callers would break: {changed}; give "
        "--new-signature to publish it nevertheless, or another name (--name NAME for a bare file)"
    )


def signature_change(old: ModelSpec, new: ModelSpec) -> str:
    """Each difference of the two signatures (`ModelSpec.signature`), the old side first; empty where there is none."""
    if old.signature() == new.signature():
        return ""
    found = []
    if old.batched != new.batched:
        found.append("batched became not batched" if old.batched else "not batched became batched")
    sides = (("input", old.inputs, new.inputs), ("output", old.outputs, new.outputs))
    for kind, mine, others in sides:
        found += _changes(kind, {t.name: _shown(t) for t in mine}, {t.name: _shown(t) for t in others})
    return "; ".join(found) or "the order of inputs or outputs changed"


def _changes(kind: str, old: dict[str, str], new: dict[str, str]) -> list[str]:
    both = [name for name in old if name in new and old[name] != new[name]]
    return [
        *(f"{kind} '{name}': {old[name]} became {new[name]}" for name in both),
        *(f"{kind} '{name}' ({old[name]}) is gone" for name in old if name not in new),
        *(f"{kind} '{name}' ({new[name]}) is new" for name in new if name not in old),
    ]


def _shown(tensor: TensorSpec) -> str:
    """The tensor as callers see it on the wire: its datatype, sizes and batch axis."""
    sizes = ",".join(map(str, tensor.wire_shape))
    wire = "" if tensor.wire is None else f" as {tensor.wire}"
    axis = f", batch on axis {tensor.batch_axis}" if tensor.batch_axis else ""
    return f"{tensor.datatype} [{sizes}]{wire}{axis}"
