"""Inputs of live traffic on which a half was further from its original than its limit allows.

<store>/models/<name>/drifted-inputs/<digest>.safetensors   one input, laid out as a sample

A server writes them where its operator asks for it: they are callers' data. The next conversion of the model, and the
next ``halfeven parity``, judge with them too. Whoever reads or writes them deletes those that are older than
`KEPT_DAYS`.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.numpy

from ...models.errors import BadInput, BadSamples
from ...models.files.durable import PRIVATE, replace_bytes
from ...models.files.opened_file import opened_named
from ...models.spec.spec import ModelSpec
from ...models.store.store import Store
from .samples import Samples, checked_samples, digests, read_tensors

KEPT_DAYS = 30
MOST_BYTES = 64 << 20  # of all files of a model
FOLDER = "drifted-inputs"


def keep_input(store: Store, name: str, arrays: Mapping[str, np.ndarray], most: int) -> bool:
    """Keep one input (axis 0 of each array has length 1) unless ``most`` are there already, or their bytes are too
    many. True if it is there afterwards. Durable when this returns. Raises OSError."""
    data = safetensors.numpy.save({key: np.ascontiguousarray(array) for key, array in arrays.items()})
    folder = folder_of(store, name)
    path = folder / f"{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
    there = _files(folder)
    if path in there:
        return True
    if len(there) >= most or sum(file.stat().st_size for file in there) + len(data) > MOST_BYTES:
        return False
    folder.mkdir(exist_ok=True)
    replace_bytes(path, data, PRIVATE)
    return True


def with_drifted(samples: Samples, spec: ModelSpec, store: Store) -> tuple[Samples, tuple[str, ...]]:
    """The inputs that fit the samples and are not among them, followed by the samples, and a note for the report. The
    first input judges, the second one chooses the plan, and so on (`Samples.split`)."""
    others, note = _others(samples, spec, store)
    return _joined(others, samples), note


def judging_with_drifted(samples: Samples, spec: ModelSpec, store: Store) -> tuple[Samples, tuple[str, ...]]:
    """The inputs and samples that judge a version again, by whose ``samples`` it was judged: the inputs that are not
    among these, and their judging part. The note is that of `with_drifted`."""
    others, note = _others(samples, spec, store)
    return replace(_joined(others, samples.judging), all_judge=True), note


def drawn_again(samples: Samples, drawn: Samples) -> Samples:
    """Other generated samples in the place of those of ``samples``, whose inputs of live traffic stay in front as far
    as they have their sizes."""
    rows = samples.take(slice(0, samples.drifted))
    fits = all(rows.arrays[name].shape[1:] == array.shape[1:] for name, array in drawn.arrays.items())
    return _joined([rows.take(slice(row, row + 1)) for row in range(rows.count)], drawn) if fits else drawn


def hand_over(path: Path, model: Path) -> None:
    """Give a file with such inputs to the user whose server keeps them in the ``model``'s folder: that server has to
    read it. Only root can."""
    with suppress(OSError):
        owner = (model / FOLDER).stat()
        os.chown(path, owner.st_uid, owner.st_gid)


def drifted_digests(store: Store, name: str) -> dict[str, int]:
    """Names the inputs that are kept, each with the second in which it was: other ones make another conversion. Raises
    BadInput where they cannot be listed."""
    return {path.stem: int(kept_s) for path, kept_s in _files(folder_of(store, name)).items()}


def too_old(kept: Mapping[str, int]) -> set[str]:
    """The names among `drifted_digests`, as they were once, of inputs that are not used any more."""
    return {name for name, kept_s in kept.items() if kept_s < _oldest_s()}


def folder_of(store: Store, name: str) -> Path:
    return store.root / "models" / name / FOLDER


def _others(samples: Samples, spec: ModelSpec, store: Store) -> tuple[list[Samples], tuple[str, ...]]:
    """The inputs that fit the samples and are not among them, and a note on all that are kept."""
    kept, other = list[Samples](), 0
    for path in filter(_is_there, _files(folder_of(store, spec.name))):
        try:
            one = checked_samples(read_tensors(path), spec)
        except BadSamples:
            other += 1
            continue
        fits = all(one.arrays[name].shape[1:] == array.shape[1:] for name, array in samples.arrays.items())
        kept += [one] if fits else []
        other += not fits
    classes = {tensor.name for tensor in spec.outputs if tensor.kind in ("logits", "probabilities")}
    if kept and not samples.targets.keys() <= classes:
        kept, other = [], other + len(kept)  # nobody knows their targets; classes alone can be left open
    if not kept and not other:
        return [], ()
    left_out = f", {other} left out, since they do not fit" if other else ""
    note = f"inputs of live traffic on which a half drifted: {len(kept)} among the samples{left_out}"
    known = set(_digests(samples, samples.arrays))
    return [one for one in kept if known.isdisjoint(_digests(one, samples.arrays))], (note,)


def _digests(samples: Samples, names: Iterable[str]) -> Iterator[bytes]:
    return digests([samples.arrays[name] for name in names])


def _joined(kept: list[Samples], samples: Samples) -> Samples:
    if not kept:
        return samples
    arrays = {
        name: np.concatenate([*(one.arrays[name] for one in kept), array])
        for name, array in samples.arrays.items()
    }
    targets = {  # INT64: an unsigned datatype has no −1
        name: np.concatenate([np.full((len(kept), *target.shape[1:]), -1), target.astype(np.int64)])
        for name, target in samples.targets.items()
    }
    return Samples(arrays, targets, samples.source, samples.notes, drifted=len(kept) + samples.drifted)


def _files(folder: Path) -> dict[Path, float]:
    """The files that are not too old, in the order of their names, and when each was written; the others are deleted.
    Raises BadInput where the folder cannot be listed."""
    found = dict[Path, float]()
    for path in _listed(folder):
        try:
            if (written_s := path.stat().st_mtime) >= _oldest_s():
                found[path] = written_s
            else:
                path.unlink(missing_ok=True)
        except OSError:
            continue  # deleted meanwhile, or not ours to delete
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(folder, error) from error


def _oldest_s() -> float:
    return time.time() - KEPT_DAYS * 86400


def _is_there(path: Path) -> bool:
    """False for a file that was deleted meanwhile. Raises BadInput for one that this user may not read."""
    try:
        opened_named(path).close()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(
        f"{path} cannot be read ({error.strerror}): inputs on which a half drifted are to judge the next one; run this "
        "as the user of the server that keeps them, or delete them"
    )
