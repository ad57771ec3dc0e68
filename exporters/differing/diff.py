"""``halfeven diff A B``: both run side by side, and the first tensor that differs, with its node as a reproduction."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...models.errors import BadFolder, BadInput, BadSamples
from ...models.files.durable import new_folder
from ...models.folder.package import read_folder
from ...models.spec.spec import UNIT_ROUNDOFF
from ...models.store.store import Version
from ..exported.file_rows import write_npz
from ..guessing.bare import TOML, absolute, folder_at, guess_at, guessed_folder
from ..guessing.guess import name_for
from ..inputs.samples import TARGET, read_tensors
from ..question import Answers, Arrays
from .first_difference import before, compared
from .onnx_side import OnnxSide
from .tensor_error import parts_of
from .units import FP32

if TYPE_CHECKING:
    from .first_difference import Compared, Side


ROWS = 4  # of the samples that both are asked at once
DTYPES = {"fp32": FP32, **UNIT_ROUNDOFF}


def side_of(target: Path | Version, samples: Path, half: bool = False, python: Path | None = None) -> "Side":
    """An ONNX file, a program that is captured (a .pt2 file, a model folder, ``model.py:build``), or a version: its
    half or its original. ``python``: of another environment, whose libraries run it. Raises as `capture`, and BadInput.
    """
    if isinstance(target, Path):
        if target.suffix == ".onnx":
            return OnnxSide(target, python)
        if ".py:" in target.name:  # a module file and its function
            folder = guessed_folder(guess_at(str(target), _arrays(samples)), target.parent)
        else:
            folder = folder_at(target, samples)
        if folder.kind == "onnx":
            return OnnxSide(folder.folder / folder.source, python)
        from .program_side import captured_side  # brings torch, which files do not need

        return captured_side(folder, _arrays(samples), python)
    name = "half" if half else "original"
    if target.has(f"{name}.pt2"):
        from .program_side import stored_side

        return stored_side(target, half, python)
    if not target.has(f"{name}.onnx"):
        raise BadInput(f"{target} has no {name} as a file whose tensors could be seen")
    return OnnxSide(target.folder / f"{name}.onnx", python)


def published_name(target: Path | Version, a: "Side") -> str:
    """The name that `convert` publishes the model under. ``a``: its side."""
    if isinstance(target, Version):
        return target.name
    if not isinstance(a, OnnxSide):
        return a.spec.name
    place = a.path.parent
    folder = read_folder(place) if (place / TOML).is_file() else None
    return folder.spec.name if folder and folder.source == a.path.name else name_for(absolute(a.path))


def differences(
    a: "Side", theirs: "Side | Answers", samples: Path, dtype: str | None = None, out: Path | None = None
) -> dict[str, Any]:
    """The facts: how many tensors both have, how many of them differ, and the first; the nearest tensors before it that
    ``agree``, and how many tensors between are ``hidden``, because B does not have them.

    ``a``: the side that is right. ``theirs``: another, or an engine, of which the outputs are compared, and inner
    tensors where it gives them by A's names. ``dtype``: what B is to compute in, whatever its own types are; None: what
    they are (of an engine FP32). ``out``: a new folder for the reproduction. Raises BadSamples, BadInput where both
    have no tensor in common, NotRun.
    """
    facts, answered = dict[str, Any](), False
    for inputs in _batches(a, samples):
        answers, units = _answers(a, theirs, inputs, dtype)
        found = compared(a, inputs, answers, units)
        if not found.tensors:
            raise BadInput(
                f"A and B have no tensor with the same name: A makes {[n.name for n in a.nodes][-3:]}, …"
            )
        facts = {"equal": found.first is None, "tensors": found.tensors, "astray": found.astray}
        facts |= {"first": found.first and found.first.to_json(), "reproduction": None, "not_written": None}
        facts |= {"agree": [], "hidden": 0}
        answered = answered or any(map(_has_answers, found.values.values()))
        if found.first is None:
            continue
        facts["agree"], facts["hidden"] = before(a, found.first.tensor, answers)
        if out is not None:
            facts |= _reproduced(a, found, answers, found.first.tensor, out)
        break
    if facts["equal"] and not answered:
        raise BadSamples(
            f"{samples.name}: every tensor of A is 0 or not finite for these samples, so nothing is compared; give "
            "samples that it has answers to"
        )
    return facts


def _reproduced(a: "Side", found: "Compared", answers: Arrays, tensor: str, out: Path) -> dict[str, str]:
    """Write the node that differs, and give its folder; or the reason why it cannot be written alone."""
    try:
        with new_folder(out) as folder:
            a.reproduction(tensor, found.read, folder)
            write_npz(folder / "found.npz", {"a": found.values[tensor], "b": answers[tensor]})
    except BadFolder as error:
        return {"not_written": str(error)}
    return {"reproduction": str(out)}


def _has_answers(array: np.ndarray) -> bool:
    """True for a tensor of whole numbers, and for one with a finite number other than 0."""
    if array.dtype.kind not in "fcV":
        return True
    parts = parts_of(array)
    return bool((np.isfinite(parts) & (parts != 0)).any())


def _arrays(samples: Path) -> dict[str, np.ndarray]:
    """The inputs of a file of samples. Raises BadSamples."""
    arrays = {name: array for name, array in read_tensors(samples).items() if not name.startswith(TARGET)}
    if not arrays:
        raise BadSamples(f"{samples.name}: expected an array for each input of A, got none")
    if alone := [name for name, array in arrays.items() if array.ndim == 0 or not len(array)]:
        raise BadSamples(f"{samples.name}: '{alone[0]}' has no samples: expected them along axis 0")
    return arrays


def _batches(a: "Side", samples: Path) -> Iterator[Arrays]:
    """The first rows, and as many from the end where there are more: an engine may answer from the first batch. A side
    that takes fewer rows at once is asked for them in several batches."""
    arrays = _arrays(samples)
    first = a.rows(arrays, ROWS)
    if not first:
        raise BadSamples(f"{samples.name}: expected the inputs {list(a.inputs)} of A, got {sorted(arrays)}")
    yield first
    asked = {name: arrays[name] for name in first}
    for start in _starts(first, asked)[1:]:
        yield a.rows({name: array[start:] for name, array in asked.items()}, ROWS)


def _starts(first: Arrays, asked: Arrays) -> list[int]:
    """The places at which the batches begin: each has as many rows as ``first``, which is one without their axis."""
    count = min(map(len, asked.values()))
    taken = min(len(rows) if rows.ndim == asked[name].ndim else 1 for name, rows in first.items())
    last, ends = max(count - taken, 0), max(count - ROWS, 0)
    steps = range(0, ROWS, taken)
    return sorted({min(start, last) for step in steps for start in (step, ends + step)})


def _answers(
    a: "Side", theirs: "Side | Answers", inputs: Arrays, dtype: str | None
) -> tuple[Arrays, Mapping[str, float]]:
    """B's tensors by A's names, and the roundoff of each."""
    if not callable(theirs):
        pairs = partners(a, theirs)
        made = theirs.tensors(inputs)
        units = theirs.units(made, set(pairs.values()))
        missing = {name: np.zeros(0) for name in a.outputs.values() if name not in pairs}
        answers = missing | {name: made[other] for name, other in pairs.items() if other in made}
        units = dict.fromkeys(missing, FP32) | {n: units.get(other, FP32) for n, other in pairs.items()}
    else:
        came = {name: np.asarray(array) for name, array in theirs(inputs).items()}
        missing = {name: np.zeros(0) for name in a.outputs if came.keys() & a.outputs.keys()}
        answers = {a.outputs.get(name, name): array for name, array in (missing | came).items()}
        units = dict.fromkeys(answers, FP32)
    return answers, units if dtype is None else dict.fromkeys(answers, DTYPES[dtype])


def partners(a: "Side", b: "Side") -> dict[str, str]:
    """Maps tensors of A to tensors of B: in two programs, results of the same operation in the same order between reads
    of the same weights; otherwise tensors of the same name. Outputs correspond by their names, and those whose name
    one side alone has by their order, where both have as many."""
    if a.steps and b.steps:
        found = _in_order(a, b)
    else:
        theirs = {node.name for node in b.nodes}
        found = {node.name: node.name for node in a.nodes if node.name in theirs}
    shared = a.outputs.keys() & b.outputs.keys()
    ours, others = ([tensor for name, tensor in one.outputs.items() if name not in shared] for one in (a, b))
    if len(ours) == len(others):
        found |= dict(zip(ours, others, strict=True))
    return found | {a.outputs[name]: b.outputs[name] for name in shared}


def _in_order(a: "Side", b: "Side") -> dict[str, str]:
    weights = _weights(a) & _weights(b)
    keys = [_keys(side, weights) for side in (a, b)]
    blocks = SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    return {
        a.steps[block.a + place][0]: b.steps[block.b + place][0]
        for block in blocks
        for place in range(block.size)
    }


def _weights(side: "Side") -> frozenset[str]:
    return frozenset[str]().union(*(weights for _, _, weights in side.steps))


def _keys(side: "Side", known: frozenset[str]) -> Sequence[tuple[str, frozenset[str]]]:
    """Each operation with the last weights that were read: layers that are alike are told apart by them."""
    found, last = list[tuple[str, frozenset[str]]](), frozenset[str]()
    for _, op, weights in side.steps:
        last = weights & known or last
        found.append((op, last))
    return found
