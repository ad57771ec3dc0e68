"""The commands about training: at a server, once more here, and ``halfeven lint``, which reads training scripts."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ...models.errors import BadInput, BadSetting
from .console import DEFAULT_STORE, LOCAL, Ended, StoreAt, Url, command, errors, notify
from .store_commands import version_named

Published = Callable[[Mapping[str, Any]], Mapping[str, Any]]
AnySetting = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting as NAME=VALUE, 'schedule=linear'; may be repeated."),
]
CheckpointEvery = Annotated[
    int | None, typer.Option(help="Steps between two evaluations, each with a checkpoint.")
]
Patience = Annotated[int | None, typer.Option(help="End after so many evaluations without a gain; 0: never.")]
BadRows = Annotated[
    str | None, typer.Option(help="Rows with NaN and the like: refuse, or quarantine (leave out).")
]
Trainable = Annotated[
    list[str] | None, typer.Option(help="Train only parameters named so, 'head.*'; may be repeated.")
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(help="Run a job for each combination, 'lr=1e-3,1e-4', and compare; may be repeated."),
]
Compare = Annotated[
    bool, typer.Option("--compare", help="With --dry-run: compare a few steps in fp32, fp16 and bf16.")
]


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE by name; a value is JSON, or the word itself where it is none. Raises BadInput."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise BadInput(f"--set {word!r}: expected NAME=VALUE, such as schedule=linear")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


@contextmanager
def _trained_at(url: str, ray: str | None, name: str, follow: bool) -> Iterator[tuple[str, Published]]:
    """The server that trains, and what becomes of a job's facts at its end. ``ray``: an application on Ray Serve, for
    which a server of this process trains. Raises BadSetting, and as `own_server`."""
    if ray is None:
        yield url, lambda facts: facts
        return
    if not follow:
        raise BadSetting("--ray trains in this process, which ends with the job: leave --no-follow out")
    try:
        from ..ray.fine_tuning import connected, own_server
    except ImportError as error:
        raise BadSetting(
            f"--ray needs Ray, which cannot be imported ({error}): pip install 'halfeven[ray]'"
        ) from error
    with connected(ray) as writer, own_server(writer, name) as server:
        yield server.url, server.published


@command
def finetune(
    name: Annotated[str, typer.Argument(help="NAME (the active version) or NAME@VERSION.")],
    data: Annotated[Path, typer.Option("--data", help="Rows with target:OUTPUT, or a folder of pictures.")],
    validation: Annotated[Path | None, typer.Option(help="Held-out rows of your own.")] = None,
    url: Url = LOCAL,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Without it a range test finds it.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp16, bf16, fp32 or auto.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the split and the order of the rows.")] = None,
    stale_parent: Annotated[
        str | None, typer.Option(help="If another version is active at the end: refuse, rejudge or retrain.")
    ] = None,
    bad_rows: BadRows = None,
    checkpoint_every: CheckpointEvery = None,
    early_stopping_patience: Patience = None,
    trainable: Trainable = None,
    set_: AnySetting = None,
    sweep: Sweep = None,
    suffix: Annotated[str | None, typer.Option(help="A text of your own, kept with the job.")] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Watch until it ends.")] = True,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only check the job, and train two steps.")] = False,
    compare: Compare = False,
    ray: Annotated[
        str | None, typer.Option(metavar="APP", help="Train here, for this application on Ray Serve.")
    ] = None,
) -> Ended:
    """Fine-tune a model at a running server; Ctrl-C cancels the job."""
    from ..finetune.client.sweep import grid_of

    grid = grid_of(sweep or ())
    if sweep and dry:
        raise BadSetting("--dry-run tries one job: leave --sweep out")
    if compare and (not dry or precision is not None):
        raise BadSetting(
            "--compare chooses the precision of a --dry-run: give that, and leave --precision out"
        )
    asked = {"n_epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    asked |= {"precision": precision, "stale_parent": stale_parent, "bad_rows": bad_rows}
    asked |= {"trainable": trainable or None}
    asked |= {"checkpoint_every": checkpoint_every, "early_stopping_patience": early_stopping_patience}
    asked |= settings_of(set_ or ())
    more: Any = {"validation": validation, "seed": seed, "hyperparameters": asked}
    more |= {"notify": notify, "console": errors}
    with _trained_at(url, ray, name, follow) as (server, published):
        if dry:
            return _tried(server, name, data, compare, more)
        more |= {"suffix": suffix, "follow": follow}
        return _trained(server, published, name, data, grid if sweep else None, more)


def _tried(server: str, name: str, data: Path, compare: bool, more: Mapping[str, Any]) -> Ended:
    from ..finetune.client.dry_run import comparison_of, dry_run, dry_run_exit_code, dry_run_sentences

    facts = dry_run(server, name, data, compare=compare, **more)
    return facts, comparison_of(facts) if compare else dry_run_sentences(facts), dry_run_exit_code(facts)


def _trained(
    server: str, published: Published, name: str, data: Path, grid: Sequence[dict[str, Any]] | None,
    more: Mapping[str, Any],
) -> Ended:  # fmt: skip
    """One job, or one for each settings of ``grid``."""
    from ..finetune.client import sweep as sweeping
    from ..finetune.client.job_command import exit_code, fine_tune, sentence_of

    if grid is None:
        facts = published(fine_tune(server, name, data, **more))
        return facts, sentence_of(facts), exit_code(facts, more["follow"])
    found = [published(one) for one in sweeping.sweep(server, name, data, grid, **more)]
    facts = sweeping.summary_of(found)
    return facts, sweeping.table_of(facts), sweeping.sweep_exit_code(found, more["follow"])


@command
def job_metrics(
    job: Annotated[str, typer.Argument(help="The identifier of a fine-tuning job, ftjob-….")],
    tensorboard: Annotated[Path | None, typer.Option(help="Write an event file into a folder here.")] = None,
    mlflow: Annotated[Path | None, typer.Option(help="Write a run into this MLflow folder (mlruns).")] = None,
    url: Url = LOCAL,
) -> Ended:
    """Write the course of a fine-tuning job for TensorBoard or MLflow."""
    from ..finetune.client.job_record import facts_of_record, job_record, write_mlflow, write_tensorboard
    from ..finetune.client.remote import Remote

    if (tensorboard is None) == (mlflow is None):
        raise BadSetting("expected one of --tensorboard DIR and --mlflow DIR")
    record = job_record(Remote(url), job)
    if tensorboard is not None:
        written, way = write_tensorboard(record, tensorboard), f"tensorboard --logdir {tensorboard}"
    else:
        assert mlflow is not None
        written, way = (
            write_mlflow(record, mlflow),
            f"mlflow migrate-filestore takes {mlflow} into a database",
        )
    return facts_of_record(record, written), f"{written}\nnext: {way}", 0


@command
def reproduce(
    target: Annotated[str, typer.Argument(help="NAME@VERSION: a version that a fine-tuning job made.")],
    data: Annotated[Path | None, typer.Option(help="The job's rows, if they are not in the store.")] = None,
    validation: Annotated[Path | None, typer.Option(help="The job's held-out rows, likewise.")] = None,
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Train a version again from its recorded rows, settings and seed; 0 if the weights are the same, else 3."""
    from ...exporters.inputs.samples import MAX_BYTES
    from ..finetune.jobs.reproducing import reproduce, sentence_of
    from ..settings import largest_upload
    from ..versions.versions_in_store import store_at

    name, number = version_named(target)
    opened, most = store_at(store), max(MAX_BYTES, largest_upload())
    facts = reproduce(opened, opened.numbered(name, number), data, validation, notify, most)
    return facts, sentence_of(facts), 0 if facts["equal"] else 3


@command
def lint(
    scripts: Annotated[list[Path], typer.Argument(help="Python files, read as one program; none is run.")],
) -> Ended:
    """Name the mistakes of half precision in training scripts, each with the line to write instead."""
    from ..finetune.lint.lint import lint

    found = lint(scripts)
    lines = []
    for one in found:
        lines.append(f"{one.file}:{one.line}: {one.rule}: {one.message}")
        moved = (one.first, one.last) != (one.line, one.line)
        lines.append(f"    write in place of lines {one.first} to {one.last}:" if moved else "    write:")
        lines += [f"        {text}" for text in one.instead.splitlines()]
    files = f"{len(scripts)} file{'s' if len(scripts) > 1 else ''}"
    lines.append(f"{len(found)} finding{'' if len(found) == 1 else 's'} in {files}")
    facts = {"status": "found" if found else "clean", "findings": [asdict(one) for one in found]}
    return facts, "\n".join(lines), 3 if found else 0
