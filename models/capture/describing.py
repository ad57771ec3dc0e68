"""Looks at a module that has no model.toml: what it takes and what it gives. The operator's code runs here.

    python -P -m halfeven.models.capture.describing REQUEST.json PARENT

Runs in a child, as `child.py` does; writes ``result.json``: ``inputs``, ``outputs`` (name, dtype,
shape as model.toml writes it), ``max_batch_size`` and ``doubts`` ([tensor, key, why]). Outputs are found by running
the module twice, with other sizes the second time: what changes is free.
"""

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import batch_found, child, failures, flat_answers, sources, trial_capture
from .agreement import axis_of_rows

if TYPE_CHECKING:
    from torch import Tensor, nn

from .batch_found import Call, Named

Request = Mapping[str, Any]

FREE = -1
_GIVE = "give --samples FILE with an array for each input, first axis = samples, or write model.toml by hand"
SIZES = ((2, 11), (3, 13))  # rows and length of the two runs: no length less one or two grows as the rows do


def described(request: Request) -> dict[str, Any]:
    os.chdir(request["folder"])
    torch = child.imported("torch")
    sys.path[:0] = [request["folder"]]
    return looked_at(torch, request)


def looked_at(torch: ModuleType, request: Request) -> dict[str, Any]:
    """The description of the request's module."""
    folder, source = Path(request["folder"]), request["source"]
    child.prepare(torch)
    with torch.no_grad():
        if source.endswith(".pt2"):
            return of_program(torch, folder / source)
        from .autocast import original_in_fp32, see_transformers

        with original_in_fp32():  # as the capture sees it
            module, _ = child.loaded(torch, request, "sdpa")
            with see_transformers():
                result, shown = (
                    of_transformers(torch, module, given_to(request))
                    if source.startswith("hf:")
                    else seen(torch, module, given_to(request))
                )
                if not result["max_batch_size"]:
                    return result
                return {**result, **trial_capture.tried(torch, module, shown, result, str(folder))}


# An exported program says what it takes; it is run for the names and shapes of what it gives.


def of_program(torch: ModuleType, path: Path) -> dict[str, Any]:
    program = torch.export.load(path)
    values = {node.name: node.meta["val"] for node in child.inputs_of(program)}
    if odd := [name for name, value in values.items() if not isinstance(value, torch.Tensor)]:
        raise failures.Refused(
            f"{path.name} takes '{odd[0]}', which is no tensor: export it with that value in the module's code"
        )
    if any(t.dtype in (torch.half, torch.bfloat16) for t in program.state_dict.values()):  # it is widened
        narrow = (torch.half, torch.bfloat16)
        values = {name: value.float() if value.dtype in narrow else value for name, value in values.items()}
    found = child.dims(program)
    first = [sizes[0] if sizes else 0 for sizes in found]
    free = [size for size in first if isinstance(size, list)]
    one = all(size == 1 for size in first)
    batched = one or (len(free) == len(first) and len({symbol for symbol, _, _ in free}) == 1)
    inputs = [
        {"name": name, "dtype": str(value.dtype), "shape": [_dim(size, found) for size in sizes]}
        for (name, value), sizes in zip(values.items(), found, strict=True)
    ]
    module = sources.program_module(torch, path, {})
    sources.widen(torch, module)
    runs = [_filled(torch, values, offset) for offset in (0, 1)]
    rows = 1 if one else (free[0][2] or 64) if free else 0
    result = _result(torch, partial(_named, module), inputs, runs, rows, batched)
    return {
        **result,
        "row_bytes": trial_capture.row_bytes(torch, program, runs[0].values()),
    }


def _dim(size: child.Size, found: Sequence[Sequence[child.Size]]) -> int | str:
    if isinstance(size, int):
        return size
    symbol, low, high = size
    symbols = [other[0] for sizes in found for other in sizes if isinstance(other, list)]
    bounds = "" if (low, high) == (1, None) else f"{low}..{'' if high is None else high}"
    name = f"size{symbols.index(symbol)}" if symbols.count(symbol) > 1 else ""
    return (f"{name}={bounds}" if bounds else name) if name else bounds or FREE


def _filled(torch: ModuleType, values: Mapping[str, Any], offset: int) -> dict[str, "Tensor"]:
    """Inputs for sizes that the program takes: of each symbol its least (2 at least), then one more."""
    symbols = {symbol for value in values.values() for size in value.shape if isinstance(size, torch.SymInt)
               for symbol in size.node.expr.free_symbols}  # fmt: skip
    sizes = {}
    for place, symbol in enumerate(sorted(symbols, key=str)):
        known = next(v.node.shape_env.var_to_range.get(symbol) for t in values.values() for v in t.shape
                     if isinstance(v, torch.SymInt))  # fmt: skip
        low = max(2, int(known.lower)) if known is not None and known.lower.is_Integer else 2
        sizes[symbol] = low + 3 * place + offset
    filled = {}
    for name, value in values.items():
        shape = [int(s.node.expr.subs(sizes)) if isinstance(s, torch.SymInt) else int(s) for s in value.shape]
        filled[name] = torch.randn(shape) if value.dtype.is_floating_point else torch.ones(shape)
        filled[name] = filled[name].to(value.dtype)
    return filled


# A transformers module names its main input; the configuration has the sizes. Samples know more: what else it takes.


def of_transformers(torch: ModuleType, module: Any, given: Named) -> tuple[dict[str, Any], Named]:
    """The dictionary of `_result`, and inputs by name that the module was run with. ``given``: sample tensors, which
    decide what it takes; of a text alone, whose length stays free, they decide the names."""
    main = module.main_input_name
    given = {n: t.float() if t.dtype == torch.float64 else t for n, t in given.items()}  # as the weights are
    first = next(iter(given.values()), torch.empty(0))
    is_text = main == "input_ids" and all(
        t.ndim == 2 and t.shape == first.shape and not t.is_floating_point() for t in given.values()
    )
    if given and not is_text:
        return seen(torch, module, given)
    try:
        return _by_config(torch, module, main, list(given))
    except failures.PLAIN as error:
        if given:  # a model that does not take every length
            return seen(torch, module, given)
        kind: Any = error
        kind.halfeven_inputs = (
            f"{type(module).__name__} does not run with inputs guessed from its configuration: {_GIVE}",
            error,
        )
        raise


def _by_config(
    torch: ModuleType, module: Any, main: str, given: Sequence[str]
) -> tuple[dict[str, Any], Named]:
    config, known = module.config, inspect.signature(module.forward).parameters
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or getattr(
            getattr(config, "vision_config", None), "image_size", 224
        )
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = [FREE, getattr(config, "num_channels", 3), height, width]
        inputs = [{"name": main, "dtype": "torch.float32", "shape": shape}]
        runs = [{main: torch.randn(rows, *shape[1:])} for rows, _ in SIZES]
        doubts = [[main, "shape", "sizes of config.json"]]
        return _result(torch, partial(_named, module), inputs, runs, 64, True, doubts), runs[0]
    if main != "input_ids":
        raise failures.Refused(
            f"{type(module).__name__} takes '{main}', of which nothing is guessed: {_GIVE}"
        )
    names = [name for name in ("input_ids", "attention_mask") if name in known]
    names += ["decoder_input_ids"] if getattr(config, "is_encoder_decoder", False) else []
    names = list(given) or names
    longest = getattr(config, "max_position_embeddings", None)
    axis = f"length=1..{longest}" if isinstance(longest, int) else "length"
    inputs = [{"name": name, "dtype": "torch.int64", "shape": [FREE, axis]} for name in names]
    runs = [{name: torch.ones(size, dtype=torch.int64) for name in names} for size in SIZES]
    doubts = [[names[0], "shape", "the longest is max_position_embeddings of config.json"]]
    left = [name for name in ("token_type_ids", "position_ids") if name in known and name not in names]
    doubts += (
        [["", "max_batch_size", f"further inputs of forward are left out: {', '.join(left)}"]] if left else []
    )
    return _result(torch, partial(_named, module), inputs, runs, 64, True, doubts), runs[0]


# Any other module is run with the inputs that the operator gives.


def given_to(request: Request) -> Named:
    """The operator's sample tensors by name, in forward's order; none where none were given."""
    from safetensors.torch import load_file

    stored = load_file(request["samples"]) if request["names"] else {}
    return {name: stored[name] for name in request["names"]}


def seen(torch: ModuleType, module: "nn.Module", given: Named) -> tuple[dict[str, Any], Named]:
    """Run a module with sample tensors (``given``: name → tensor) and describe its inputs and outputs.

    Gives the dictionary of `_result`, with the ``batch_axis`` of each tensor, ``whole`` (whether ``given`` is one
    sample) and ``left_out`` (outputs that are no tensors: name → type); and the tensors with the batch first, as
    shapes have it.
    """
    left_out = {}
    call = partial(_named, module, left_out=left_out)
    try:
        found = batch_found.find(torch, call, given)
        axes, (word, why) = (found, ("", "")) if isinstance(found, dict) else (batch_found.FIRST, found)
        shown = batch_found.in_front(given, axes["inputs"])
        runs = [
            shown if word == "whole" else batch_found.taken(torch, shown, {}, range(rows)) for rows in (2, 3)
        ]
        result = _seen(torch, batch_found.called_in_front(call, axes), shown, runs, word, why)
    except failures.PLAIN as error:
        failures.blame_samples(error, module.forward, given)
        raise
    for side in ("inputs", "outputs"):
        for tensor in result[side]:
            tensor["batch_axis"] = axes[side].get(tensor["name"], 0)
            if tensor["batch_axis"]:
                result["doubts"].append([tensor["name"], "batch_axis", batch_found.MOVED])
    return {**result, "whole": word in ("steps", "whole"), "left_out": left_out}, shown


def _seen(
    torch: ModuleType, call: Call, given: Named, runs: Sequence[Named], word: str, why: str
) -> dict[str, Any]:
    inputs = [{"name": n, "dtype": str(t.dtype), "shape": [*t.shape]} for n, t in given.items()]
    doubts = [[name, "shape", "the sizes of the given samples"] for name, t in given.items() if t.ndim > 1]
    if why:
        doubts.append(["", "max_batch_size", why])
    for tensor in inputs if word != "whole" else ():
        tensor["shape"][0] = FREE
    return _result(torch, call, inputs, runs, 64, not word, doubts)


def _result(
    torch: ModuleType,
    call: Call,
    inputs: list[dict[str, Any]],
    runs: Sequence[Named],
    rows: int,
    batched: bool,
    doubts: Sequence[list[str]] = (),
) -> dict[str, Any]:
    """Names, dtypes and shapes of the inputs and outputs, and the largest batch. ``call``: inputs by name → outputs by
    name; ``rows``: the largest batch of a model that is batched. A model is not batched where an output's first axis
    does not have the number of rows, or where another axis grows with it, too."""
    answers = [call(run) for run in runs]
    counts = [len(next(iter(run.values()))) if batched else 0 for run in runs]
    outputs = [
        {"name": name, "dtype": str(value.dtype), "shape": _free(value.shape, answers[1][name].shape)}
        for name, value in answers[0].items()
    ]
    batched = batched and all(
        answer[name].ndim > 0 and len(answer[name]) == count
        for answer, count in zip(answers, counts, strict=True)
        for name in answer
    )
    shapes = {name: [answer[name].shape for answer in answers] for name in answers[0]}
    paired = [
        name for name, (one, other) in shapes.items() if batched and axis_of_rows([one], other) is not None
    ]
    if paired:
        why = f"not batched, because each row of '{paired[0]}' has a place for each row"
        batched, doubts = False, [*doubts, ["", "max_batch_size", why]]
    for tensor in (*inputs, *outputs) if batched else ():
        tensor["shape"][0] = FREE
    return {
        "inputs": inputs,
        "outputs": outputs,
        "max_batch_size": rows if batched else 0,
        "doubts": list(doubts),
    }


def _free(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [size if size == again else FREE for size, again in zip(one, other, strict=True)]


def _called(module: "nn.Module", arrays: Named) -> Any:
    """The answers of the module, called as the capture calls it: its hooks see all inputs in order, whether forward
    gets them by name or not."""
    forward, names = module.forward, list(arrays)
    if child.takes_by_name(forward, names):
        module.forward = lambda *tensors: forward(**dict(zip(names, tensors, strict=True)))
    try:
        return module(*arrays.values())
    finally:
        module.forward = forward


def _named(module: "nn.Module", arrays: Named, left_out: dict[str, str] | None = None) -> dict[str, "Tensor"]:
    """The module's output tensors by name: the names that the module gives them, else ``output``, ``output1``, …
    Tuples and dictionaries inside the output are taken apart. ``left_out`` gets name → type of each output that is no
    tensor."""
    answer = _called(module, arrays)
    every = flat_answers.parts_of(answer)
    parts = [(name, part) for name, part in every if flat_answers.is_tensor(part)]
    if left_out is not None:
        left_out |= {
            name: type(part).__name__
            for name, part in every
            if not (part is None or flat_answers.is_tensor(part))
        }
    if not parts:
        raise failures.Refused(
            f"forward gave no tensor, but {type(answer).__name__}: let it give tensors, alone or in a tuple or dict"
        )
    if flat_answers.by_name(answer) is not None:
        return dict(parts)
    if len(parts) == 1:
        return {"output": parts[0][1]}
    return {f"output{place}": part for place, (_, part) in enumerate(parts)}


if __name__ == "__main__":
    child.main(sys.argv[1], sys.argv[2], described)
