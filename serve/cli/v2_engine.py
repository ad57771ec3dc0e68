"""An engine behind the Open Inference Protocol V2 over HTTP, as a function of named arrays.

The operator names it on the command line. Sizes and times are bounded; no redirect is followed.
"""

import http.client
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...models.errors import BadInput, BadSetting, EngineFailed, NotReady
from ...models.spec.batch_axis import array_batch_back, array_batch_first
from ...models.spec.datatypes import name_of
from ..access.direct_requests import answer_to, is_server_url, json_of, words_of
from ..http.codecs.infer_client import HEADER_LENGTH, read_outputs, write_binary, write_json

MOST_BYTES = 1 << 30  # of one answer
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class V2Engine:
    """One model of one server. ``timeout_s`` bounds each request from its first byte to the answer's last.

    ``input_axes``, ``output_axes``: the axis of each one's batch, where it is not the first.
    """

    url: str
    datatypes: Mapping[str, str]
    input_axes: Mapping[str, int]
    output_axes: Mapping[str, int]
    binary: bool
    timeout_s: float
    headers: Mapping[str, str]

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The answers to one batch. Raises EngineFailed with the server's words, BadInput for another signature."""
        try:
            sent = {
                name: array_batch_back(array, self.input_axes.get(name, 0)) for name, array in arrays.items()
            }
        except ValueError as error:
            raise EngineFailed(f"{self.url} has the batch on an axis that the model lacks: {error}") from None
        for name, array in sent.items():
            if (wanted := self.datatypes.get(name)) not in (None, name_of(array.dtype)):
                raise BadInput(
                    f"input '{name}' is {name_of(array.dtype)} in the model and {wanted} at {self.url}: serve it there "
                    "as the model has it"
                )
        body, headers = write_binary(sent) if self.binary else write_json(sent)
        answer, head = _ask(f"{self.url}/infer", self.timeout_s, {**self.headers, **headers}, body)
        try:
            outputs = read_outputs(answer, head)
            return {
                name: array_batch_first(array, self.output_axes.get(name, 0))
                for name, array in outputs.items()
            }
        except (BadInput, ValueError) as error:  # a ValueError: a batch on an axis that the answer lacks
            raise EngineFailed(f"{self.url} answered, but {error}") from None


def v2_engine(url: str, name: str, timeout_s: float, headers: Mapping[str, str]) -> V2Engine:
    """The model at ``url``: a server's address (then the model is called ``name`` there), or that of a model of it,
    ``http://…/v2/models/NAME[/versions/V]``. ``headers`` go with every request.

    Raises BadSetting for another URL, NotReady where no server answers, EngineFailed where it has no such model.
    """
    if not is_server_url(url) or not url.isascii():
        raise BadSetting(
            f"--against {url[:80]!r}: expected http://HOST:PORT or http://HOST:PORT/v2/models/NAME"
        )
    base, found, model = url.rstrip("/").partition("/v2/models/")
    model = model if found else urllib.parse.quote(name, safe="")
    where = f"{base}/v2/models/{model}"
    server, said = (json_of(place, _ask(place, timeout_s, headers)[0]) for place in (f"{base}/v2", where))
    try:
        datatypes = {tensor["name"]: str(tensor["datatype"]) for tensor in said["inputs"]}
        inputs, outputs = ({t["name"]: _batch_axis(t) for t in said[key]} for key in ("inputs", "outputs"))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise EngineFailed(
            f"{where} does not describe the model as the V2 protocol does: {error!r}"
        ) from None
    binary = "binary_tensor_data" in (server.get("extensions") or ()) if isinstance(server, dict) else False
    return V2Engine(where, datatypes, inputs, outputs, binary, timeout_s, headers)


def _batch_axis(tensor: Mapping[str, Any]) -> int:
    """A word of ours: other servers have the batch first."""
    return int(tensor.get("parameters", {}).get("batch_axis", 0))


def _ask(
    url: str, timeout_s: float, headers: Mapping[str, str], body: bytes | None = None
) -> tuple[bytes, str | None]:
    """The answer's body and its Inference-Header-Content-Length; a GET where there is no body."""
    read = partial(_read, url=url, deadline=time.monotonic() + timeout_s)
    try:
        answer = answer_to(url, body, headers, timeout_s, read)
    except (OSError, http.client.HTTPException) as error:
        raise NotReady(
            f"no answer from {url} within {timeout_s:g} s: {error}; does the server run?"
        ) from None
    if answer.status >= 300:
        raise EngineFailed(f"{url} answers {answer.status}: {words_of(answer.body)}")
    return answer.body, answer.headers.get(HEADER_LENGTH.lower())


def _read(answer: http.client.HTTPResponse, url: str, deadline: float) -> bytes:
    parts, size = list[bytes](), 0
    while piece := answer.read1(_PIECE):
        size += len(piece)
        if size > MOST_BYTES:
            raise EngineFailed(
                f"{url} answers with more than {MOST_BYTES} bytes, more than any answer may have"
            )
        if time.monotonic() > deadline:
            raise TimeoutError("the answer goes on beyond it")
        parts.append(piece)
    return b"".join(parts)
