"""Runs the operator's own code in an interpreter of its own.

    python -P -m halfeven.models.capture.child REQUEST.json PARENT

``PARENT`` is the number of the process that started it, with which it ends. Its memory is limited from outside
(`order/one_order.py`).

Of ours it imports, as parts of ``halfeven``, files of this folder and few that import no torch: a model folder with its
own ``models/`` or ``errors.py`` imports its own. ``sources.py`` makes the module, ``autocast.py`` and ``regions.py``
handle FP32 islands, ``flat_answers.py`` takes apart what forward gives, ``substitutes.py`` replaces operations that no
archive may have, ``more_rows.py`` and ``batch_place.py`` free a batch of 1, ``agreement.py`` and ``other_sizes.py``
compare program and module, ``failures.py`` and ``nonfinite.py`` make the messages.
Writes ``program.pt2``, ``weights.safetensors`` and ``result.json`` into the request's ``out`` folder; a failure is a
``result.json`` with a sentence and the traceback's tail.
"""

import gc
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from ..order.ends_with_parent import die_with
from . import agreement, failures, flat_answers, more_rows, own_hooks, sources
from .agreement import rows_of
from .failures import Refused, first_lines
from .kept_tensors import traced
from .other_sizes import sizes_that_hold
from .result_file import write_result

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram
    from torch.fx import Node

Request = Mapping[str, Any]
Traced = tuple["ExportedProgram", list[str], dict[str, Any]]  # with notes, and what was found of the batch
Size = int | list[Any]  # of an axis: a number, or [symbol, low, high]


def main(request_file: str, parent: str, work: Callable[[Request], dict[str, Any]] | None = None) -> NoReturn:
    """Write what ``work`` (by default: capture) finds into ``result.json``, or its error."""
    die_with(int(parent))
    request = json.loads(Path(request_file).read_text())
    try:
        result = (work or capture)(request)
    except BaseException as error:
        result = failures.described(error, request)
    write_result(Path(request["out"]), result)
    sys.stdout.flush()
    os._exit(0 if "error" not in result else 1)  # user threads and atexit hooks may not hold us back


def capture(request: Request) -> dict[str, Any]:
    folder = Path(request["folder"])
    os.chdir(folder)
    torch = imported("torch")  # before the folder is on the path: torch must not import the folder's files

    libraries = set(sys.path)
    sys.path[:0] = [str(folder), *request["path"]]
    result = captured(torch, request, Path(request["out"]))
    return {**result, "imported": sources.imported_files(libraries)}


def captured(torch: ModuleType, request: Request, out: Path) -> dict[str, Any]:
    """Trace the model of the request, and write the program and its weights into ``out``; gives the result."""
    prepare(torch)
    samples = load_samples(request)
    from .autocast import original_in_fp32

    with original_in_fp32() as regions:
        program, notes, facts = trace(torch, request, samples)
    notes += [*sorted(regions), *facts["notes"]]
    state = save(program, out)
    largest = facts["max_batch_size"]
    return {"notes": notes, "max_batch_size": largest, "dims": facts["dims"], "state": state}


def prepare(torch: ModuleType) -> None:
    """Settings of torch with which modules are run and traced."""
    torch.backends.mha.set_fastpath_enabled(False)  # its fused op would hide the layers from the policy
    # nn.Transformer reads its masks' values to choose a kernel, where no hint says that they are causal.
    torch.nn.modules.transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: (
        is_causal is True
    )
    torch.manual_seed(0)


def trace(torch: ModuleType, request: Request, samples: Sequence["Tensor"]) -> Traced:
    """The checked program of the request's source; of a transformers model in the attention that can be traced."""
    if request["source"].endswith(".pt2"):
        return of_program(torch, request, samples)
    if not request["source"].startswith("hf:"):
        return attempt(torch, request, samples, None)
    try:
        return attempt(torch, request, samples, "sdpa")
    except Exception as error:
        sdpa = error
    try:
        program, notes, facts = attempt(torch, request, samples, "eager")
    except Exception:
        raise sdpa from None
    return program, [*notes, f"written with eager attention: sdpa gave {type(sdpa).__name__}"], facts


def of_program(torch: ModuleType, request: Request, samples: Sequence["Tensor"]) -> Traced:
    """A program that was exported for one row: with a free batch where its answers are the same, else as it is."""
    if not more_rows.is_for_one_row(torch, request):
        return attempt(torch, request, samples, None)
    fixed = {**request, "max_batch_size": 1}
    try:
        program, notes, facts = attempt(torch, {**request, "free_batch": True}, samples, None)
        original = Flat(loaded(torch, request, None)[0], request).module
        agreement.same_alone(torch, program.module(check_guards=False), original, samples, fixed)
    except Exception as error:
        program, notes, facts = attempt(torch, fixed, samples, None)
        reason = f"its batch was not made free: {first_lines(error)[:300]}"
        return program, [*notes, "the program takes batches of 1 only, so max_batch_size is 1", reason], facts
    return program, [*notes, "the program was exported for one row: its batch was made free"], facts


def attempt(
    torch: ModuleType, request: Request, samples: Sequence["Tensor"], attention: str | None
) -> Traced:
    from .autocast import see_transformers

    module, notes = loaded(torch, request, attention)
    flat = Flat(module, request)
    example = rows_of(samples, min(3, max(1, request["max_batch_size"])), request)
    with torch.no_grad(), see_transformers():
        try:
            program = traced(torch, flat.module, lambda: export(torch, flat, samples, request), example)
            refuse_lacking(module, program)
            facts = agreement.check(torch, flat, program, samples, request)
            found, fixed = sizes_that_hold(torch, flat, program, samples, request, dims(program))
            facts |= {"dims": found, "notes": [*facts["notes"], *fixed]}
        except Exception as error:
            sources.refuse_scripts(module)
            failures.blame_inputs(error, module, flat.original, example, request)
            raise
    return program, notes, facts


def loaded(torch: ModuleType, request: Request, attention: str | None) -> tuple["nn.Module", list[str]]:
    """The module with its weights, in FP32, and what to tell of them."""
    module = sources.build(torch, request, Path(request["folder"]), attention)
    notes = sources.half_in_checkpoint(request, Path(request["folder"]))
    notes += sources.load_weights(torch, module, request["weights"])
    sources.refuse_lazy(module)
    return module, [*notes, *sources.widen(torch, module)]


def imported(name: str) -> ModuleType:
    """The module; no garbage is collected meanwhile: going through torch again and again is a quarter of its import."""
    if name not in sys.modules:
        gc.disable()
        try:
            importlib.import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    return sys.modules[name]


def refuse_lacking(module: "nn.Module", program: "ExportedProgram") -> None:
    """Refuse a checkpoint that lacks a weight which the outputs need: it would be random."""
    lacking = set(getattr(module, "lacking", ()))
    users = {node.name: node.users for node in program.graph.nodes if node.op == "placeholder"}
    needed = [
        spec.target
        for spec in program.graph_signature.input_specs
        if spec.target in lacking and users[spec.arg.name]
    ]
    if needed:
        raise Refused(f"the checkpoint has no weights for {needed[:5]}, which the outputs need")


def load_samples(request: Request) -> list["Tensor"]:
    from safetensors.torch import load_file

    tensors = load_file(request["samples"])
    return [tensors[spec["name"]] for spec in request["inputs"]]


def takes_by_name(forward: Callable[..., Any], names: Sequence[str]) -> bool:
    """True if the inputs are given to ``forward`` by their names: each is the name of one of its parameters, or
    ``forward`` has ``**kwargs`` and no other parameter that an input could be given to in order."""
    parameters = inspect.signature(forward).parameters
    kinds = inspect.Parameter
    named = {
        name
        for name, one in parameters.items()
        if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    if all(name in named for name in names):
        return True
    in_order = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL)
    ordered = {name for name, one in parameters.items() if one.kind in in_order}
    return ordered <= set(names) and any(one.kind is kinds.VAR_KEYWORD for one in parameters.values())


class Flat:
    """The module's forward with the spec's inputs in order and its outputs as a tuple in order.

    The batch is the first axis of each. The module has it on the request's ``batch_axes`` (`ModelSpec.batch_axes`).
    ``copies``: a forward that writes into its inputs is given copies, so that nobody else's rows are changed.
    """

    def __init__(self, module: "nn.Module", request: Request) -> None:
        self.module = module
        self.inputs = [spec["name"] for spec in request["inputs"]]
        self.outputs = request["outputs"]
        self.axes = request.get("batch_axes", {})
        self.original = own_hooks.forward_with_hooks(module)
        self.copies = self.writes = False
        self.by_name = takes_by_name(self.original, self.inputs)
        module.forward = self.forward  # the names of parameters stay the module's own

    def forward(self, *tensors: "Tensor") -> tuple["Tensor", ...]:
        given = () if self.copies else tensors
        versions = [tensor._version for tensor in given]
        if self.copies:
            tensors = tuple(tensor.clone() for tensor in tensors)
        if self.axes:
            axes = [self.axes["inputs"].get(name, 0) for name in self.inputs]
            tensors = tuple(as_called(*each) for each in zip(tensors, axes, strict=True))
        if self.by_name:
            answer = self.original(**dict(zip(self.inputs, tensors, strict=True)))
        else:
            answer = self.original(*tensors)
        self.writes = versions != [tensor._version for tensor in given]
        return self.in_order(answer)

    def in_order(self, answer: Any) -> tuple["Tensor", ...]:
        answer = flat_answers.in_order(answer, self.outputs)
        return self.batch_first(answer) if self.axes else answer

    def batch_first(self, answer: Sequence["Tensor"]) -> tuple["Tensor", ...]:
        moved = []
        for name, value in zip(self.outputs, answer, strict=True):
            axis = self.axes["outputs"].get(name, 0)
            if axis and value.ndim <= axis:
                raise Refused(
                    f"forward gave output '{name}' as {list(value.shape)}, which has no axis {axis}: mend its "
                    "batch_axis in model.toml"
                )
            moved.append(value.movedim(axis, 0) if axis else value)
        return tuple(moved)


def as_called(tensor: "Tensor", axis: int) -> "Tensor":
    """An input as the module has it. Contiguous: cuDNN's recurrent layers ask that of a state."""
    return tensor.movedim(0, axis).contiguous() if axis else tensor


def export(
    torch: ModuleType, flat: "Flat", samples: Sequence["Tensor"], request: Request
) -> "ExportedProgram":
    imported("torch._dynamo")  # most of what torch.export imports at its first call
    batched = request["max_batch_size"] > 1
    example = rows_of(samples, min(3, max(1, request["max_batch_size"])), request)
    dynamic = tuple(
        {axis: dim(torch, spec, axis, batched, request) for axis in range(tensor.ndim)}
        for spec, tensor in zip(request["inputs"], example, strict=True)
    )

    try:
        program = exported(torch, flat.module, example, dynamic)
        if flat.writes:
            flat.copies = True
            program = exported(torch, flat.module, example, dynamic)
        return program
    except Exception as error:
        failures.where_specialised(error, request, lambda: exported(torch, flat.module, example, dynamic))
        raise


def exported(
    torch: ModuleType, module: "nn.Module", example: Sequence["Tensor"], dynamic: tuple[Any, ...]
) -> "ExportedProgram":
    """The program with its regions taken in; traced again where one left casts (for the CPU, in control flow)."""
    from . import regions, substitutes  # they import torch

    program = torch.export.export(module, tuple(example), dynamic_shapes={"tensors": dynamic}, strict=False)
    if regions.has_casts(program):
        again = program.module(check_guards=False)
        program = torch.export.export(again, tuple(example), dynamic_shapes=dynamic, strict=False)
    regions.inline_regions(program)
    substitutes.substitute(program)
    return program


def dim(torch: ModuleType, spec: Mapping[str, Any], axis: int, batched: bool, request: Request) -> Any:
    """The freedom of an axis for ``torch.export``: the batch must stay free, other axes are as free as they can be."""
    if axis == 0 and request["max_batch_size"] > 0:
        return (
            torch.export.Dim.DYNAMIC(min=1, max=request["max_batch_size"])
            if batched
            else torch.export.Dim.STATIC
        )
    low, high = spec["dims"][axis]
    if low == high:
        return torch.export.Dim.STATIC
    return torch.export.Dim.AUTO(min=low, max=high) if high else torch.export.Dim.AUTO


def save(program: "ExportedProgram", out: Path) -> dict[str, str]:
    """Weights once, as safetensors; the archive without them and without its sample inputs, which are a pickle.

    Gives the name under which each entry of the state dict is stored: tied ones share it.
    """
    from ..archive.archive import save_program  # it imports torch
    from ..files.tensor_file import save_tensors  # imports NumPy

    stored, tensors, seen = {}, {}, {}
    for name, tensor in program.state_dict.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        stored[name] = seen.setdefault(place, name) if tensor.numel() else name
        if stored[name] == name:
            tensors[name] = tensor.detach().contiguous()
    save_tensors(out / "weights.safetensors", whole_storages(tensors))
    save_program(program, out / "program.pt2", weights=False)
    return stored


def whole_storages(tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Each tensor alone in its storage, as safetensors wants it: copied where it is a view beside others."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    return {
        name: tensor.clone() if storages.count(storage) > 1 else tensor
        for (name, tensor), storage in zip(tensors.items(), storages, strict=True)
    }


def dims(program: "ExportedProgram") -> list[list[Size]]:
    """The sizes of each input's axes that the program takes: a size, or [symbol, low, high]; high is null if
    unbounded."""
    import torch

    shapes = (node.meta["val"].shape for node in inputs_of(program))
    return [
        [axis_range(program, size) if isinstance(size, torch.SymInt) else int(size) for size in shape]
        for shape in shapes
    ]


def inputs_of(program: "ExportedProgram") -> list["Node"]:
    """The nodes of the program's inputs, in order."""
    names = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


def axis_range(program: "ExportedProgram", size: Any) -> Size:
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)  # a size that the code turned out to depend on
    bounds = program.range_constraints.get(expression)
    if bounds is None:
        return [str(expression), 1, None]
    high = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 2**40 else None
    low = int(bounds.lower) if bounds.lower.is_Integer else 1
    # Torch writes 2 where 1 works: it specialises 0 and 1.
    return [
        str(expression),
        1 if low <= 2 else low,
        high,
    ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
