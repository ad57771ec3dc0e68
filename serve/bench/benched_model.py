"""The model that is benched: the server's description of it, and complete HTTP requests made from that.

Source: Open Inference Protocol V2 over HTTP with Triton's binary tensor data extension.
"""

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from ...exporters.inputs.samples import load_samples
from ...exporters.inputs.synthetic import USUAL_LENGTH, generate
from ...models.errors import BadInput, BadSetting
from ...models.spec.batch_axis import array_batch_back, batch_first
from ...models.spec.datatypes import DATATYPES
from ...models.spec.spec import Dim, ModelSpec, TensorSpec
from ..access.client_key import request_headers
from ..access.direct_requests import answer_to, error_of_status, is_server_url, no_answer
from ..http.codecs.infer_client import write_binary, write_json
from .loadgen import Target

WIRES = ("binary", "json")
MOST_REQUESTS = 16  # different ones, sent in turn
MOST_BYTES = 64 << 20  # of all of them together
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """One model at one server. ``headers`` go with every request."""

    url: SplitResult
    spec: ModelSpec
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        return f"{self.url.path.rstrip('/')}/v2/models/{urllib.parse.quote(self.spec.name, safe='')}"

    def target(self, bodies: Sequence[tuple[bytes, Mapping[str, str]]]) -> Target:
        """Whole requests to the infer route."""
        port = self.url.port or (443 if self.url.scheme == "https" else 80)
        tls = ssl.create_default_context() if self.url.scheme == "https" else None
        requests = [self._request(body, headers) for body, headers in bodies]
        return Target(self.url.hostname or "", port, requests, tls)

    def get(self, path: str) -> Any:
        """The JSON answer of a plain GET. Raises as `ask` does."""
        return ask(f"{self.url.scheme}://{self.url.netloc}{path}", self.headers)

    def try_once(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Send one request. Raises BadInput with the server's own words where it is refused."""
        url = f"{self.url.scheme}://{self.url.netloc}{self.path}/infer"
        ask(url, {**self.headers, **headers}, body)

    def _request(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        lines = {"Host": self.url.netloc, "Content-Length": str(len(body)), **self.headers, **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self.path}/infer HTTP/1.1\r\n{head}\r\n".encode() + body


def find(url: str, name: str, shapes: Sequence[str], headers: Sequence[str]) -> BenchedModel:
    """The model as the server describes it, its free dimensions as ``shapes`` has them (``ids=128``).

    Raises NotReady where no server answers, BadSetting where an option is wrong, UnknownName where there is no such
    model.
    """
    whole = url if "://" in url else f"http://{url}"
    if not is_server_url(whole):
        raise BadSetting(f"URL {url!r}: expected http://HOST:PORT or https://…")
    parts = urllib.parse.urlsplit(whole)
    sent = request_headers(headers)
    path = f"{parts.path.rstrip('/')}/v2/models/{urllib.parse.quote(name, safe='')}"
    said = ask(f"{parts.scheme}://{parts.netloc}{path}", sent)
    try:
        spec = _spec(name, said["inputs"], said["outputs"], _sizes(shapes))
    except (KeyError, TypeError) as error:
        raise BadInput(
            f"{url} does not describe '{name}' as the V2 protocol does: {error!r} missing"
        ) from None
    return BenchedModel(parts, spec, sent)


def bodies(
    subject: BenchedModel, rows: int, wire: str, data: Path | None, seed: int = 0
) -> list[tuple[bytes, dict[str, str]]]:
    """Different requests of ``rows`` rows, at most 16, (body, headers) each: from a file, or plausible ones."""
    if wire not in WIRES:
        raise BadSetting(f"--wire {wire!r}: expected binary or json")
    spec = subject.spec
    if rows < 1 or (rows > 1 and not spec.batched):
        raise BadSetting(
            f"--rows {rows}: '{spec.name}' takes {'1 or more' if spec.batched else 'no batches'}"
        )
    samples = load_samples(data, spec) if data is not None else generate(spec, rows * MOST_REQUESTS, seed)
    made, size = [], 0
    for _, rows_first in samples.batches(rows if spec.batched else 0, MOST_REQUESTS):
        arrays = {t.name: array_batch_back(rows_first[t.name], t.batch_axis) for t in spec.inputs}
        made.append(write_binary(arrays) if wire == "binary" else write_json(arrays))
        size += len(made[-1][0])
        if size > MOST_BYTES:
            break
    if not made:
        raise BadInput(f"{data} holds no rows")
    return made


def ask(url: str, headers: Mapping[str, str], body: bytes | None = None) -> Any:
    """One request outside the load. Raises NotReady where no server answers, else the server's refusal."""
    try:
        answer = answer_to(url, body, headers, _PATIENCE_S)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise no_answer(url, error, _PATIENCE_S) from None
    if (status := answer.status) >= 300:
        refusal = error_of_status(status, answer.body, f"{url} answers")
        raise (
            BadInput(f"{refusal}; sizes of free dimensions are set with --shape")
            if status == 400
            else refusal
        )
    try:
        return json.loads(answer.body) if body is None else None
    except ValueError:
        raise BadInput(f"{url} does not answer with JSON: is it an inference server?") from None


def _sizes(given: Sequence[str]) -> dict[str, list[int]]:
    """``ids=128`` or ``picture=3,224,224``: sizes of an input's dimensions behind the batch."""
    sizes = {}
    for text in given:
        name, _, numbers = text.partition("=")
        try:
            sizes[name] = [int(number) for number in numbers.split(",")]
        except ValueError:
            raise BadSetting(f"--shape {text!r}: expected INPUT=SIZE[,SIZE…] without the batch") from None
    return sizes


def _spec(
    name: str,
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
    sizes: dict[str, list[int]],
) -> ModelSpec:
    if unknown := sorted(set(sizes) - {tensor["name"] for tensor in inputs}):
        raise BadSetting(f"--shape {unknown[0]}: '{name}' has the inputs {[t['name'] for t in inputs]}")
    tensors = [_tensor(tensor) for tensor in inputs]
    batched = all(tensor.shape[:1] == (Dim(),) for tensor in tensors)
    taken = tuple(_fixed(tensor, batched, sizes.get(tensor.name)) for tensor in tensors)
    return ModelSpec(name, taken, tuple(_tensor(tensor) for tensor in outputs), 2**31 if batched else 0)


def _tensor(said: Mapping[str, Any]) -> TensorSpec:
    if said["datatype"] not in DATATYPES:
        raise BadInput(f"tensor '{said['name']}' is {said['datatype']}: bench makes {', '.join(DATATYPES)}")
    axis = int(said.get("parameters", {}).get("batch_axis", 0))  # a word of ours: others have the batch first
    shape = batch_first([Dim.parse(int(size)) for size in said["shape"]], axis)
    return TensorSpec(said["name"], said["datatype"], shape, batch_axis=axis)


def _fixed(tensor: TensorSpec, batched: bool, sizes: list[int] | None) -> TensorSpec:
    """The input with every free dimension behind the batch at one size."""
    batch, inner = (tensor.shape[:1], tensor.shape[1:]) if batched else ((), tensor.shape)
    if sizes is None:
        sizes = [dim.minimum if dim.fixed else USUAL_LENGTH for dim in inner]
    if len(sizes) != len(inner) or not all(dim.admits(size) for dim, size in zip(inner, sizes, strict=True)):
        raise BadSetting(
            f"--shape {tensor.name}={sizes}: the model has {tensor.as_called().describe_shape()}"
        )
    return replace(tensor, shape=(*batch, *(Dim.parse(size) for size in sizes)))
