"""The proven half of one model as one ONNX file, with its proof in a folder beside it: no store, no server.

    model.fp16.onnx      the half
    model.fp16.data      its weights, from 2 GB on
    model.fp16.proof/    what `export` writes: original, half, samples, plan, verdict, digests (`exported/folder.py`)

Both are there together, or neither: nothing is written of a half that is not proven equal. They are made in a hidden
folder beside them, which is renamed to ``.model.fp16.ready`` when it is whole. A run that is cut off while it moves the
files to their places is ended by the next `write_half`; what only reads refuses the half until then.
"""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ...models.errors import BadInput, BadSetting, Conflict, DamagedFile, NewerFormat, ParityRefused
from ...models.files.durable import fsync, locked, remove_dead_folders, temporary_folder
from ...models.store.manifest import sha256_of, write_manifest
from ...models.store.store import LIVE, Store, Version
from ..conversion.convert import Options, convert
from ..exported.folder import export, exported_version
from ..exported.onnx_pair import HALF, ORIGINAL
from ..exported.other_engine import onnx_file, prove_engine
from ..guessing.given_samples import judging_samples
from ..on_device.environment import environment
from ..onnx.reading.bounded_file import external_files, read_graph
from ..onnx.reading.large_files import DATA
from ..proof.maker import Notify
from ..proof.subject import CPU
from ..report.headline import headline
from .around_custom import AroundCustom, around_custom
from .half_metadata import correct_page, describe, digest_of_facts

Verdict = Literal["equal", "fp32", "refused"]
EQUAL: Verdict = "equal"
FP32: Verdict = "fp32"
REFUSED: Verdict = "refused"
# Limits beyond these prove nothing, whatever a proof says.
WIDEST_U, LOWEST_DB, LARGEST_SHARE = 64.0, 10.0, 0.5
# Folders of one run alone; those of a run that was killed go with the next one.
_TEMPORARY = ".halfeven-fp16-"
_FORMER = "former.proof"  # in the hidden folder: the proof that another takes the place of
_AGAIN = "write it again from the model (halfeven fp16)"


def proof_folder(file: Path) -> Path:
    """The folder of a half's proof: ``model.fp16.proof`` beside ``model.fp16.onnx``."""
    return file.with_suffix(".proof")


def proof_of(file: Path) -> Version:
    """The proof of a half, as a version. The file itself may be another one by now.

    Raises BadInput, ParityRefused where the proof's manifest is missing or damaged."""
    if file.name and _ready(file).is_dir():
        raise BadInput(
            f"{file} is not whole: a run of `halfeven fp16` ended before it had put its files from {_ready(file)} in "
            "their places; run it again, which does that first, or remove that folder"
        )
    if not file.is_file():
        raise BadInput(f"{file}: no such file; expected a half that `halfeven fp16` wrote")
    proof = proof_folder(file)
    if not proof.is_dir():
        raise BadInput(
            f"{file} has no proof: expected the folder {proof}, which `halfeven fp16` writes beside it"
        )
    try:
        return exported_version(proof)
    except NewerFormat:
        raise
    except DamagedFile as error:
        raise ParityRefused(f"the proof of {file} does not hold: {error}") from error


def verdict_of(version: Version) -> Verdict:
    """``equal``: a half is proven; ``fp32``: nothing is half, ``reason`` says why; ``refused``: no half passed."""
    if version.status != LIVE:
        return REFUSED
    return FP32 if version.manifest["half"] is None else EQUAL


def write_half(
    source: Path, target: Path, options: Options | None = None, notify: Notify = lambda _: None
) -> dict[str, Any]:
    """Convert ``source`` (an ONNX file, or what else `convert` takes), and write its proven half as ``target``.

    Gives the facts of the conversion, as `report.page.render_terminal` takes them, with ``verdict``, ``file`` and
    ``proof`` (None where none was written). A half and a proof of an earlier run are replaced.
    Raises Conflict where something else stands there, and as `convert` and `export` do.
    """
    if target.suffix != ".onnx":
        raise BadSetting(f"-o {str(target)!r}: expected a name that ends with .onnx")
    _check(source, target)
    with _alone(target):
        _check_replaced(target)
        if source.exists():  # else `convert` says so, and nothing is moved
            _finish(target)
    shared = Path(tempfile.gettempdir())
    for place in (shared, target.parent):
        remove_dead_folders(place.glob(f"{_TEMPORARY}*"))
    with temporary_folder(shared, _TEMPORARY) as place:
        asked = replace(options or Options(), forms=("onnx",))
        around = around_custom(source, asked.samples, asked.name, place / "cut")
        asked = replace(asked, samples=around.samples) if around else asked
        done = convert(around.folder if around else source, Store(place / "store"), asked, notify)
        facts = {**done.shown(), "verdict": verdict_of(done.version), "file": None, "proof": None}
        facts |= {"around": around.facts()} if around else {}
        if facts["verdict"] == EQUAL:
            _check_limits(done.version)
            facts |= _written(done.version, source, target, around, notify)
    return facts


def _check(source: Path, target: Path) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise BadSetting(f"-o {target} is the model itself; give another name: it is never overwritten")
    if not target.parent.is_dir():
        raise BadSetting(f"-o {target}: there is no folder {target.parent}; make it first")
    try:
        str(target.resolve()).encode()
    except UnicodeEncodeError:
        raise BadSetting(
            f"-o {str(target)!r}: expected a name in UTF-8, as ONNX Runtime does, also of each folder above it"
        ) from None
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise BadSetting(f"-o {target}: expected a file in a folder that may be written")


def _check_replaced(target: Path) -> None:
    """Raises Conflict where what stands in the places of a half and its proof is not of an earlier run."""
    ours = [*_digests(proof_folder(target)), *_digests(_ready(target) / proof_folder(target).name)]
    for path, name in ((target, HALF), (data := target.with_suffix(DATA), data.name)):
        if path.exists() and not (path.is_file() and (name, sha256_of(path)) in ours):
            raise Conflict(
                f"{path} is no half of an earlier run, so it is not replaced; move it, or give another -o"
            )
    for folder in (proof_folder(target), _ready(target)):
        if folder.is_symlink():
            raise Conflict(f"{folder} is a symbolic link, which is not replaced: move it, or give another -o")
    _check_proof_replaced(proof_folder(target))


def _check_proof_replaced(proof: Path) -> None:
    if proof.exists() and not (proof.is_dir() and not any(proof.iterdir())):
        try:
            version = exported_version(proof)
        except (BadInput, DamagedFile) as error:
            raise Conflict(
                f"{proof} is no proof of an earlier run, so it is not replaced: {error}; move it, or give another -o"
            ) from error
        if others := no_part_of(version):
            raise Conflict(
                f"{others[0]} is no part of the proof, which is replaced: move it, or give another -o"
            )


def no_part_of(version: Version) -> list[Path]:
    """The files in the folder of a proof that the proof does not name."""
    known = {*version.manifest["files"], "manifest.json"}
    return sorted(path for path in version.folder.iterdir() if path.name not in known)


def _digests(proof: Path) -> Collection[tuple[str, str]]:
    """The names and digests of the files that a proof names; nothing where there is no proof."""
    try:
        return exported_version(proof).manifest["files"].items()
    except (BadInput, DamagedFile):
        return ()


def _written(
    version: Version, source: Path, target: Path, around: AroundCustom | None, notify: Notify
) -> dict[str, Any]:
    """Write both; gives their paths and the digest of the file."""
    with temporary_folder(target.parent, _TEMPORARY) as place:
        draft = place / "whole" / proof_folder(target).name
        facts = export(version, "onnxruntime", draft, notify)
        data = target.with_suffix(DATA).name  # of a large half alone; two halves may stand in one folder
        stated = {key: value for key, value in facts.items() if key not in ("folder", "files")}
        if source.is_file():
            stated["source"] = {"name": source.name, "sha256": sha256_of(source)}
        if around:
            stated["around"] = around.facts()
        correct_page(draft / "README.md", stated)
        describe(draft, version, source, data, stated, around)
        (draft / "manifest.json").unlink()
        write_manifest(draft, LIVE, stated)
        for name, copied in ((HALF, target.name), (data, data)):
            if (draft / name).exists():
                shutil.copyfile(draft / name, draft.with_name(copied))
                fsync(draft.with_name(copied))
        with _alone(target):
            draft.parent.rename(_ready(target))
            _finish(target)
            return {"file": str(target), "proof": str(proof_folder(target)), "digest": sha256_of(target)}


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the lock of the folder: of two runs on one target each moves its files to their places for itself."""
    with ExitStack() as held:
        with suppress(OSError):  # NFS locks no folder
            held.enter_context(locked(target.parent))
        yield


def _ready(target: Path) -> Path:
    return target.with_name(f".{target.stem}.ready")


def _finish(target: Path) -> None:
    """Move the files of a half that is whole to their places; nothing where there is none. Raises Conflict where other
    files are among them, and as `_check_replaced`.

    The proof comes last and the former one goes whole: wherever the process ends, each file is one that a proof names.
    """
    ready, proof = _ready(target), proof_folder(target)
    if not ready.is_dir():
        return
    data = target.with_suffix(DATA)
    files = {target.name, data.name}
    ours = {*files, proof.name, _FORMER}
    if others := sorted(path.name for path in ready.iterdir() if path.name not in ours):
        raise Conflict(
            f"{ready / others[0]} is no part of a half: expected {', '.join(sorted(ours))} alone, which a run of "
            "`halfeven fp16` had ready when it was ended; remove that folder"
        )
    _check_replaced(target)
    for path in [path for path in ready.iterdir() if path.name in files]:
        path.replace(target.with_name(path.name))
    if (ready / proof.name).is_dir():
        if data.name not in dict(_digests(ready / proof.name)):
            data.unlink(missing_ok=True)
        if proof.exists():
            proof.rename(ready / _FORMER)
        (ready / proof.name).rename(proof)
    shutil.rmtree(ready)


def verify(file: Path, samples: Path | None = None, notify: Notify = lambda _: None) -> dict[str, Any]:
    """Hold ``file`` and its proof against the digests of the proof, and prove the half again under the ONNX Runtime
    that is installed now, and with true half storage; gives the facts of `exported.other_engine.prove_engine`.

    ``samples``: judge with these instead of those of the proof. Raises BadInput where there is no proof beside the
    file, ParityRefused where a file is not the one that was proven.
    """
    version = proof_of(file)
    check_digests(file, version)
    spec = version.spec()
    judging = judging_samples(version, samples).distinct()
    proven = prove_engine(version, judging, onnx_file(file, spec), notify)
    return {"file": str(file), "proof": str(version.folder), "digests": "as proven"} | dict[str, Any](proven)


def check_digests(file: Path, version: Version) -> None:
    """Hold a half and its proof against the digests of the proof, and what each says of the other. Raises
    ParityRefused."""
    for name, path in _held(file):
        _check_digest(version, name, path)  # of the half before it is read for the name of its weights
    check_proof(version)
    said = {each.key: each.value for each in read_graph(file).metadata_props}
    for key, name in (("halfeven.original", ORIGINAL), ("halfeven.proof", "parity.json")):
        if said.get(key) != version.manifest["files"].get(name):
            raise ParityRefused(f"{file} names another {name} as its own than that of its proof; {_AGAIN}")
    stated = {name: digest for name, digest in version.manifest["files"].items() if name != HALF}
    if said.get("halfeven.facts") != digest_of_facts(version.manifest, stated):
        raise ParityRefused(
            f"{version.folder / 'manifest.json'} states other facts, or names other files, than the half does; {_AGAIN}"
        )


def check_proof(version: Version) -> None:
    """Hold the folder of a proof against its digests, and its verdict against its manifest. Raises ParityRefused."""
    for name in version.manifest["files"]:
        _check_digest(version, name, version.folder / name)
    if others := no_part_of(version):
        raise ParityRefused(
            f"{others[0]} is no part of the proof: expected what `halfeven fp16` wrote alone; move it"
        )
    manifest = version.folder / "manifest.json"
    if version.status != LIVE:
        raise ParityRefused(f"{manifest} says that the half is {version.status}: expected {LIVE}; {_AGAIN}")
    dtype = _check_limits(version)
    if dtype != version.manifest["half"]:
        raise ParityRefused(
            f"{manifest} says that the half is {version.manifest['half']}, and it was proven as {dtype}; {_AGAIN}"
        )


def _check_limits(version: Version) -> str:
    """The type in which a half was proven. Raises ParityRefused where the limits are so wide that nothing is proven."""
    dtype, limits = version.read("parity.json", lambda proof: _judged_by(proof["forms"]["onnx"]))
    spec = version.spec().parity
    least = (
        spec.min_slice_sqnr_db if spec.min_sqnr_db is None else min(spec.min_slice_sqnr_db, spec.min_sqnr_db)
    )
    for widest, lowest in (*limits, (spec.max_error_u, least)):
        if not (widest <= WIDEST_U and lowest >= LOWEST_DB):
            raise ParityRefused(
                f"the proof allows errors of {widest:g}u and a signal to noise of {lowest:g} dB, which proves nothing: "
                f"expected at most {WIDEST_U:g}u, and at least {LOWEST_DB:g} dB ([parity] in model.toml); {_AGAIN}"
            )
    shares = {name: getattr(spec, name) for name in ("max_flips", "max_kl_nats", "max_ties", "max_swaps")}
    for name, share in (shares | {"1 - min_top10_overlap": 1 - spec.min_top10_overlap}).items():
        if not share <= LARGEST_SHARE:
            raise ParityRefused(
                f"the proof has {name} = {share:g}, which proves nothing: expected at most {LARGEST_SHARE:g} ([parity] "
                f"in model.toml); {_AGAIN}"
            )
    return dtype


def _judged_by(form: Mapping[str, Any]) -> tuple[str, list[tuple[float, float]]]:
    """The half, and of each output the error in u and the decibels that it was held against."""
    keys = ("limit_u", "min_sqnr_db", "min_slice_sqnr_db")
    found = (tuple(float(output[key]) for key in keys) for output in form["outputs"])
    return form["dtype"], [(widest, min(pooled, of_slice)) for widest, pooled, of_slice in found]


def _check_digest(version: Version, name: str, path: Path) -> None:
    expected = version.manifest["files"].get(name)
    if not path.is_file() or sha256_of(path) != expected:
        raise ParityRefused(
            f"{path} is not the file that was proven: expected the SHA-256 {expected}; {_AGAIN}"
        )


def _held(file: Path) -> Iterator[tuple[str, Path]]:
    """The half, and its file of weights beside it, with their names in the proof."""
    yield HALF, file
    yield from external_files(file, read_graph(file)).items()


def model_card(file: Path, facts: Mapping[str, Any]) -> str:
    """``facts``: of the proof, as `half_file.verify` gave them here and now."""
    version = proof_of(file)
    level, kept = version.read(
        "precision.json", lambda plan: (plan["level"], [f"`{node['node']}`" for node in plan["kept"]])
    )
    (form,) = facts["forms"].values()
    more = f", … ({len(kept)} in all)" if len(kept) > 10 else ""
    source = version.manifest.get("source") or {}
    rows = {
        "verdict": headline(facts),
        "largest error": ", ".join(
            f"`{output['name']}` {output['max_error_u']:.3g}u of {output['limit_u']:.3g}u"
            for output in form["parity"]["outputs"]
            if output["max_error_u"] is not None
        ),
        "precision": f"{facts['half']}, level {level}",
        "kept in FP32 by the proof": ", ".join(kept[:10]) + more or "nothing",
        "file": f"`{file.name}`, SHA-256 `{sha256_of(file)}`",
        **(
            {"made from": f"`{source['name']}`, SHA-256 `{source['sha256']}`"}
            if {"name", "sha256"} <= source.keys()
            else {}
        ),
        "original in the proof": f"SHA-256 `{version.manifest['files']['original.onnx']}`",
        "proven with": _listed(environment(CPU)),
        "first proven with": _listed(version.read("parity.json", lambda proof: dict(proof["environment"]))),
    }
    lines = ["## Half precision", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {said.replace('|', '/')} |" for name, said in rows.items()]
    return "\n".join(
        [
            *lines,
            "",
            f"Check it again with `halfeven verify {file.name}` (the folder `{version.folder.name}`).",
        ]
    )


def _listed(libraries: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {found}" for name, found in libraries.items())
