"""Every command prints and ends here: people read stderr, ``--json`` makes the last line on stdout one object."""

import errno
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Column, Table
from typer.core import TyperCommand, TyperGroup

from ...models.errors import BadSetting, HalfevenError, packages_asked_for
from ...models.files.home_folder import at_home
from ...models.order.one_order import one_order
from ...models.order.order_settings import order_bounds
from ..access.client_key import VARIABLE, use_key, use_key_in
from ..http.error_mapping import exit_code_of

# All control characters but tab and line feed: C0, DEL and C1. Names in a file and a server's words can have them.
_CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\N{REPLACEMENT CHARACTER}") | {
    9: "\t",
    10: "\n",
}
_AS_JSON = "halfeven.as_json"  # in the context of a command line
_NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*")
_UsageError: Any = typer.BadParameter.__mro__[1]  # typer has no public name for it
Ended = tuple[Mapping[str, Any], Any, int]  # the facts, the text for people, the exit code


class _Terminal(Console):
    """Shows control characters of a text as replacement characters: a terminal would obey them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(_CONTROL))


# Without emoji: FILE.py:X: is a file and a class.
errors = _Terminal(stderr=True, highlight=False, soft_wrap=True, emoji=False)
out = _Terminal(highlight=False, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line on stdout.")]
StoreAt = Annotated[Path, typer.Option("--store", envvar="HALFEVEN_STORE", help="The folder of the store.")]
DEFAULT_STORE = Path("halfeven-store")
LOCAL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option("--url", help="The server.")]


def _taken(use: Callable[[Any], None]) -> Callable[[Any], None]:
    """A callback of an option, whose value is used at once, and whose error is one of usage."""

    def take(value: Any) -> None:
        try:
            use(_at_home(value))
        except BadSetting as error:
            raise typer.BadParameter(str(error)) from None

    return take


# Every request of this process sends the key that these options give (`access/client_key.py`); the commands do not read
# them.
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        callback=_taken(use_key),
        expose_value=False,
        help=f"The server's API key; others on this machine can see it here. Default: {VARIABLE}.",
    ),
]
KeyFileOf = Annotated[
    Path | None,
    typer.Option(
        "--key-file", callback=_taken(use_key_in), expose_value=False, help="A file that has the key alone."
    ),
]


def command(work: Callable[..., Ended]) -> Callable[..., None]:
    """The command that does this work, as typer reads it: ``--json`` is added, and beside ``--url`` the options of the
    key. A command whose work asks for ``as_json`` gets it."""
    return _as_typer_reads(work, finish)


def order(work: Callable[..., Ended]) -> Callable[..., None]:
    """`command` for work that runs what strangers made, bounded as one order (`models/order/one_order.py`)."""
    return _as_typer_reads(work, _finish_order)


def _as_typer_reads(
    work: Callable[..., Ended], end: Callable[[Callable[[], Ended], bool], None]
) -> Callable[..., None]:
    own = inspect.signature(work).parameters
    options = {name: (one.annotation, one.default) for name, one in own.items() if name != "as_json"}
    if "url" in own and own["url"].annotation == Url:
        options |= {"key": (Key, None), "key_file": (KeyFileOf, None)}
    options["as_json"] = (Json, False)

    @wraps(work)
    def run(**given: Any) -> None:
        end(lambda: work(**{name: _at_home(given[name]) for name in own}), given["as_json"])

    kind = inspect.Parameter.KEYWORD_ONLY
    listed = [
        inspect.Parameter(name, kind, default=default, annotation=of)
        for name, (of, default) in options.items()
    ]
    run.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    run.__annotations__ = {name: of for name, (of, _) in options.items()}
    return run


def _at_home(value: Any) -> Any:
    return at_home(value) if isinstance(value, Path) else value


def _finish_order(work: Callable[[], Ended], as_json: bool) -> None:
    def end(error: HalfevenError) -> None:
        try:
            _print_error(error, as_json)
            sys.stderr.flush()
        finally:
            os._exit(exit_code_of(error))  # with its children; no code of a library can be interrupted

    def within_bounds() -> Ended:
        with (
            one_order(order_bounds()) as bounded,
            bounded.watched(end),
            bounded.bounds_this_process("the work"),
        ):
            return work()

    finish(within_bounds, as_json)


def finish(work: Callable[[], Ended], as_json: bool) -> None:
    """Do a command's work and end the process as it says. The one place that ends a command."""
    try:
        with packages_asked_for():
            facts, shown, code = work()
    except KeyboardInterrupt:
        errors.print("interrupted; nothing half-written is left behind")
        raise typer.Exit(1) from None
    except (HalfevenError, OSError) as error:
        _print_error(error, as_json)
        raise typer.Exit(exit_code_of(error)) from None
    with _written():
        if as_json:
            print_json(facts)
        elif isinstance(shown, str):
            sys.stdout.write(f"{shown.translate(_CONTROL)}\n")  # tabs and long lines are the text's own
        elif shown is not None:
            out.print(shown)
        sys.stdout.flush()
    raise typer.Exit(code)


@contextmanager
def _written(failed: int = 0) -> Iterator[None]:
    """Ends the process where stdout takes no more, as on a full disk: with exit code 1 and one sentence, or with that
    of the work that ``failed``."""
    try:
        yield
    except OSError as error:
        _into_nothing(1)
        if not failed and error.errno != errno.EPIPE:  # a reader that closed the pipe wants no more
            errors.print(
                f"error: stdout cannot be written ({error.strerror}), so the result is not shown whole; the work "
                "is done",
                markup=False,
            )
        raise typer.Exit(failed or 1) from None


def _into_nothing(number: int) -> None:
    """Send stdout (1) or stderr (2) to /dev/null: at its end the process writes what is left in the buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _print_error(error: HalfevenError | OSError, as_json: bool) -> None:
    code = error.code if isinstance(error, HalfevenError) else "file_error"
    message = str(error) if isinstance(error, HalfevenError) else _of_the_system(error)
    try:
        errors.print(f"error: {message}", markup=False)
    except (OSError, SystemExit):  # rich ends the process at a closed pipe
        _into_nothing(2)
    if as_json:
        with _written(exit_code_of(error)):
            print_json(_failure(message, code))


def _failure(message: str, code: str) -> dict[str, Any]:
    return {"error": message, "code": code, "status": "failed", "forms": {}}


def listing(*columns: str, whole: str = "") -> Table:
    """A table that loses no character where it is narrow: a long word goes on in the next line, but not one of the
    column ``whole``, which is copied into other commands."""
    return Table(*(Column(one, overflow="fold", no_wrap=one == whole) for one in columns), box=SIMPLE_HEAD)


def check_target(option: str, file: Path | None, replaces: bool = False) -> None:
    """Raises BadSetting, before long work whose result goes into ``file``, where that cannot be written. ``replaces``:
    a new file takes its place, for which the folder is what must be writable."""
    if file is None:
        return
    folder = file.parent
    written = file if file.exists() and not replaces else folder
    # Not even /dev/null may be replaced, which can be written.
    in_the_way = file.exists() and not file.is_file() if replaces else file.is_dir()
    if in_the_way or not folder.is_dir() or not os.access(written, os.W_OK):
        raise BadSetting(f"{option} {file}: expected a file in a folder that is there and may be written")


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is done now: the function replaces it. Brackets in it are the text's own. Without
    a terminal each stage has a line of its own; sentences that differ only in their numbers are one stage."""
    if not errors.is_terminal:
        yield _lines()
        return
    with errors.status(first) as status:
        yield lambda sentence: status.update(escape(sentence))


def _lines() -> Callable[[str], None]:
    shown = ""

    def show(sentence: str) -> None:
        nonlocal shown
        stage = _NUMBER.sub("", sentence)
        if stage != shown:
            notify(sentence)
            shown = stage

    return show


def _of_the_system(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):  # its file name may be that of what was copied
        return f"{error.strerror}: free some, or give a folder on another disk (--store, TMPDIR, or the file)"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; give a file or folder that this user may read and write"


def print_json(facts: Mapping[str, Any]) -> None:
    try:
        line = orjson.dumps(facts, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:
        line = orjson.dumps(_as_utf8(facts), option=orjson.OPT_NON_STR_KEYS)
    sys.stdout.write(line.decode() + "\n")
    sys.stdout.flush()


def _as_utf8(value: Any) -> Any:
    """The value with a replacement character for each byte of a file name that is no UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {_as_utf8(key): _as_utf8(one) for key, one in value.items()}
    return [_as_utf8(one) for one in value] if isinstance(value, list | tuple) else value


def notify(sentence: str) -> None:
    errors.print(sentence, markup=False)


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """The commands. With ``--json`` a usage error is one object on stdout too."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with _usage_as_json("--json" in args and parent is None):
            ctx = super().make_context(info_name, args, parent, **extra)
        ctx.meta[_AS_JSON] = "--json" in args
        return ctx

    def invoke(self, ctx: Any) -> Any:
        with _usage_as_json(ctx.meta.get(_AS_JSON, False) and ctx.parent is None):
            return super().invoke(ctx)

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


@contextmanager
def _usage_as_json(asked: bool) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        wrong: Any = error
        if asked and isinstance(error, _UsageError):
            with suppress(typer.Exit), _written(2):  # the sentence is still printed
                print_json(_failure(wrong.format_message(), "bad_usage"))
        raise


def _without_types_of_flags(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
