"""All errors of halfeven, as one tree. No HTTP and no exit codes here: the error
mapping (`serve/http/error_mapping.py`, `serve/cli/`) translates each class into a status or an exit code.

The first sentence of each class says what it means, the others what to do: docs/reference/errors.md is made of them.
Every message says what was wrong, what was expected, what came, and what to do.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from .nearest_name import nearest_name

_LONGEST_NAME, _FEW_NAMES = 128, 10


class HalfevenError(Exception):
    """The root of the tree. ``code`` is stable: machines match on it, people read the message."""

    code = "error"


class BadInput(HalfevenError):
    """The input or the command is wrong, and the caller can correct it. Change what the message names."""

    code = "bad_input"

    def __init__(self, message: str = "", param: str | None = None) -> None:
        """``param`` names the part of a request that is at fault, for callers that read it by itself."""
        super().__init__(message)
        self.param = param


class BadFolder(BadInput):
    """model.toml, or a file of the model folder, is wrong. Correct the key or the file that the message names."""

    code = "bad_model_folder"


class BadSamples(BadInput):
    """A sample or a target does not fit the model. Compare its name, shape and datatype with those that the message
    expects."""

    code = "bad_samples"


class NotRun(BadSamples):
    """ONNX Runtime does not run the file with a sample, or gives other outputs than model.toml says. Give samples that
    it runs with (--samples), or correct model.toml."""

    code = "not_run"


class BadRequest(BadInput):
    """A prediction request does not fit the model. GET /v2/models/NAME says which inputs it takes."""

    code = "bad_request"


class TooLarge(BadInput):
    """A size, depth or count is beyond its bound. Send less at once, or raise the setting that the message names."""

    code = "too_large"


class UnknownName(BadInput):
    """There is no model, version or file of that name. `halfeven models` lists what there is; the message names the
    nearest.

    Of a model the message is for who may read the store; `words_for` is for others."""

    code = "not_found"
    model: str | None = None
    known: tuple[str, ...] = ()
    said = ""

    @classmethod
    def of_model(cls, name: str, known: Iterable[str], said: str) -> "UnknownName":
        """No model of that name in a store that has the ``known`` ones. ``said``: the sentence; {} is the name."""
        error = cls()
        error.model, error.known, error.said = name, tuple(known), said
        return error

    def after(self, words: str) -> "UnknownName":
        """This error with ``words`` before its sentence. A new one with the text of this one would name every model to
        every reader."""
        if self.model is None:
            return UnknownName(words + str(self))
        return UnknownName.of_model(self.model, self.known, words + self.said)

    def __str__(self) -> str:  # of a thousand names the nearest one takes milliseconds: only where it is read
        return super().__str__() if self.model is None else self.words_for(lambda _: True)

    def words_for(self, reaches: Callable[[str], bool]) -> str:
        """The message for a reader who may know of the models for which ``reaches`` is true."""
        if self.model is None:
            return str(self)
        return _unknown_model(self.model, filter(reaches, self.known), self.said)


def _unknown_model(name: str, known: Iterable[str], said: str) -> str:
    seen, unknown = sorted(known), said.replace("{}", name[:_LONGEST_NAME])
    if not seen:
        return unknown
    if len(seen) <= _FEW_NAMES:
        return f"{unknown}: it has {seen}"
    return f"{unknown}: the nearest name is '{nearest_name(name[:_LONGEST_NAME], seen)}'"


class Conflict(BadInput):
    """The state of the store does not allow it. Look at `halfeven models`, then ask for what it allows."""

    code = "conflict"


class Unauthenticated(BadInput):
    """The request has no key, or one that this server does not know. Send one: HALFEVEN_API_KEY for the command line,
    `Authorization: Bearer KEY` over HTTP. `halfeven keys` makes and lists keys."""

    code = "unauthenticated"


class Forbidden(BadInput):
    """The request's key does not allow this. Use a key with the scope and for the model that the message names."""

    code = "forbidden"


class Unforeseen(BadInput):
    """A file cannot be read, for a reason that its reader does not know, and is refused. The log has the traceback;
    write the file anew."""

    code = "unreadable"


class BadSetting(BadInput):
    """An option or an environment variable has a wrong value. Give one that the message expects; the reference lists
    all."""

    code = "bad_setting"


@contextmanager
def packages_asked_for() -> Iterator[None]:
    """Raises BadSetting, which says what to install, where the block imports a package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise BadSetting(
            f"this needs the package '{error.name}', which is not installed: the installation for ONNX files alone "
            "lacks it (docs/export.md); install all of halfeven: pip install . in its folder"
        ) from error


class CannotConvert(HalfevenError):
    """The model as it is has no half form. Do what the message says, or serve it in FP32 (--level O0)."""

    code = "cannot_convert"


class CaptureFailed(CannotConvert):
    """The model's code raised, hung, took too much memory, or cannot be traced. Change the line that the message names,
    or serve the module by --form live."""

    code = "capture_failed"


class ExportFailed(CannotConvert):
    """The program cannot be written in that form. Choose another --form."""

    code = "export_failed"


class OrderEnded(CannotConvert):
    """A bound that protects the machine ended the work: there is no verdict, nothing is published. The message names
    the bound and the setting that raises it.

    How busy or small a machine is never decides a plan, a form or a verdict (`order/one_order.py`)."""

    code = "order_ended"


class OutOfTime(OrderEnded):
    """A conversion took longer than it may. Raise HALFEVEN_CONVERT_SECONDS."""

    code = "out_of_time"


class OutOfMemory(OrderEnded):
    """A conversion needed more memory than it may. Raise HALFEVEN_CONVERT_MEMORY_MIB, or take a larger machine."""

    code = "out_of_memory"


class ParityRefused(HalfevenError):
    """The half is not equal to FP32. The report says where; keep those nodes, choose a lower level, or serve FP32."""

    code = "parity_refused"


class StoreError(HalfevenError):
    """A file of the store cannot be used. The message names the file."""

    code = "store_error"


class StoreUnusable(StoreError):
    """The store's folder is a file, or this user may not read or write it. Choose another --store, or change
    its rights."""

    code = "store_unusable"


class DiskFull(StoreError):
    """Nothing more can be written there, and nothing was changed. Make room, then ask again."""

    code = "disk_full"


class DamagedFile(StoreError):
    """A file is missing, or is not what its manifest says. Take the version from a backup, or convert it again."""

    code = "damaged_file"


class NewerFormat(DamagedFile):
    """A later release wrote the file, and this release cannot know what it means. Install that release."""

    code = "newer_format"


class CannotServe(HalfevenError):
    """The server cannot answer, and the request is not at fault. Ask later; the server's log says more."""

    code = "cannot_serve"


class Overloaded(CannotServe):
    """The queue is full. Ask again after the seconds of Retry-After, or raise the queue's limits ([batching]).

    ``retry_after_s``: how long the waiting work will take."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KeyLimitReached(Overloaded):
    """The key sends more requests per second, or at once, than it may. Ask again after the seconds of Retry-After."""

    code = "key_limit_reached"


class TimedOut(CannotServe):
    """The request waited longer than its own timeout, and was not run. Ask again, or with a longer timeout."""

    code = "timed_out"


class NotReady(CannotServe):
    """The server starts, ends, or has no active version of the model. /v2/health/ready says why."""

    code = "not_ready"


class EndpointFailed(CannotServe):
    """The operator's preprocess or postprocess raised, ended its process, or gave what cannot be sent. The server's log
    has the traceback; correct its code."""

    code = "endpoint_failed"


class EndpointTimedOut(EndpointFailed):
    """A call of the operator's preprocess or postprocess took too long and was ended. Raise
    HALFEVEN_ENDPOINT_SECONDS."""

    code = "endpoint_timed_out"


class EngineFailed(CannotServe):
    """The device or the runtime raised while it ran a batch. The server's log says what; other requests go on."""

    code = "engine_failed"
