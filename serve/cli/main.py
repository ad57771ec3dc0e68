"""The command line. Each command is one thin function; ``--json`` makes the last line on stdout one object."""

import locale
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Group as Lines
from rich.text import Text

from ...models.errors import BadSetting
from ...models.machine.usable_cores import prepare_libraries
from ...models.version import __version__
from ..http.error_mapping import EXIT_CODES
from ..logs import make_all_stderr_json
from .bringing import import_models, init, samples
from .console import (
    DEFAULT_STORE,
    LOCAL,
    Command,
    CommandGroup,
    Ended,
    StoreAt,
    Url,
    check_target,
    command,
    notify,
    order,
    progress,
)
from .difference_commands import diff, export, index_check, prove
from .half_file_commands import check, fp16, lock, verify
from .key_commands import app as keys
from .measuring import bench, doctor, selftest, tune
from .serve_command import serve
from .server_commands import canary, cancel, jobs, load, shadow, status, unload
from .store_commands import backup, models, promote_version, rollback
from .training import finetune, job_metrics, lint, reproduce

_EXITS = "\n\n".join(
    [
        "Exit codes:",
        *(f"{code}: {meaning}" for code, meaning in EXIT_CODES.items()),
        "Reference: docs/commands.md",
    ]
)
Keep = Annotated[list[str] | None, typer.Option(help="Keep in FP32: op:NAME, node or module path.")]
NewSignature = Annotated[bool, typer.Option("--new-signature", help="Inputs or outputs changed.")]
Search = Annotated[bool | None, typer.Option(help="Look for nodes to keep at O3 too, or at no level.")]
NameOfFile = Annotated[
    str | None, typer.Option(help="The model's name, for a bare file; default: the file's.")
]
Patches = Annotated[
    Path | None,
    typer.Option(help="Also try changes of the source that let kept nodes be half; write what gains here."),
]
_IN_UTF8 = ["-X", "utf8"]
app = typer.Typer(
    name="halfeven",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=CommandGroup,
    epilog=_EXITS,
)


def use_utf8() -> None:
    """Begin this process again in Python's UTF-8 mode, where the locale has another encoding; its terminal keeps the
    locale's, with a question mark for what that lacks. Child processes inherit both."""
    encoding = locale.getencoding()
    if sys.flags.utf8_mode or encoding.lower().replace("-", "") == "utf8" or sys.orig_argv[1:3] == _IN_UTF8:
        return
    os.environ["PYTHONUTF8"] = "1"
    os.environ.setdefault("PYTHONIOENCODING", f"{encoding}:replace")
    # By option too: with -E or -I Python reads no variable, and of two such options it takes the first.
    os.execv(sys.executable, [sys.executable, *_IN_UTF8, *sys.orig_argv[1:]])


def open_streams() -> None:
    """Open what the caller closed (``>&-``): a file that is opened later would get its number, and our lines."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


def main() -> None:
    """The console script. Errors of ours end as one sentence on stderr and an exit code."""
    open_streams()
    use_utf8()
    if sys.argv[1:2] == ["serve"] and _log_format(sys.argv, os.environ) == "json":
        make_all_stderr_json()  # before a wrong option is refused, and any library that writes to stderr is imported
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    prepare_libraries()  # its warnings need the log
    app()


def _log_format(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The form that the log is asked for in: by the last such option, or by the variable."""
    found = [value for name, value in environment.items() if name.upper() == "HALFEVEN_LOG_FORMAT"]
    for word, after in pairwise([*words, ""]):
        name, given, value = word.partition("=")
        found += [value if given else after] if name == "--log-format" else []
    return found[-1] if found else None


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"halfeven {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Half precision, even answers: an inference server that proves FP16 equal before it serves it."""


@order
def convert(
    folder: Annotated[Path, typer.Argument(help="A model folder with a model.toml, or a bare model.")],
    store: StoreAt = DEFAULT_STORE,
    form: Annotated[str | None, typer.Option(help="auto, torch, onnx, both or live; default auto.")] = None,
    level: Annotated[str | None, typer.Option(help="O0 to O3, or Keras' words.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp16 or bf16.")] = None,
    keep: Keep = None,
    samples: Annotated[Path | None, typer.Option(help="Samples instead of the folder's.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the HTML report here.")] = None,
    new_signature: NewSignature = False,
    search: Search = None,
    device: Annotated[str, typer.Option(help="Whose kernels the plan asks: auto, cpu or cuda:N.")] = "cpu",
    name: NameOfFile = None,
    patches: Patches = None,
) -> Ended:
    """Capture, convert, prove and publish a model folder, or a bare file (`init` tells which)."""
    from ...exporters.guessing.bare import folder_at

    check_target("--report", report)
    if not folder.exists():
        folder_at(folder)  # says so before torch is imported
    from ...exporters.conversion.convert import Options, convert
    from ...exporters.report.page import render_terminal
    from ...exporters.report.stored_page import stored_page
    from ...models.engines.device_choice import device_name
    from ..versions.versions_in_store import store_at
    from .convert_ending import ending

    options = Options(
        *(_forms(form), level, dtype, tuple(keep or ()), samples, new_signature),
        search=None if search is False else bool(search),
        device=device_name(device),
        all_forms=form == "both",
        name=name,
    )
    if patches is not None:
        from ...exporters.patches.patch_files import check_patches_asked

        check_patches_asked(folder, patches, options)
    with progress("converting") as show:
        done = convert(folder, opened := store_at(store, "the new version"), options, show)
        gained, said = {}, []
        if report is not None:
            report.write_text(stored_page(done.version))
        if patches is not None:
            from ...exporters.patches.patch_files import patch_sentences, try_patches

            gained = {"patches": try_patches(folder, done, opened, options, patches, show)}
            said = patch_sentences(gained["patches"])
    if done.unchanged:
        notify(f"{done.version}: the folder has not changed since; no new version")
    passed = done.any_passed if form in (None, "auto") else done.asked_passed
    refused = 3 if any("error" not in f for f in done.facts["forms"].values() if not f["passed"]) else 4
    shown = Lines(
        render_terminal(done.shown()),
        *map(Text, ["", *said]),
        *map(Text, ending(done.version, opened, folder, store, report)),
    )
    return {**done.facts, **gained}, shown, 0 if passed else refused


def _forms(word: str | None) -> tuple[str, ...]:
    known = {None: ("torch", "onnx"), "auto": ("torch", "onnx"), "both": ("torch", "onnx")}
    known |= {name: (name,) for name in ("torch", "onnx", "live")}
    if word not in known:
        raise BadSetting(f"--form {word!r}: expected one of auto, torch, onnx, both, live")
    return known[word]


@order
def parity(
    target: Annotated[str, typer.Argument(help="A model folder, or NAME or NAME@VERSION in the store.")],
    store: StoreAt = DEFAULT_STORE,
    samples: Annotated[Path | None, typer.Option(help="Judge with these instead of the stored ones.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    limit: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE: judge the saved numbers under it; runs nothing.")
    ] = None,
) -> Ended:
    """Run the parity gate again and print it; with --limit, only judge the stored numbers."""
    from ...exporters.report.page import render_terminal
    from ..versions.versions_in_store import store_at
    from .parity_command import judge_again, judge_saved

    if limit and (samples is not None or device != "auto"):
        raise BadSetting("--limit runs nothing: give it without --samples and --device")
    if limit:
        facts = judge_saved(target, store_at(store), limit)
    else:
        facts = judge_again(target, store_at(store), samples, device, notify)
    # A form that cannot be made, or was refused when it was converted, was not judged now.
    judged = [form for form in facts["forms"].values() if form.get("parity")]
    return facts, render_terminal(facts), 0 if all(form["passed"] for form in judged) else 3


@command
def predict(
    name: Annotated[str, typer.Argument(help="NAME (the version that the server chooses) or NAME@VERSION.")],
    file: Annotated[
        Path,
        typer.Argument(
            help='PNG, JPEG, npy, npz, safetensors, or JSON: {"INPUT": nested lists} or {"instances": [...]}.'
        ),
    ],
    url: Url = LOCAL,
    answer: Annotated[Path | None, typer.Option("--out", help="Write a .png, .npy or .npz instead.")] = None,
) -> Ended:
    """Send a picture or a file's tensors to a running server and print the answers."""
    from .client import predict_file

    facts = predict_file(url, name, file, answer)
    return facts, orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode(), 0


@command
def demo(
    keep_store: Annotated[
        Path | None, typer.Option("--store", help="Keep the store and reports here.")
    ] = None,
) -> Ended:
    """Convert, prove, serve and fine-tune on real handwritten digits, in under two minutes on two cores."""
    from .demo import run_demo

    facts, table = run_demo(keep_store, notify)
    return facts, table, 0 if facts["passed"] else 1


# The order is that of `halfeven --help`.
_GROUPS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Start": (demo, doctor, selftest),
    "Models: convert, prove, hand on": (
        convert,
        init,
        import_models,
        parity,
        samples,
        export,
        prove,
    ),
    "Proofs of files, and over upgrades": (fp16, verify, lock, check, diff, index_check),
    "Versions in a store": (models, promote_version, rollback, backup),
    "Serve": (serve, tune, bench),
    "Ask and order a running server": (status, predict, canary, shadow, load, unload),
    "Fine-tune": (finetune, jobs, cancel, job_metrics, reproduce, lint),
}
_NAMES = {import_models: "import", promote_version: "promote", index_check: "index-check"}
for _group, _commands in _GROUPS.items():
    for _command in _commands:
        app.command(_NAMES.get(_command), cls=Command, rich_help_panel=_group)(_command)
app.add_typer(keys, rich_help_panel="Serve")

if __name__ == "__main__":
    main()
