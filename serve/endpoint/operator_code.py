"""The process of an endpoint: it runs the operator's code, one call after the other.

    python -PB -m halfeven.serve.endpoint.operator_code FILE.py CLASS

Its standard input is a socket (`messages.py`). A call's name is ``preprocess``, ``postprocess`` or ``forget``. What
the code prints goes to the server's standard error.
"""

import copy
import importlib.util
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ...models.errors import BadRequest
from ...models.order.ends_with_parent import die_with_the_parent
from ...models.spec.datatypes import DATATYPES, name_of
from ..http.codecs.infer_client import HEADER_LENGTH, read_outputs, write_binary
from ..http.codecs.json_numbers import array_of, parse
from .endpoint import Endpoint
from .messages import Head, receive, send

_MOST_WORDS = 500  # of what an error says
_MOST_TRACEBACK = 50_000  # characters of it, from its end
_JSON = "application/json"


def main() -> None:
    connection = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open() as nothing:  # what the code starts must not read the messages
        os.dup2(nothing.fileno(), 0)
    die_with_the_parent(connection.fileno())
    file = Path(sys.argv[1])
    try:
        made = _loaded(file, sys.argv[2])()
    except BaseException as error:
        send(connection, _failed(error, file, "loading it"), b"")
        return
    send(connection, {"model": made.model}, b"")
    calls: dict[int, Endpoint] = {}
    while (message := receive(connection)) is not None:
        head, body = message
        if head["call"] == "forget":
            calls.pop(head["id"], None)
            continue
        try:
            answer, given = _WORK[head["call"]](made, calls, head, body)
        except BadRequest as error:
            answer, given = {"refused": str(error)[:_MOST_WORDS]}, b""
        except Exception as error:
            answer, given = _failed(error, file, head["call"]), b""
        send(connection, answer, given)


def _loaded(file: Path, name: str) -> type[Endpoint]:
    sys.path.insert(0, str(file.parent))  # of modules beside it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Endpoint)):
        raise TypeError(f"{file.name} has no class {name} that is a halfeven.Endpoint")
    return kind


def _preprocess(made: Endpoint, calls: dict[int, Endpoint], head: Head, body: bytes) -> tuple[Head, bytes]:
    one = copy.copy(made)
    given = one.preprocess(parse(body) if head["json"] else body)
    try:
        arrays = _arrays(given, head["inputs"])
    except TypeError as error:
        if type(one).preprocess is not Endpoint.preprocess:
            raise
        # No code of the operator's has touched the request: the caller gave what does not fit.
        raise BadRequest(f"the request goes to the model unchanged, and {error}") from None
    tensors, headers = write_binary(arrays)
    calls[head["id"]] = one
    return {"length": headers[HEADER_LENGTH]}, tensors


def _postprocess(made: Endpoint, calls: dict[int, Endpoint], head: Head, body: bytes) -> tuple[Head, bytes]:
    outputs = read_outputs(body, head["length"])
    one = calls.pop(head["id"])
    answer = one.postprocess(next(iter(outputs.values())) if len(outputs) == 1 else outputs)
    if isinstance(answer, bytes):
        return {"kind": "application/octet-stream"}, answer
    return {"kind": _JSON}, orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


_WORK = {"preprocess": _preprocess, "postprocess": _postprocess}


def _arrays(given: Any, datatypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The inputs that the code gave. Raises TypeError for what no caller of such code can have caused: other names,
    other datatypes, nothing."""
    if not isinstance(given, Mapping):
        if len(datatypes) != 1:
            raise TypeError(f"it gave no inputs by name: expected a dictionary of {[*datatypes]}")
        given = {next(iter(datatypes)): given}
    if given.keys() != datatypes.keys():
        raise TypeError(f"it gave the inputs {[*given]}: expected {[*datatypes]}")
    return {name: _array(given[name], name, datatype) for name, datatype in datatypes.items()}


def _array(value: Any, name: str, datatype: str) -> np.ndarray:
    """The value, which is an array of numpy, a tensor of torch or numbers in lists, as an array of numpy."""
    if isinstance(value, list | int | float):
        try:
            return array_of(value, DATATYPES[datatype], f"input '{name}'")
        except BadRequest as error:
            raise TypeError(f"it gave lists that are no array: {error}") from None
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if (came := name_of(array.dtype)) != datatype:
        what = "None" if value is None else came
        raise TypeError(f"it gave {what} for the input '{name}': expected an array of {datatype}")
    return array


def _failed(error: BaseException, file: Path, where: str) -> Head:
    """The answer to a call that failed. The server logs the traceback."""
    text = "".join(traceback.format_exception(error)).encode(errors="replace").decode()
    return {"failed": _sentence(error, file, where), "traceback": text[-_MOST_TRACEBACK:]}


def _sentence(error: BaseException, file: Path, where: str) -> str:
    """The error in one sentence, with the last line of the operator's file that it passed."""
    lines = [
        one.lineno
        for one in traceback.extract_tb(error.__traceback__)
        if Path(one.filename).name == file.name
    ]
    place = f" ({file.name}, line {lines[-1]})" if lines else ""
    return f"{where} raised {type(error).__name__}: {error}"[:_MOST_WORDS] + place


if __name__ == "__main__":
    main()
