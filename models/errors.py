"""All errors of halfeven, as one tree. No HTTP and no exit codes here: the error
mapping (`serve/http/error_mapping.py`, `serve/cli/`) translates each class into a status or an exit code.

    HalfevenError                       anything of ours that a caller may want to catch
    ├── BadInput                        the caller can correct it
    │   ├── BadFolder                   model.toml or a file of the model folder
    │   ├── BadSamples                  a sample or target tensor that does not fit the model
    │   ├── BadRequest                  a prediction request that does not fit the model
    │   ├── TooLarge                    a size, depth or count beyond its bound
    │   ├── UnknownName                 no model, version or file of that name
    │   ├── Conflict                    the state of the store does not allow it
    │   ├── Unauthenticated             the request has no key, or one that this server does not know
    │   ├── Forbidden                   its key does not allow this
    │   ├── Unforeseen                  a file that a reader cannot read, and does not know why
    │   └── BadSetting                  an option or environment variable
    ├── CannotConvert                   the model as it is has no half form
    │   ├── CaptureFailed               user code raised, hung, ate memory, or cannot be traced
    │   ├── ExportFailed                the program cannot be written in that form
    │   └── OrderEnded                  a bound that protects the machine ended it: no verdict, nothing published
    │       ├── OutOfTime               its time
    │       └── OutOfMemory             its memory
    ├── ParityRefused                   the half is not equal; the report says where
    ├── StoreError                      the store on disk
    │   ├── StoreUnusable               its folder is a file, or this user may not read or write it
    │   ├── DiskFull                    nothing more can be written there
    │   └── DamagedFile                 a file is missing or is not what its manifest says
    └── CannotServe                     the server's fault, not the caller's
        ├── Overloaded                  the queue is full: retry later
        │   └── KeyLimitReached         the key's own limit is reached: retry later
        ├── TimedOut                    the request's own timeout passed while it waited
        ├── NotReady                    starting, draining or without an active version
        └── EngineFailed                the device or the runtime raised while running a batch

Every message says what was wrong, what was expected, what came, and what to do.
"""

from collections.abc import Callable, Iterable

from .nearest_name import nearest_name

_LONGEST_NAME, _FEW_NAMES = 128, 10


class HalfevenError(Exception):
    """The root of the tree. ``code`` is stable: machines match on it, people read the message."""

    code = "error"


class BadInput(HalfevenError):
    code = "bad_input"


class BadFolder(BadInput):
    code = "bad_model_folder"


class BadSamples(BadInput):
    code = "bad_samples"


class NotRun(BadSamples):
    """ONNX Runtime does not run a file with a sample, or gives other outputs than model.toml says."""

    code = "not_run"


class BadRequest(BadInput):
    code = "bad_request"


class TooLarge(BadInput):
    code = "too_large"


class UnknownName(BadInput):
    """No model, version or file of that name. Of a model the message is for who may read the store; `words_for` is for
    others."""

    code = "not_found"
    model: str | None = None
    known: tuple[str, ...] = ()
    said = "no model '{}' in the store"

    @classmethod
    def of_model(cls, name: str, known: Iterable[str], said: str = said) -> "UnknownName":
        """No model of that name in a store that has the ``known`` ones. ``said``: the sentence; {} is the name."""
        error = cls()
        error.model, error.known, error.said = name, tuple(known), said
        return error

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
    code = "conflict"


class Unauthenticated(BadInput):
    code = "unauthenticated"


class Forbidden(BadInput):
    code = "forbidden"


class Unforeseen(BadInput):
    """A reader met a stranger's bytes that it did not foresee: the file is refused, and the log has the traceback
    (`guarded_reading.py`)."""

    code = "unreadable"


class BadSetting(BadInput):
    code = "bad_setting"


class CannotConvert(HalfevenError):
    code = "cannot_convert"


class CaptureFailed(CannotConvert):
    code = "capture_failed"


class ExportFailed(CannotConvert):
    code = "export_failed"


class OrderEnded(CannotConvert):
    """A bound that protects the machine ended the work: how busy or small a machine is never decides a plan, a form or
    a verdict. The message names the bound and the setting that raises it (`one_order.py`)."""

    code = "order_ended"


class OutOfTime(OrderEnded):
    code = "out_of_time"


class OutOfMemory(OrderEnded):
    code = "out_of_memory"


class ParityRefused(HalfevenError):
    code = "parity_refused"


class StoreError(HalfevenError):
    code = "store_error"


class StoreUnusable(StoreError):
    code = "store_unusable"


class DiskFull(StoreError):
    code = "disk_full"


class DamagedFile(StoreError):
    code = "damaged_file"


class NewerFormat(DamagedFile):
    """A later release wrote the file: it is whole, and this release cannot know what it means."""

    code = "newer_format"


class CannotServe(HalfevenError):
    code = "cannot_serve"


class Overloaded(CannotServe):
    """The queue is full. ``retry_after_s`` is how long the waiting work will take, in seconds."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KeyLimitReached(Overloaded):
    """The key sends more requests per second, or at once, than it may."""

    code = "key_limit_reached"


class TimedOut(CannotServe):
    """The request waited longer than its own timeout, and was not run."""

    code = "timed_out"


class NotReady(CannotServe):
    code = "not_ready"


class EngineFailed(CannotServe):
    code = "engine_failed"
