"""A comparison of ``halfeven fp16`` with ``halfeven convert``: both have to make the same plan, proof and half.

    python -m tests.benchmarks.one_file_plans [--only NAME …] [--road ROAD …]

Roads: ``corpus`` (as ONNX files, on 32 samples), ``zoo`` (the shipped folders), ``real`` (the files of tests/real that
are there). A line for each model that differs, and one with the counts; the exit code is 1 where any differs.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.half_files.half_file import proof_folder, verdict_of, write_half
from halfeven.exporters.onnx.own_layout import give_own_layout, has_own_layout
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.errors import ExportFailed, HalfevenError
from halfeven.models.store.store import Store, Version
from halfeven.models.zoo import zoo_folder

from tests.benchmarks.same_plans import ROWS, SEED, names_of
from tests.corpus import captured, fresh
from tests.real.made_files import MADE, SAMPLES, SHIPPED, file_of

ROADS = ("corpus", "zoo", "real")
Seen = dict[str, str]  # the verdict, or the error, and the digests of what is compared


def by_convert(source: Path, folder: Path, options: Options) -> Seen:
    """The verdict and, of an equal half, the digests of plan, proof and half that ``halfeven convert`` makes of a
    model."""
    version = convert(source, Store(folder / "store"), options).version
    verdict = verdict_of(version)
    return {"verdict": verdict} | (digests(version.folder) if verdict == "equal" else {})


def by_fp16(source: Path, folder: Path, options: Options) -> Seen:
    """The verdict and, of an equal half, the digests of plan, proof and half that ``halfeven fp16`` makes."""
    target = folder / "one.onnx"
    verdict = write_half(source, target, options)["verdict"]
    return {"verdict": verdict} | (digests(proof_folder(target)) if verdict == "equal" else {})


def digests(folder: Path) -> Seen:
    """The digests of plan, proof and half: of this without its metadata and declared sizes, in the model's own layout,
    as a half that stands for itself has it."""
    half, spec = onnx.load(folder / "half.onnx"), Version.at(folder).spec()
    if not has_own_layout(half):
        give_own_layout(half, spec)
    del half.metadata_props[:]
    for value in (*half.graph.input, *half.graph.output):
        value.type.tensor_type.ClearField("shape")
    verdict = json.loads((folder / "parity.json").read_text())["forms"]["onnx"]
    texts = {
        "plan": (folder / "precision.json").read_bytes(),
        "proof": json.dumps(verdict, sort_keys=True).encode(),
        "half": half.SerializeToString(deterministic=True),
    }
    return {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def differing(source: Path, folder: Path, options: Options) -> list[str]:
    """The names of what differs; both may refuse a model alike."""
    sides = list[Seen]()
    for gives in (by_convert, by_fp16):
        try:
            sides.append(gives(source, folder, options))
        except HalfevenError as error:
            sides.append({"verdict": f"{type(error).__name__}: {error}"})
    one, other = sides
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def sources(road: str, name: str, folder: Path) -> tuple[Path, Options] | None:
    """A model as a file or folder with its options; None where it is not here, or cannot be written as ONNX."""
    rows = folder / "rows.npz"
    if road == "zoo":
        return zoo_folder(name), Options()
    if road == "real":
        path = file_of(name, folder)
        if name in SAMPLES:
            np.savez(rows, allow_pickle=False, **SAMPLES[name](np.random.default_rng(7), 32))
        return (path, Options(samples=rows if name in SAMPLES else None)) if path.exists() else None
    original, source = captured(name), folder / "model.onnx"
    try:
        write_onnx(original.program, original.spec, source, {})
    except ExportFailed:
        return None
    np.savez(rows, **{key: tensor.numpy() for key, tensor in fresh(name, ROWS, SEED).items()})  # type: ignore[arg-type]
    return source, Options(samples=rows)


def models(road: str) -> Iterator[str]:
    yield from (*MADE, *SHIPPED) if road == "real" else names_of("zoo" if road == "zoo" else "file")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.one_file_plans")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--road", nargs="+", default=list(ROADS), choices=ROADS)
    asked, failed = parser.parse_args(), 0
    for road in asked.road:
        count = same = 0
        for name in (name for name in models(road) if not asked.only or name in asked.only):
            with TemporaryDirectory() as place:
                found = sources(road, name, Path(place))
                differ = differing(found[0], Path(place), found[1]) if found else []
            count, same = count + bool(found), same + (bool(found) and not differ)
            if differ:
                print(f"{road}: {name} differs in {', '.join(differ)}", flush=True)
        failed += count - same
        print(f"{road}: {same} of {count} models are the same by fp16 and by convert", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
