"""Runs the operator's own code, and nothing of ours: started by file path in an interpreter of its own.

    python -P capture_child.py REQUEST.json

Imports torch and the model folder only, so that neither can meet our package by accident: a folder that
has its own ``models/`` or ``errors.py`` finds its own. Writes ``program.pt2`` and ``result.json`` into the
request's ``out`` folder; a failure is a ``result.json`` with the kind, a sentence and the traceback's tail.
"""

import importlib.machinery
import importlib.util
import inspect
import json
import os
import resource
import shutil
import sys
import traceback
import types
import zipfile
from pathlib import Path

# Largest |program − module| in FP32, and largest |batch n − alone|, as a share of the output's largest value.
# Kernels may sum in another order at another batch size; anything above is another answer.
TOLERANCE = 1e-4


class Refused(Exception):
    """A failure that has a sentence of its own (others show the user's traceback)."""


def main(request_file):
    request = json.loads(Path(request_file).read_text())
    out = Path(request["out"])
    try:
        result = capture(request, out)
    except BaseException as error:
        result = failure(error, request)
    (out / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0 if "error" not in result else 1)  # user threads and atexit hooks may not hold us back


def failure(error, request):
    if isinstance(error, Refused):
        return {"error": str(error), "traceback": ""}
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        limit = request["memory_limit_bytes"] / 2**30
        sentence = f"ran out of memory: the limit for the model's own code is {limit:.1f} GiB"
    else:
        sentence = f"{type(error).__name__}: {first_lines(error)}"
    return {"error": sentence, "traceback": tail(error, request)}


def first_lines(error):
    return "\n".join(str(error).strip().splitlines()[:12])


def tail(error, request):
    """The last frames of the user's own code and the very last one: between them lie torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    roots = [Path(root).resolve() for root in (request["folder"], *request["path"])]
    own = [frame for frame in frames if set(roots) & set(Path(frame.filename).parents)]
    shown = own[-6:] or frames[-6:]
    shown += [frame for frame in frames[-1:] if frame not in shown]
    return "Traceback (most recent call last):\n" + "".join(traceback.format_list(shown))[-4000:]


def capture(request, out):
    limit_memory(request["memory_limit_bytes"])
    folder = Path(request["folder"])
    os.chdir(folder)
    import torch  # before the folder is on the path: a sibling named as a module of Python's is not torch's

    sys.path[:0] = [str(folder), *request["path"]]
    torch.backends.mha.set_fastpath_enabled(False)  # its fused op would hide the layers from the policy
    torch.manual_seed(0)
    module = build(torch, request, folder)
    notes = load_weights(torch, module, request["weights"])
    notes += widen(torch, module)
    samples = load_samples(request)
    flat = Flat(module, request)
    with torch.no_grad():
        program = export(torch, flat, samples, request)
        facts = check(torch, flat, program, samples, request)
    save(torch, program, out / "program.pt2")
    return {"notes": notes + facts["notes"], "max_batch_size": facts["max_batch_size"], "dims": dims(program)}


def limit_memory(limit):
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def build(torch, request, folder):
    file, _, function = request["source"].partition(":")
    path = folder / file
    sys.modules[path.stem] = user_module = types.ModuleType(path.stem)
    loader = importlib.machinery.SourceFileLoader(path.stem, str(path))
    user_module.__spec__ = importlib.util.spec_from_loader(path.stem, loader)
    user_module.__file__ = str(path)
    loader.exec_module(user_module)
    if not callable(getattr(user_module, function, None)):
        raise Refused(f"{file} has no function '{function}', which source = {request['source']!r} names")
    module = getattr(user_module, function)()
    if not isinstance(module, torch.nn.Module):
        raise Refused(f"{file}:{function}() must give a torch.nn.Module, it gave {type(module).__name__}")
    return module.eval().requires_grad_(False)


def load_weights(torch, module, weights):
    if weights is None:
        return []
    if weights.endswith(".safetensors"):
        from safetensors.torch import load_file

        state = load_file(weights)
    else:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    wide = {name: t.float() if t.dtype in (torch.half, torch.bfloat16) else t for name, t in state.items()}
    try:
        module.load_state_dict(wide, strict=True)
    except RuntimeError as error:
        raise Refused(f"{Path(weights).name} does not fit the module: {first_lines(error)}") from None
    narrow = sum(state[name].dtype != wide[name].dtype for name in state)
    return [f"{narrow} half-precision tensors of {Path(weights).name} were widened to FP32"] if narrow else []


def widen(torch, module):
    half = [name for name, t in module.state_dict().items() if t.dtype in (torch.half, torch.bfloat16)]
    if half:
        module.float()
        return [f"{len(half)} half-precision tensors of the module were widened to FP32"]
    return []


def load_samples(request):
    from safetensors.torch import load_file

    tensors = load_file(request["samples"])
    return [tensors[spec["name"]] for spec in request["inputs"]]


class Flat:
    """The module's forward with the spec's inputs in order and its outputs as a tuple in order."""

    def __init__(self, module, request):
        self.module = module
        self.inputs = [spec["name"] for spec in request["inputs"]]
        self.outputs = request["outputs"]
        self.original = module.forward
        parameters = inspect.signature(self.original).parameters
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.by_name = all(name in parameters and parameters[name].kind in named for name in self.inputs)
        module.forward = self.forward  # hooks and parameter names stay the module's own

    def forward(self, *tensors):
        if self.by_name:
            answer = self.original(**dict(zip(self.inputs, tensors, strict=True)))
        else:
            answer = self.original(*tensors)
        return self.in_order(answer)

    def in_order(self, answer):
        if hasattr(answer, "keys"):
            missing = [name for name in self.outputs if name not in answer]
            if missing:
                raise Refused(f"forward gave outputs {sorted(answer.keys())}, but model.toml names {missing}")
            answer = tuple(answer[name] for name in self.outputs)
        answer = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
        if len(answer) != len(self.outputs):
            raise Refused(
                f"forward gave {len(answer)} outputs, model.toml names {len(self.outputs)}: {self.outputs}"
            )
        for name, value in zip(self.outputs, answer, strict=True):
            if not hasattr(value, "untyped_storage"):
                raise Refused(f"output '{name}' must be a tensor, forward gave {type(value).__name__}")
        return answer


def rows_of(samples, rows, request, start=0):
    """``rows`` samples from ``start`` on, wrapping around; one sample without its axis where not batched."""
    import torch

    if request["max_batch_size"] == 0:
        return [tensor[start % len(tensor)] for tensor in samples]
    return [tensor[(torch.arange(rows) + start) % len(tensor)] for tensor in samples]


def export(torch, flat, samples, request):
    batched = request["max_batch_size"] > 1
    example = rows_of(samples, min(3, max(1, request["max_batch_size"])), request)
    dynamic = tuple(
        {axis: dim(torch, spec, axis, batched, request) for axis in range(tensor.ndim)}
        for spec, tensor in zip(request["inputs"], example, strict=True)
    )
    return torch.export.export(flat.module, tuple(example), dynamic_shapes={"tensors": dynamic}, strict=False)


def dim(torch, spec, axis, batched, request):
    """How free an axis is to ``torch.export``: the batch must stay free, others as free as they can be."""
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


def check(torch, flat, program, samples, request):
    """Hold the program against the module at batch sizes 1, 2, 3 and max, and rows against themselves alone."""
    run = program.module(check_guards=False)
    largest = request["max_batch_size"]
    notes = []
    batches = sorted({b for b in (1, 2, 3, largest) if 0 < b <= largest}) or [1]
    for rows in batches:
        inputs = rows_of(samples, rows, request)
        mine, theirs = run(*inputs), flat.module(*inputs)
        for name, program_out, module_out in zip(request["outputs"], mine, theirs, strict=True):
            gap = distance(torch, program_out, module_out)
            if not gap <= TOLERANCE:
                raise Refused(
                    f"the captured program does not answer as the module does: output '{name}' at batch size "
                    f"{rows} differs by {gap:.3g} of its largest value; is something in forward random, "
                    "or does it keep state?"
                )
    if largest > 1 and (gap := batch_gap(torch, run, samples, request)) > TOLERANCE:
        notes.append(
            f"answers in a batch differ from answers alone by {gap:.3g} of the largest value: "
            "max_batch_size was set to 1"
        )
        largest = 1
    return {"notes": notes, "max_batch_size": largest}


def batch_gap(torch, run, samples, request):
    rows = min(request["max_batch_size"], 4)
    together = run(*rows_of(samples, rows, request))
    worst = 0.0
    for row in range(rows):
        alone = run(*rows_of(samples, 1, request, start=row))
        for one, many in zip(alone, together, strict=True):
            if many.ndim == 0 or many.shape[0] != rows:
                raise Refused(
                    f"an output has shape {list(many.shape)} for a batch of {rows}: its first axis must be "
                    "the batch; set max_batch_size = 0 for a model that is not batched"
                )
            worst = max(worst, distance(torch, many[row : row + 1], one, many))
    return worst


def distance(torch, one, other, scale_of=None):
    """Largest difference as a share of the largest value; infinite where shapes, dtypes or NaNs differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return float("inf")
    one, other = (torch.nan_to_num(t.double(), 0.0, 0.0, 0.0) for t in (one, other))
    scale = torch.nan_to_num((other if scale_of is None else scale_of).double(), 0.0, 0.0, 0.0).abs()
    largest = float(scale.max()) if scale.numel() else 0.0
    gap = float((one - other).abs().max()) if one.numel() else 0.0
    return gap if largest == 0.0 else gap / largest


def save(torch, program, path):
    """The archive with its sample inputs emptied: they are a pickle, and the other side opens none."""
    torch.export.save(program, path.with_suffix(".full.pt2"))
    with zipfile.ZipFile(path.with_suffix(".full.pt2")) as full, zipfile.ZipFile(path, "w") as bare:
        for item in full.infolist():
            with full.open(item) as source, bare.open(item, "w", force_zip64=True) as target:
                if "/sample_inputs/" not in item.filename:
                    shutil.copyfileobj(source, target)
    path.with_suffix(".full.pt2").unlink()


def dims(program):
    """Per input and axis what the program takes: a size, or [symbol, low, high]; high is null if unbounded."""
    import torch

    found = []
    names = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            shape = node.meta["val"].shape
            found.append([axis_range(program, s) if isinstance(s, torch.SymInt) else int(s) for s in shape])
    return found


def axis_range(program, size):
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)  # a size that the code turned out to depend on
    bounds = program.range_constraints.get(expression)
    if bounds is None:
        return [str(expression), 1, None]
    high = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 2**40 else None
    low = int(bounds.lower) if bounds.lower.is_Integer else 1
    return [
        str(expression),
        1 if low <= 2 else low,
        high,
    ]  # torch writes 2 where 1 works: it specialises 0 and 1


if __name__ == "__main__":
    main(sys.argv[1])
