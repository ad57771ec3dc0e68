"""``halfeven.convert`` and ``halfeven.load``: the roads of the command line, for a program."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...exporters.conversion.convert import Options
from ...exporters.conversion.convert import convert as travel
from ...exporters.guessing.bare import folder_at, guessed_folder
from ...exporters.guessing.guess import Guess
from ...exporters.guessing.module_source import guess_module
from ...exporters.inputs.samples import TARGET
from ...models.engines.device_choice import device_name
from ...models.engines.true_fp32 import settings_kept
from ...models.errors import BadSamples, BadSetting
from ...models.folder.package import ModelFolder
from ...models.order.one_order import one_order
from ...models.order.order_settings import order_bounds
from ...models.spec.spec import KINDS
from ...models.store.store import Store
from ..cli.console import progress as progress_line
from ..versions.versions_in_store import version_called
from .arrays_given import Given, given_store, rows_in
from .half import Half

_NO_SOURCE = '"""This model was a module of a running program: no file builds it."""\n'
_ATTEMPTED = {"torch": ("torch",), "onnx": ("onnx",), "live": ("live",)}


def convert(
    model: nn.Module | str | os.PathLike[str],
    samples: Mapping[str, Given] | str | os.PathLike[str] | None = None,
    targets: Mapping[str, Given] | None = None,
    *,
    name: str | None = None,
    kind: str | Mapping[str, str] | None = None,
    form: str | None = None,
    level: str | None = None,
    dtype: str | None = None,
    keep: str | Sequence[str] = (),
    search: bool = False,
    device: str = "cpu",
    progress: bool = False,
    nodes_to_exclude: str | Sequence[str] = (),
    op_types_to_exclude: str | Sequence[str] = (),
    keep_io_types: bool = True,
    low_precision_type: str | None = None,
) -> Half:
    """Capture or read ``model``, plan its half and prove it equal, as ``halfeven convert`` does.

    ``model``: an ``nn.Module``, which is captured in this process, or the path of an ONNX file, an exported program
    (.pt2), a transformers folder or a model folder. ``samples``: inputs by name, the first axis counts the samples, or
    a file of them; a module needs them. ``targets``: right answers by output, by which fine-tuning is judged.
    ``kind``: of the outputs, as in model.toml. ``form``: ``torch``, ``onnx``, ``live``, ``both`` or ``auto``; a single
    form is the one that serves. By default it is ``torch``, and ``onnx`` for an ONNX file. ``keep``: patterns of nodes
    that stay in FP32 (``nodes_to_exclude``, ``op_types_to_exclude``: the same as other converters call it).

    A half that is not equal is an answer too: look at ``verdict``. Raises BadInput for what the caller can correct,
    CannotConvert where no half can be made.
    """
    narrow = _dtype(dtype, low_precision_type, keep_io_types)
    store = Path(tempfile.mkdtemp(prefix="halfeven-store-"))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="halfeven-model-") as scratch,
            one_order(order_bounds()),
            settings_kept(),
            progress_line("converting") if progress else nullcontext(lambda _: None) as show,
        ):
            asked = _Asked(model, samples, targets or {}, name, kind, Path(scratch))
            forms, folder = _forms(form, asked.folder())
            options = Options(
                forms, level, narrow,
                (*_several(keep), *_several(nodes_to_exclude), *(f"op:{op}" for op in _several(op_types_to_exclude))),
                asked.samples_file, search=search, device=device_name(device), all_forms=form == "both",
            )  # fmt: skip
            done = travel(folder, Store(store), options, show)
    except BaseException:
        shutil.rmtree(store, ignore_errors=True)
        raise
    return Half(done.version, Store(store), owned=True)


def _dtype(dtype: str | None, low_precision_type: str | None, keep_io_types: bool) -> str | None:
    """The half's datatype by either of its names. Raises BadSetting for words that halfeven has no meaning for."""
    if not keep_io_types:
        raise BadSetting(
            "keep_io_types=False: inputs and outputs always keep the datatypes of the model; leave it out"
        )
    if None not in (dtype, low_precision_type) and dtype != low_precision_type:
        raise BadSetting(
            f"dtype={dtype!r} and low_precision_type={low_precision_type!r} mean the same: give one of them"
        )
    return dtype or low_precision_type


def _several(patterns: str | Sequence[str]) -> Sequence[str]:
    """The patterns; a single one may be given without a list around it."""
    return (patterns,) if isinstance(patterns, str) else patterns


def _no_model(given: object) -> BadSetting:
    """The error for what is neither a module nor a path: what came, and what to give."""
    match given:
        case type():
            came = f"the class {given.__name__}: give a module that it builds, {given.__name__}(…)"
        case Mapping():
            came = "a dictionary: weights belong to a module, net.load_state_dict(…)"
        case nn.Parameter() | torch.Tensor():
            came = "a tensor"
        case _ if callable(given):
            came = "a function: call it in the forward of an nn.Module"
        case _:
            came = f"{type(given).__name__}"
    return BadSetting(
        "model: expected an nn.Module, or the path of an ONNX file, an exported program (.pt2), a transformers folder "
        f"or a model folder, got {came}"
    )


def load(store: str | os.PathLike[str], name: str) -> Half:
    """A version of a store: ``NAME``, which is the active version, or ``NAME@NUMBER``. Raises UnknownName, BadSetting
    where there is no store."""
    opened = given_store(store)
    return Half(version_called(name, opened), opened)


def _forms(form: str | None, folder: ModelFolder) -> tuple[tuple[str, ...], ModelFolder]:
    """The forms that are attempted, and the folder with the form that serves."""
    if form in (None, "auto", "both"):
        if form is None and folder.guessed is not None:
            form = "onnx" if folder.kind == "onnx" else "torch"
        else:
            return Options().forms, folder
    if form not in _ATTEMPTED:
        raise BadSetting(f"form={form!r}: expected one of auto, both, torch, onnx, live")
    if form == "live" and folder.module is not None:
        raise BadSetting(
            "form='live': a server makes the module anew from its code, and a module of a running program has none; "
            "give a model folder, or leave form out"
        )
    return _ATTEMPTED[form], replace(folder, spec=replace(folder.spec, form=form))


@dataclass(eq=False)
class _Asked:
    """The caller's arguments, as a model folder. ``samples_file`` is None where the folder's own samples are taken."""

    model: nn.Module | str | os.PathLike[str]
    samples: Mapping[str, Given] | str | os.PathLike[str] | None
    targets: Mapping[str, Given]
    name: str | None
    kind: str | Mapping[str, str] | None
    scratch: Path
    samples_file: Path | None = None

    def __post_init__(self) -> None:
        self._inputs = self.samples if isinstance(self.samples, Mapping) and self.samples else None
        if isinstance(self.samples, str | os.PathLike):
            self.samples_file = Path(self.samples)
        if self.targets and self._inputs is None:
            raise BadSetting("targets belong to the samples: give samples={input: array} beside them")

    def folder(self) -> ModelFolder:
        if self._inputs is not None:
            self.samples_file = self.scratch / "samples.safetensors"
            self._arrays = rows_in(self.samples_file, self._inputs, self.targets)
        if isinstance(self.model, nn.Module):
            folder = self._of_module(self.model)
        elif not isinstance(self.model, str | os.PathLike):
            raise _no_model(self.model)
        else:
            folder = folder_at(Path(self.model), self.samples_file, self.name, self._changed)
        if folder.guessed is None and self.kind is not None:
            raise BadSetting("kind: the model.toml of the folder says it; write it there, under [[outputs]]")
        self._name_targets(folder)
        return folder

    def _of_module(self, module: nn.Module) -> ModelFolder:
        if self._inputs is None:
            came = (
                "no samples"
                if self.samples is None or isinstance(self.samples, Mapping)
                else f"samples of the type {type(self.samples).__name__}"
            )
            raise BadSamples(
                "what a module takes is seen from example inputs: give samples={'x': array}, one for each argument of "
                f"forward, the first axis counts the samples; got {came}"
            )
        (self.scratch / "module.py").write_text(_NO_SOURCE)
        name = self.name or type(module).__name__.lower().strip("_") or "model"
        guess = guess_module(self.scratch, "module.py:build", name, self._arrays, module=module)
        if guess.samples is not None and self.samples_file is not None:
            rows_in(self.samples_file, guess.samples, {})
        return replace(guessed_folder(self._changed(guess), self.scratch), module=module)

    def _changed(self, guess: Guess) -> Guess:
        """The guess with the caller's names for the only input and the only output, and the kinds of outputs. The
        tensors of an ONNX file and the outputs of a transformers model keep their own names."""
        inputs, outputs = guess.spec.inputs, guess.spec.outputs
        if guess.source.endswith(".onnx"):
            return replace(guess, spec=replace(guess.spec, outputs=self._of_kind(outputs)))
        names = list(self._inputs or ())
        if len(inputs) == len(names) == 1:
            inputs = (replace(inputs[0], name=names[0]),)
        if len(outputs) == len(self.targets) == 1 and not guess.source.startswith("hf:"):
            outputs = (replace(outputs[0], name=next(iter(self.targets))),)
        return replace(guess, spec=replace(guess.spec, inputs=inputs, outputs=self._of_kind(outputs)))

    def _of_kind(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.kind is None:
            return outputs
        kinds = self.kind if isinstance(self.kind, Mapping) else {one.name: self.kind for one in outputs}
        if wrong := [name for name in kinds if name not in {one.name for one in outputs}]:
            raise BadSetting(
                f"kind: the model has no output '{wrong[0]}': it has {[one.name for one in outputs]}"
            )
        if wrong := [kind for kind in kinds.values() if kind not in KINDS]:
            raise BadSetting(f"kind={wrong[0]!r}: expected one of {', '.join(KINDS)}")
        return tuple(replace(one, kind=kinds.get(one.name, one.kind)) for one in outputs)

    def _name_targets(self, folder: ModelFolder) -> None:
        """The only target of a model with one output belongs to that output, whatever it is called."""
        outputs = [tensor.name for tensor in folder.spec.outputs]
        if len(outputs) == len(self.targets) == 1 and outputs[0] not in self.targets:
            assert self.samples_file is not None
            inputs = {key: array for key, array in self._arrays.items() if not key.startswith(TARGET)}
            rows_in(self.samples_file, inputs, {outputs[0]: next(iter(self.targets.values()))})
