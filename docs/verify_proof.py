"""Verify the proof of a half that `halfeven fp16` wrote, without halfeven, torch or ONNX Runtime: numpy and onnx alone.

    python verify_proof.py model.fp16.onnx

It recomputes every digest, runs the half and original.onnx on the rows of the proof with the reference implementation
of ONNX (each node of half is computed in FP32 and rounded once), and holds the half's answers against those of
original.onnx, and those in the proof, by the gate's rules about sentinels, masks, integers and errors
(docs/precision.md). Exit code 0: verified; 3: not. It says nothing of the rules
about decisions and order. It is stricter than the gate in two things, and may refuse an honest proof for them: a slice
that FP32 itself holds to less than 40 dB is judged too, for a proof does not have FP32's own noise; and of the numbers
behind a step at most 1 in 100 may lie on its other side, also where `max_flips` is larger.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

SENTINEL, LANDS = 1e9, 1e4
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
# Limits beyond these prove nothing, whatever the proof says.
WIDEST_U, LOWEST_DB, MOST_TIED, MOST_STEPPED = 64.0, 10.0, 0.5, 0.01
FAINT, DUST, MOST_SLICES = 4.0, 2.0**-20, 4096
Arrays = Mapping[str, np.ndarray]


class Refused(Exception):
    """The proof does not hold: the sentence says why."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_facts(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_digests(half: Path, proof: Path) -> Mapping[str, Any]:
    """The manifest of the proof, after every file was found as it says."""
    manifest = json.loads((proof / "manifest.json").read_text())
    if manifest.get("format") != 2:
        raise Refused(f"the manifest has format {manifest.get('format')!r:.40}, and this verifier knows 2")
    files: Mapping[str, str] = manifest["files"]
    text = "".join(f"{name}\0{digest}\n" for name, digest in files.items())
    if hashlib.sha256(text.encode()).hexdigest() != manifest["digest"]:
        raise Refused("the manifest's digest is not that of its files")
    if outside := [name for name in files if name == ".." or name != Path(name).name]:
        raise Refused(f"the manifest names {outside[0]!r:.80}, which is no file of the proof's folder")
    for name, path in [(name, proof / name) for name in files] + [("half.onnx", half)]:
        if not path.is_file() or sha256(path) != files[name]:
            raise Refused(f"{path} is not the file that was proven")
    extra = sorted(path.name for path in proof.iterdir() if path.name not in {*files, "manifest.json"})
    if extra:
        raise Refused(f"{extra[0]} is no part of the proof")
    model = onnx.load(half, load_external_data=False)
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    for name in {entry.value for entry in entries if entry.key == "location"}:
        if sha256(half.with_name(name)) != files.get(name):
            raise Refused(f"{half.with_name(name)} is not the file that was proven")
    said = {each.key: each.value for each in model.metadata_props}
    for key, name in (("halfeven.original", "original.onnx"), ("halfeven.proof", "parity.json")):
        if said.get(key) != files[name]:
            raise Refused(f"the half names another {name} as its own")
    own = {"format", "status", "digest", "files", "created", "exported"}
    stated = {key: manifest[key] for key in manifest if key not in own}
    others = {name: files[name] for name in files if name != "half.onnx"}
    if said.get("halfeven.facts") != digest_of_facts(stated | {"files": others}):
        raise Refused("the manifest states other facts, or names other files, than the half does")
    if manifest["status"] != "live" or manifest["half"] not in ROUNDOFF:
        raise Refused("the proof is of a refused version, or of no half")
    return manifest


class Model:
    """An ONNX file run node by node: half inputs are widened, and what a node of half gives is rounded once."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path)
        self.graph = model.graph
        for one in (*model.opset_import, *self.graph.node):
            one.domain = "" if one.domain == "ai.onnx" else one.domain  # two names of one domain
        self.opsets = {one.domain: one.version for one in model.opset_import}
        self.constants = {each.name: numpy_helper.to_array(each) for each in self.graph.initializer}
        self.kernels = dict[int, ReferenceEvaluator]()
        said = {each.key: each.value for each in model.metadata_props}
        self.has_own_layout = said.get("halfeven.layout") == "own"

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        values = {"": np.zeros(0), **self.constants, **inputs}
        for place, node in enumerate(self.graph.node):
            # An output that is left out has no name, and no array comes for it.
            named = filter(None, node.output)
            values.update(zip(named, self._run(place, node, values), strict=True))
        return {value.name: values[value.name] for value in self.graph.output}

    def _run(self, place: int, node: NodeProto, values: Arrays) -> list[np.ndarray]:
        if any(each.HasField("g") for each in node.attribute):
            raise Refused(f"this verifier does not run {node.op_type} '{node.name}', which has a body")
        try:
            return self._computed(place, node, values)
        except Exception as error:  # onnx's evaluator lacks operations, and raises several kinds
            raise Refused(
                f"this verifier does not run {node.op_type} '{node.name}': {error!r:.200}"
            ) from error

    def _computed(self, place: int, node: NodeProto, values: Arrays) -> list[np.ndarray]:
        given = {name: values[name] for name in node.input if name}
        half = {
            array.dtype for array in given.values() if array.dtype.itemsize == 2 and array.dtype.kind in "fV"
        }
        if node.op_type in ("Cast", "CastLike") or not half:
            return [np.asarray(one) for one in self._kernel(place, node, given).run(None, given)]
        (short,) = half
        wide = {
            name: array.astype(np.float32) if array.dtype == short else array for name, array in given.items()
        }
        found = (np.asarray(one) for one in self._kernel(place, node, wide).run(None, wide))
        return [one.astype(short) if one.dtype == np.float32 else one for one in found]

    def _kernel(self, place: int, node: NodeProto, given: Arrays) -> ReferenceEvaluator:
        """The node as a model of its own: some operations are functions that depend on the types of their inputs."""
        if place not in self.kernels:
            types = {name: numpy_helper.from_array(array).data_type for name, array in given.items()}
            inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()]
            outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
            opsets = [helper.make_opsetid(domain, version) for domain, version in self.opsets.items()]
            graph = helper.make_graph([node], "node", inputs, outputs)
            self.kernels[place] = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets))
        return self.kernels[place]


def batches(inputs: Arrays, most: int) -> Iterator[Arrays]:
    """The rows, as many at a time as the model takes; one without a batch axis of a model that is not batched."""
    for start in range(0, min(map(len, inputs.values())), most or 1):
        rows = slice(start, start + most) if most else (start, ...)  # an array also of a scalar input
        yield {name: array[rows] for name, array in inputs.items()}


def answers_of(path: Path, spec: Mapping[str, Any], inputs: Arrays) -> dict[str, list[np.ndarray]]:
    """The answers of an ONNX file to the rows, by the names of the outputs in the spec."""
    run, found = Model(path), dict[str, list[np.ndarray]]()
    tensors = (*spec["inputs"], *spec["outputs"]) if run.has_own_layout else ()
    axes = {each["name"]: each["batch_axis"] for each in tensors if each.get("batch_axis")}
    own = [each["name"] for each in spec["outputs"]]
    names = dict(zip((value.name for value in run.graph.output), own, strict=True))
    for batch in batches(inputs, spec["max_batch_size"]):
        batch = {
            name: np.moveaxis(array, 0, axes.get(name, 0)) if axes else array for name, array in batch.items()
        }
        for name, array in run(batch).items():
            rows = np.moveaxis(array, axes[names[name]], 0) if names[name] in axes else array
            found.setdefault(names[name], []).extend(rows if spec["max_batch_size"] else [rows])
    return found


def joined(rows: list[np.ndarray]) -> np.ndarray:
    """The rows of an output as one array; without their axes where they differ in shape."""
    same = len({row.shape for row in rows}) == 1
    return np.stack(rows) if same else np.concatenate([row.reshape(-1) for row in rows])


def check_output(name: str, half: np.ndarray, fp32: np.ndarray, judged: Mapping[str, Any], u: float) -> float:
    """The largest error in u. ``judged``: what the proof says of this output, its limits included."""
    if half.shape != fp32.shape or half.dtype != fp32.dtype:
        raise Refused(f"output '{name}' has another shape or datatype than FP32's")
    if fp32.dtype.kind != "f":
        if not int((half != fp32).sum()) <= min(judged["tied"], MOST_TIED * half.size):
            raise Refused(f"output '{name}' has other integers than FP32's")
        return 0.0
    a, b = fp32.astype(np.float64), half.astype(np.float64)
    sentinel = np.isfinite(a) & (np.abs(a) >= SENTINEL)
    lands = (np.sign(a) == np.sign(b)) & (np.abs(b) >= LANDS)
    same = np.isfinite(a) & np.isfinite(b) | np.isnan(a) & np.isnan(b) | (a == b)
    if not np.where(sentinel, lands, same).all():
        raise Refused(f"output '{name}' has NaN, infinities or sentinels in other places than FP32's")
    numbers = np.isfinite(a) & ~sentinel
    signal, noise = (
        np.where(numbers, np.abs(a), 0.0),
        np.where(numbers, np.abs(np.where(numbers, b - a, 0.0)), 0.0),
    )
    # These are numbers behind a rounding or a threshold: near it a few may differ.
    if judged["statistics"].get("stepped"):
        free = min(judged["tied"], max(1, int(MOST_STEPPED * noise.size)))
        noise.reshape(-1)[np.argsort(noise, axis=None)[noise.size - free :]] = 0.0
    scale = signal.max(initial=0.0)
    error = noise.max(initial=0.0)
    if error > judged["limit_u"] * u * scale:
        raise Refused(
            f"output '{name}' errs by {error / (u * scale or 1):.3g}u, allowed are {judged['limit_u']:.3g}u"
        )
    if decibels(signal, noise) < judged["min_sqnr_db"]:
        raise Refused(f"output '{name}' has {decibels(signal, noise):.1f} dB of signal to noise")
    for axis in range(1, a.ndim):
        length = a.shape[axis]
        for index in np.linspace(0, length - 1, min(length, MOST_SLICES)).round().astype(int):
            part, its_noise = (np.take(one, index, axis) for one in (signal, noise))
            faint = part.max(initial=0.0) <= max(DUST, FAINT * u) * scale
            if not faint and decibels(part, its_noise) < judged["min_slice_sqnr_db"]:
                raise Refused(f"output '{name}': slice {index} of axis {axis} is lost in noise")
    return error / (u * scale) if scale else 0.0


def check_shown(answers: Arrays) -> None:
    """Refuse answers of FP32 that any half would give: none, zeros, or what counts as a mask."""
    sizes = {
        name: np.abs(a[np.isfinite(a)].astype(float)) for name, a in answers.items() if a.dtype.kind == "f"
    }
    for name, array in answers.items():
        if not array.size or (name in sizes and sizes[name].size and sizes[name].min() >= SENTINEL):
            raise Refused(f"output '{name}' of FP32 has no number to compare, which proves nothing")
    if sizes and not any(((size > 0) & (size < SENTINEL)).any() for size in sizes.values()):
        raise Refused("every number of FP32 is 0, not finite or a sentinel, which proves nothing")


def decibels(signal: np.ndarray, noise: np.ndarray) -> float:
    power = float((noise * noise).sum())
    return (
        float("inf")
        if power == 0
        else 10 * float(np.log10(max(float((signal * signal).sum()), 1e-300) / power))
    )


def verified(half: Path) -> str:
    """The sentence of a proof that holds. Raises Refused."""
    proof = half.with_suffix(".proof")
    manifest = check_digests(half, proof)
    if around := manifest.get("around"):
        raise Refused(
            f"this verifier does not run {around['nodes'][0]}: `halfeven verify` judges what is around it"
        )
    spec, parity = (json.loads((proof / name).read_text()) for name in ("spec.json", "parity.json"))
    said, u = parity["forms"]["onnx"], ROUNDOFF[manifest["half"]]
    if said["passed"] is not True or said["dtype"] != manifest["half"]:
        raise Refused(f"the verdict is not one that a half of {manifest['half']} passed")
    outputs = {each["name"]: each for each in said["outputs"]}
    for each in outputs.values():
        decibels_asked = (each["min_sqnr_db"], each["min_slice_sqnr_db"])
        if not each["limit_u"] <= WIDEST_U or not all(asked >= LOWEST_DB for asked in decibels_asked):
            raise Refused(f"the limits of output '{each['name']}' are so wide that they prove nothing")
    with np.load(proof / "inputs.npz") as rows, np.load(proof / "expected.npz") as answers:
        inputs, expected = dict(rows), dict(answers)
    judging = said["samples"]  # the rows behind them are perturbed ones, which are judged apart
    inputs = {name: array[:judging] for name, array in inputs.items()}
    found, original = (answers_of(path, spec, inputs) for path in (half, proof / "original.onnx"))
    errors, fp32 = list[float](), dict[str, np.ndarray]()
    for own, ours in found.items():
        theirs = list(
            expected[own] if own in expected else [expected[f"{own}[{row}]"] for row in range(judging)]
        )
        for rows in (theirs[:judging], original[own]):
            if [row.shape for row in ours] != [row.shape for row in rows]:
                raise Refused(f"output '{own}' has another shape than FP32's")
            errors.append(check_output(own, joined(ours), joined(rows), outputs[own], u))
        fp32[own] = joined(theirs)
    check_shown(fp32)
    return f"verified: {max(errors):.3g}u over {judging} samples ({manifest['half']}); digests as proven"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(verified(Path(sys.argv[1])))
    except Refused as error:
        print(f"not verified: {error}")
        return 3
    except Exception as error:  # a file may hold anything, and each library has errors of its own
        print(f"not verified: the proof cannot be read: {error!r}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
