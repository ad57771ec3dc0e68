"""Valid inputs of every reader, from which the fuzzer begins."""

import base64
import gzip
import io
import json
import shutil
import tarfile
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pyarrow
import pyarrow.parquet
import torch
from halfeven.exporters.on_device.device_proofs import DeviceProof
from halfeven.exporters.on_device.environment import environment
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import Store, Version
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.finetune.jobs.job_folder import JobState
from halfeven.serve.grpc.messages import message
from halfeven.serve.versions.loading.tuned import Winner, conditions
from PIL import Image
from safetensors.numpy import save

ROWS = Dim(1, None)
SPEC = ModelSpec(
    "net",
    (TensorSpec("x", "FP32", (ROWS, Dim(4, 4))), TensorSpec("ids", "INT64", (ROWS, Dim(1, 16)))),
    (TensorSpec("y", "FP32", (ROWS, Dim(3, 3)), kind="logits"),),
    8,
)
SIZE = {"size": [6, 6], "color": "L"}
PICTURES = ModelSpec(
    "seen",
    (TensorSpec("image", "FP32", (ROWS, Dim(1, 1), Dim(6, 6), Dim(6, 6)), picture=SIZE),),
    (TensorSpec("y", "FP32", (ROWS, Dim(2, 2)), kind="logits", labels=("ant", "bee")),),
    8,
)
X = np.arange(8, dtype=np.float32).reshape(2, 4)
IDS = np.arange(6, dtype=np.int64).reshape(2, 3)
TOML = """
name = "net"
source = "model.py:build"
max_batch_size = 8
form = "auto"
[[inputs]]
name = "x"
datatype = "FP32"
shape = [-1, 4]
[[inputs]]
name = "ids"
datatype = "INT64"
shape = [-1, "length=1..16"]
range = [0, 99]
[[outputs]]
name = "y"
datatype = "FP32"
shape = [-1, 3]
kind = "logits"
labels = ["a", "b", "c"]
[precision]
level = "O2"
keep = ["layer.*", "op:softmax"]
[parity]
max_error_u = 4.0
max_flips = 0.01
[batching]
max_queue_delay_us = 10
buckets = [1, 2, 8]
[training]
metrics = ["accuracy"]
"""
PICTURE_TOML = """
name = "seen"
source = "model.py:build"
[[inputs]]
name = "image"
datatype = "FP32"
shape = [-1, 1, 8, 8]
picture = { size = [8, 8], color = "L", scale = 0.0625, mean = [0.0], std = [1.0] }
[[outputs]]
name = "y"
datatype = "FP32"
shape = [-1, 1]
kind = "score"
"""
PBTXT = b"""
name: "net"  # a comment
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4, -1 ] reshape { shape: [ 2, 2 ] } } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "a\\x41\\101\\u0041.txt" } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
parameters: { key: "a" value: { string_value: 'b' "c" } }
"""


def _entry(name: str, array: np.ndarray, datatype: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(array.shape), **more}


def v2_json() -> list[bytes]:
    plain = [_entry("x", X, "FP32", data=X.tolist()), _entry("ids", IDS, "INT64", data=IDS.ravel().tolist())]
    wished = {
        "id": "7",
        "inputs": plain,
        "parameters": {"timeout": 100, "priority": 1, "binary_data_output": False},
        "outputs": [{"name": "y", "parameters": {"classification": 2}}],
    }
    return [json.dumps({"inputs": plain}).encode(), json.dumps(wished).encode()]


def http_requests() -> list[bytes]:
    row = _entry("x", X, "FP32", data=X.tolist())
    body = json.dumps({"inputs": [row]}).encode()
    head = json.dumps(
        {"inputs": [_entry("x", X, "FP32", parameters={"binary_data_size": X.nbytes})]}
    ).encode()
    binary = head + X.tobytes()
    fields = b"POST /v2/models/double/infer HTTP/1.1\r\nhost: localhost\r\n"
    length = b"content-length: %d\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    plain = fields + length % len(body) + b"\r\n" + body
    said = b"inference-header-content-length: %d\r\n" % len(head)
    return [
        plain,
        plain + plain,
        fields + said + length % len(binary) + b"\r\n" + binary,
        fields + b"transfer-encoding: chunked\r\nx-request-id: me\r\n\r\n" + chunks,
        b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\naccept-encoding: gzip;q=0.5\r\n\r\n",
    ]


def v2_binary() -> list[bytes]:
    found = []
    for first in ({"parameters": {"binary_data_size": X.nbytes}}, {"data": X.tolist()}):
        sizes = {"parameters": {"binary_data_size": IDS.nbytes}}
        inputs = [_entry("x", X, "FP32", **first), _entry("ids", IDS, "INT64", **sizes)]
        head = json.dumps({"inputs": inputs}).encode()
        tail = (X.tobytes() if "data" not in first else b"") + IDS.tobytes()
        found.append(b"%d\n" % len(head) + head + tail)
    return found


def grpc_messages() -> list[bytes]:
    found = []
    for raw in (True, False):
        request = message("ModelInferRequest")(model_name="net", id="7")
        for name, array, kind in (("x", X, "FP32"), ("ids", IDS, "INT64")):
            tensor = request.inputs.add(name=name, datatype=kind, shape=array.shape)
            contents = {"FP32": "fp32_contents", "INT64": "int64_contents"}[kind]
            if raw:
                request.raw_input_contents.append(array.tobytes())
            else:
                getattr(tensor.contents, contents).extend(array.ravel().tolist())
        request.parameters["timeout"].int64_param = 100
        request.outputs.add(name="y").parameters["classification"].int64_param = 2
        found.append(request.SerializeToString())
    return found


def repository() -> list[bytes]:
    config = {"max_batch_size": 4, "dynamic_batching": {"max_queue_delay_microseconds": 5}}
    load = {"parameters": {"config": json.dumps(config)}}
    return [json.dumps(load).encode(), b'{"ready": true}', b'{"parameters": {"unload_dependents": false}}']


def images() -> list[bytes]:
    found = []
    for kind, mode in (("PNG", "L"), ("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "RGB"), ("JPEG", "L")):
        out = io.BytesIO()
        Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).convert(mode).save(out, kind)
        found.append(out.getvalue())
    return found


def predict_bodies() -> list[bytes]:
    rows = [{"x": x.tolist(), "ids": ids.tolist()} for x, ids in zip(X, IDS, strict=True)]
    form = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n%b\r\n' % one
        for one in images()[:2]
    )
    return [
        b"application/json\n" + json.dumps({"instances": rows}).encode(),
        b'P:application/json\n{"instances": [{"b64": "%b"}]}' % base64.b64encode(images()[0]),
        b"P:multipart/form-data; boundary=b\n" + form + b"--b--\r\n",
        b"P:image/png\n" + images()[0],
        b"P:application/x-npy\n" + _npy(np.zeros((1, 1, 6, 6), np.float32)),
        *(b"application/x-npz\n" + one for one in _npz({"x": X, "ids": IDS})),
    ]


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _npz(arrays: dict[str, np.ndarray]) -> list[bytes]:
    found = []
    for write in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        write(out, **arrays)  # type: ignore[arg-type]
        found.append(out.getvalue())
    return found


def compressed() -> list[bytes]:
    body = v2_json()[0] * 20
    return [
        b"gzip\n" + gzip.compress(body, mtime=0),
        b"deflate\n" + zlib.compress(body),
        b"identity\n" + body,
    ]


def tensors() -> list[bytes]:
    return [save({"x": X, "ids": IDS}), *_npz({"x": X, "ids": IDS})]


def training_tensors() -> list[bytes]:
    arrays = {"x": X.repeat(10, 0), "ids": IDS.repeat(10, 0), "target:y": np.arange(20) % 3}
    return [save(arrays), *_npz(arrays)]


def _table() -> dict[str, list[Any]]:
    return {
        **{f"x.{place}": X[:, place].tolist() for place in range(4)},
        **{f"ids.{place}": IDS[:, place].tolist() for place in range(3)},
        "target:y": [0, 2],
    }


def csv() -> list[bytes]:
    table = _table()
    lines = [list(table), *zip(*table.values(), strict=True)]
    return ["\n".join(",".join(map(str, line)) for line in lines).encode() + b"\n"]


def json_lines() -> list[bytes]:
    nested = [{"x": x.tolist(), "ids": ids.tolist(), "target:y": 1} for x, ids in zip(X, IDS, strict=True)]
    flat = [dict(zip(_table(), row, strict=True)) for row in zip(*_table().values(), strict=True)]
    return ["\n".join(map(json.dumps, rows)).encode() + b"\n" for rows in (nested, flat)]


def parquet() -> list[bytes]:
    found = []
    for table in (_table(), {"x": X.tolist(), "ids": IDS.tolist(), "target:y": [0, 2]}):
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(table), out)
        found.append(out.getvalue())
    return found


def tars() -> list[bytes]:
    found = []
    for folders in (("ant/", "bee/"), ("", "")):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for number, (folder, data) in enumerate(zip(folders, images(), strict=False)):
                entry = tarfile.TarInfo(f"{folder}{number}.png")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        found.append(out.getvalue())
    return found


def text_format() -> list[bytes]:
    return [PBTXT]


def tomls(version: Path) -> list[bytes]:
    return [TOML.encode(), PICTURE_TOML.encode(), (version / "source/model.toml").read_bytes()]


def expressions() -> list[bytes]:
    return [b"Mul(Integer(2), Symbol('s0', positive=True, integer=True))", b"(s0 + 3)//2", b"Max(1, s1**2)"]


def keys(folder: Path) -> list[bytes]:
    file = KeyFile(folder / "keys.json")
    if not file.path.exists():
        file.add("one", ["infer"])
        file.add("two", ["infer", "manage"], ["net"], 5.0, 2)
    return [file.path.read_bytes()]


def states(version: Version, device: torch.device) -> dict[str, Any]:
    """The files that the server and its jobs keep beside the versions, by the end of the file's name."""
    at = {"over": None, "by": "operator", "at": "2026-01-01T00:00:00Z"}
    bound = {"digest": version.digest, "environment": conditions(device)}
    half = version.manifest["files"]["half.pt2"]
    proof = DeviceProof("torch", half, environment(device), [], [1, 2, 8], True, "equal", "2026-01-01")
    winner = Winner("torch", "fp16", 1, 8, 0, 100.0, ["packed products"])
    setup = {"conditions": conditions(device), "threads": 1, "passes": ["packed products"], "crowded": False}
    return {
        "promotions.json": {"1": {"first": at, "last": at}},
        "rollout.json": {"canary": {"version": 1, "percent": 10.0}, "shadow": None},
        "drifted-1.json": {"device": "cpu", "reason": "far off", "at": "2026-01-01T00:00:00Z"},
        "events.jsonl": {
            "at": "2026-01-01T00:00:00Z",
            "model": "net",
            "kind": "promoted",
            "message": "it was",
        },
        "proofs-1.json": [asdict(proof)],
        "tuned.json": {"winner": asdict(winner), "date": "2026-01-01", **bound},
        "cores.json": {"1 torch fp16": setup},
        "ceiling.json": {"ceilings": [{"row_elements": 4, "rows": 2}]},
        "state.json": asdict(JobState(1, 1, {"weights": "w"}, 1, "step 3")),
    }


# Files within files.


def member(archive: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        (whole,) = [one for one in found.namelist() if one.endswith(name)]
        return found.read(whole)


def with_member(archive: bytes, name: str, data: bytes) -> bytes:
    """The archive with other bytes in one member, and right checksums and sizes."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(out, "w") as target:
        for item in source.infolist():
            changed = data if item.filename.endswith(name) else source.read(item)
            target.writestr(zipfile.ZipInfo(item.filename), changed)
    return out.getvalue()


def store_with(root: Path, file: str, data: bytes) -> Store:
    """A store that has nothing but this file."""
    if not (root / file).parent.is_dir():
        shutil.rmtree(root, ignore_errors=True)
        (root / file).parent.mkdir(parents=True)
    (root / file).write_bytes(data)
    return Store(root)


def archives() -> list[bytes]:
    """TorchServe archives, of members stored and packed in each way that is read."""
    manifest = {"model": {"modelName": "net", "serializedFile": "model.onnx", "handler": "h"}}
    found = []
    for packing in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", packing) as archive:
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
            archive.writestr("model.onnx", onnx_files()[0] * 4)
            archive.writestr("index_to_name.json", '{"0": "a", "1": ["n", "b"]}')
        found.append(out.getvalue())
    return found


def onnx_files() -> list[bytes]:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        net (float[n, 4] x) => (float[n, 2] y) <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMul(x, w) }"""
    return [onnx.parser.parse_model(text).SerializeToString()]
