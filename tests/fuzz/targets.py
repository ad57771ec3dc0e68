"""The readers of bytes that others send: each target is a reader of the product, with valid inputs to begin from.

A target either returns or raises an error of `models/errors.py`; anything else is a fault of the product.
"""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from google.protobuf.message import DecodeError
from halfeven.exporters.importing.torchserve import _Archive, unpack
from halfeven.exporters.importing.triton_config import read_config
from halfeven.exporters.inputs.samples import load_samples
from halfeven.exporters.on_device.device_proofs import kept_proof
from halfeven.exporters.onnx.reading.bounded_file import read_graph
from halfeven.models.archive.archive import MODEL, load_program
from halfeven.models.archive.plain_program import read_module
from halfeven.models.archive.shape_expressions import is_arithmetic
from halfeven.models.errors import HalfevenError, Unforeseen
from halfeven.models.files.guarded_reading import reading
from halfeven.models.folder.package import parse_folder
from halfeven.models.pictures.picture import picture_row
from halfeven.models.pictures.pixels import Picture
from halfeven.models.store.store import Store, Version
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.batching.ceiling import Ceiling
from halfeven.serve.finetune.data.datasets import read_training
from halfeven.serve.finetune.data.tables import CSV, JSON_LINES, PARQUET, pictures_of, tensors_of
from halfeven.serve.finetune.jobs.job_folder import JobFolder
from halfeven.serve.grpc.messages import message
from halfeven.serve.grpc.tensors import fields_of
from halfeven.serve.http.codecs.infer import InferCodec
from halfeven.serve.http.codecs.predict import read_body_of
from halfeven.serve.http.content_coding import decoded
from halfeven.serve.http.limits.memory_budget import MemoryBudget
from halfeven.serve.http.routes.repository import read_index, read_load, read_unload
from halfeven.serve.versions import orders
from halfeven.serve.versions.loading import kept_setups
from halfeven.serve.versions.loading.tuned import tuned_for, tuned_path
from halfeven.serve.versions.traffic.comparison import scale_of

from tests.fuzz import seeds
from tests.fuzz.http_wire import HttpWire
from tests.fuzz.mutation import Mutator

MOST = 1 << 22  # bytes that a reader may unpack


@dataclass(frozen=True)
class Target:
    """``wrap`` makes a mutated input one that passes the outer checks, so that the inner ones are reached."""

    name: str
    read: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    also: tuple[type[Exception], ...] = ()
    wrap: Callable[[bytes], bytes] = bytes
    weight: int = 10  # inputs of this target for each 10 of a usual one


def try_out(target: Target, data: bytes) -> bool:
    """True if the input was taken; False if it was refused with words. Raises for any other end."""
    try:
        target.read(target.wrap(data))
    except (HalfevenError, *target.also) as error:
        assert str(error).strip(), "a refusal has words"
        # The guard (`models/files/guarded_reading.py`) refuses what a reader did not foresee: that is its fault.
        assert not isinstance(error, Unforeseen), error
        return False
    return True


def targets(folder: Path, store: Path, wire: HttpWire) -> list[Target]:
    """All targets. Files are read from ``folder``; ``store`` has a converted model ``net``."""
    file, spec, pictures = folder / "input", seeds.SPEC, seeds.PICTURES
    lease = MemoryBudget(1 << 30).lease

    def on_disk(read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def written(data: bytes) -> object:
            file.write_bytes(data)
            return read(file)

        return written

    def binary(data: bytes) -> object:
        head, _, body = data.partition(b"\n")
        return InferCodec(spec).read(body, head.decode("latin-1"))

    def body(data: bytes) -> object:
        kind, _, rest = data.partition(b"\n")
        chosen = pictures if kind.startswith(b"P:") else spec
        return read_body_of(chosen, kind.removeprefix(b"P:").decode("latin-1"), rest, MOST, lease())

    def grpc(data: bytes) -> object:
        return InferCodec(spec).read_message(*fields_of(message("ModelInferRequest").FromString(data)))

    def inflated(data: bytes) -> object:
        coding, _, rest = data.partition(b"\n")
        return asyncio.run(decoded(rest, coding.decode("latin-1"), MOST, lease()))

    def repository(data: bytes) -> object:
        return read_load(data, {"max_batch_size": 8}), read_index(data), read_unload(data)

    def version(data: bytes) -> object:
        found = seeds.store_with(folder / "store", "models/net/1/manifest.json", data).version("net", 1)
        return found.status, found.digest, found.awaits_promotion, [found.has(one) for one in ("spec.json",)]

    def of_model(name: str, read: Callable[[Store], object]) -> Callable[[bytes], object]:
        return lambda data: read(seeds.store_with(folder / "store", f"models/net/{name}", data))

    def stored(name: str, read: Callable[[Version], object]) -> Target:
        """A file whose digest the manifest has: what a crafted version brings."""

        def written(data: bytes) -> object:
            (folder / name).write_bytes(data)
            files = {name: hashlib.sha256(data).hexdigest()}
            return read(Version("net", 1, folder, {"files": files, "half": "fp16"}))

        return Target(name, written, lambda: [(program / name).read_bytes()])

    program = store / "models/net/1"
    archive = (program / "half.pt2").read_bytes
    training = on_disk(lambda path: read_training(path, spec, MOST, quarantine=True))
    again = partial(seeds.with_member, archive(), MODEL)
    # fmt: off
    return [
        Target("HTTP", wire.read, seeds.http_requests, (ValueError,), weight=10),
        Target("V2 JSON", InferCodec(spec).read, seeds.v2_json, weight=20),
        Target("V2 binary", binary, seeds.v2_binary, weight=20),
        Target("predict", body, seeds.predict_bodies),
        Target("gRPC", grpc, seeds.grpc_messages, (DecodeError,), weight=20),
        Target("repository", repository, seeds.repository),
        Target("content coding", inflated, seeds.compressed),
        Target("picture", lambda data: picture_row(data, Picture.of(pictures.inputs[0], True)), seeds.images),
        Target("model.toml", lambda data: parse_folder(data.decode(errors="replace"), program / "source/model.toml"),
               lambda: seeds.tomls(program)),
        Target("config.pbtxt", on_disk(lambda path: reads("a configuration", read_config, path, folder)),
               seeds.text_format),
        Target(".mar", on_disk(partial(unpacked, folder / "unpacked")), seeds.archives),
        Target("ONNX", on_disk(read_graph), seeds.onnx_files),
        Target("samples", on_disk(lambda path: load_samples(path, spec, MOST)), seeds.tensors),
        Target("training rows", training, seeds.training_tensors),
        Target("CSV", on_disk(lambda path: tensors_of(path, CSV, spec, MOST)), seeds.csv),
        Target("JSON lines", on_disk(lambda path: tensors_of(path, JSON_LINES, spec, MOST)), seeds.json_lines),
        Target("Parquet", on_disk(lambda path: tensors_of(path, PARQUET, spec, MOST)), seeds.parquet, weight=3),
        Target("tar", on_disk(lambda path: pictures_of(path, pictures, MOST)), seeds.tars, weight=3),
        Target("program", on_disk(read_module), lambda: [archive()]),
        Target("program JSON", on_disk(read_module), lambda: [seeds.member(archive(), MODEL)], wrap=again),
        Target("program for torch", on_disk(load_program), lambda: [seeds.member(archive(), MODEL)],
               wrap=again, weight=1),
        Target("shape expression", lambda data: is_arithmetic(data.decode(errors="replace")), seeds.expressions),
        Target("keys", on_disk(lambda path: KeyFile(path).read()), lambda: seeds.keys(folder)),
        Target("manifest", version, lambda: [(program / "manifest.json").read_bytes()]),
        stored("spec.json", Version.spec),
        stored("parity.json", scale_of),
        Target("live", of_model("live", lambda found: found.live_number("net")), lambda: [b"1\n", b"20"]),
        *kept_states(folder, store),
    ]
    # fmt: on


def reads(what: str, read: Callable[..., object], path: Path, *more: object) -> object:
    """The result of a reader under the guard, as an import calls it."""
    with reading(path, what):
        return read(path, *more)


def unpacked(folder: Path, path: Path) -> object:
    """A TorchServe archive as import reads it, up to the model's own file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with reading(path, "a TorchServe archive"):
        unpack(path, folder)
        return _Archive(path, folder, None)


def kept_states(folder: Path, converted: Path) -> list[Target]:
    """The readers of what the server and its jobs keep beside the versions, each asked as they ask it."""
    store = Store(Path(shutil.copytree(converted, folder / "kept", dirs_exist_ok=True)))
    version, device = store.version("net", 1), torch.device("cpu")
    place, tuned = version.folder.parent, tuned_path(version, device)
    ceiling, job = tuned.with_name("ceiling.json"), folder / "job"
    setups = tuned.with_name(f"setups-{tuned.name}")
    kept = seeds.states(version, device)

    def target(path: Path, read: Callable[[], object]) -> Target:
        path.parent.mkdir(exist_ok=True)

        def written(data: bytes) -> object:
            path.write_bytes(data)
            return read()

        (name,) = [name for name in kept if path.name.endswith(name)] if path != tuned else ["tuned.json"]
        return Target(name, written, lambda: [json.dumps(kept[name]).encode()])

    def promotions() -> object:
        return [one[key]["over"] for one in store.promotions("net").values() for key in ("first", "last")]

    return [
        target(place / "promotions.json", promotions),
        target(place / "rollout.json", lambda: orders.read_orders(store, "net")),
        target(place / "drifted-1.json", lambda: orders.drifted(version, "cpu")),
        target(place / "events.jsonl", lambda: [one.get("kind") for one in orders.events(store, "net")]),
        target(place / "proofs-1.json", lambda: kept_proof(version, "torch", "half.pt2", device)),
        target(tuned, lambda: tuned_for(version, device)),
        target(setups, lambda: str(kept_setups.kept_setup(version, "torch", "fp16", device))),
        target(ceiling, lambda: Ceiling(ceiling).rows(5)),
        target(job / "state.json", lambda: [JobFolder(job).of_pass, JobFolder(job).last_step()]),
    ]


def mutator(target: Target, number: int) -> Mutator:
    return Mutator(target.seeds(), number)
